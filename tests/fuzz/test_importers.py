"""Importers fed with anything: arrays of any shape under any geometry, any JSON, files of any bytes."""

import json

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moe_rl.routing import RoutingError, RoutingTrace, formats
from moe_rl.routing.formats import ModelRouting
from moe_rl.routing.formats.files import DECODERS, Payload, import_payload, read_payloads

IMPORTERS = {
    "vllm": lambda value, model, tokens: formats.from_vllm(value, model, tokens=tokens),
    "slime": lambda value, model, tokens: formats.from_slime(value, model, tokens=tokens),
    "verl jagged": lambda value, model, tokens: formats.from_verl_jagged([value], model, tokens=[tokens]),
}
KEYS = [
    "routed_experts", "prompt_routed_experts", "meta_info", "choices", "data", "shape", "dtype", "start",
    "tokens", "usage", "moe_topk_indices", "top_indices", "step", "layer", "num_tokens", "topk",
    "rollout_routed_experts", "sglext",
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=4) | st.just(2**70),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@st.composite
def geometries(draw):
    layers = draw(st.integers(1, 4))
    moe = draw(st.lists(st.integers(0, layers - 1), min_size=1, max_size=layers, unique=True).map(sorted))
    E = draw(st.integers(1, 300))
    return ModelRouting(layers, tuple(moe), E, draw(st.integers(1, min(E, 3))))


@st.composite
def routing_arrays(draw, model):
    """Mostly [rows, layers, K] of ids that fit, else of any integers and shape."""
    if draw(st.integers(0, 3)) == 0:
        dtypes = st.sampled_from([np.uint8, np.int16, np.int32, np.int64, np.uint64, np.float32, np.bool_])
        shapes = arrays.array_shapes(min_dims=0, max_dims=5, max_side=4)
        return draw(dtypes.flatmap(lambda dtype: arrays.arrays(dtype, shapes)))
    rows = draw(st.integers(0, 6))
    columns = draw(st.sampled_from([model.num_hidden_layers, len(model.moe_layer_ids)]))
    random = np.random.default_rng(draw(st.integers(0, 2**20)))
    ids = random.random((rows, columns, model.num_experts)).argsort(-1)[..., : model.top_k].astype(np.int32)
    if columns == model.num_hidden_layers and draw(st.booleans()):
        ids[:, [layer for layer in range(columns) if layer not in model.moe_layer_ids]] = 0
    return ids


def require_rows_of(trace, array, model):
    """Every valid row holds ids of the array, in the order of its rows."""
    RoutingTrace(trace.experts, trace.valid, trace.layer_ids, trace.num_experts).validate()
    assert (trace.layer_ids, trace.num_experts) == (model.moe_layer_ids, model.num_experts)
    imported = trace.experts[0][trace.valid[0]].numpy().astype(np.int64)
    rows = np.asarray(array, dtype=np.int64).reshape(-1, *np.shape(array)[1:])
    if rows.shape[1:] == (model.num_hidden_layers, model.top_k):
        rows = rows[:, list(model.moe_layer_ids)]
    at = 0
    for row in imported:
        while not np.array_equal(rows[at], row):
            at += 1
        at += 1


@pytest.mark.parametrize("name", IMPORTERS)
@pytest.mark.parametrize("cases", [60, pytest.param(3_000, marks=pytest.mark.slow)])
def test_any_array_under_any_geometry(campaign, name, cases):
    def check(model, data):
        array = data.draw(routing_arrays(model))
        rows = array.shape[0] if array.ndim else 1
        tokens = max(1, rows + data.draw(st.integers(0, 1)))
        try:
            trace = IMPORTERS[name](array, model, tokens)
        except RoutingError:
            return "refused"
        require_rows_of(trace, array, model)
        return "read"

    assert campaign(check, geometries(), st.data(), cases=cases).keys() == {"refused", "read"}


@pytest.mark.parametrize("cases", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_json_to_any_decoder(campaign, cases):
    model = ModelRouting(3, (0, 2), 8, 2)

    def check(name, value, tokens):
        try:
            trace = import_payload(Payload("", name, value), model, tokens)
        except RoutingError:
            return "refused"
        RoutingTrace(trace.experts, trace.valid, trace.layer_ids, trace.num_experts).validate()
        return "read"

    campaign(check, st.sampled_from(sorted(DECODERS)), JSON, st.integers(1, 4), cases=cases)


@pytest.mark.parametrize("cases", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_file(tmp_path, campaign, cases):
    model, path = ModelRouting(3, (0, 2), 8, 2), tmp_path / "file"
    npy = b"\x93NUMPY\x01\x00v\x00{'descr': '<i4'"
    starts = st.sampled_from([b"", b"\x93NUMPY", npy, b"PK\x03\x04", b"nrlre1:", b"[" * 99_999])

    def check(data):
        path.write_bytes(data)
        try:
            for payload in read_payloads(path):
                import_payload(payload, model)
        except RoutingError:
            return "refused"
        return "read"

    json_files = JSON.map(lambda value: json.dumps(value).encode())
    binary = st.tuples(starts, st.binary(max_size=40)).map(b"".join)
    campaign(check, json_files | binary | st.lists(json_files, max_size=3).map(b"\n".join), cases=cases)
