"""Damaged payloads: a RoutingError or what the payload says, never another exception, never another trace."""

import base64
import copy
import io
import json

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from moe_rl.routing import RoutingError, RoutingTrace
from moe_rl.routing.formats.files import import_payload, read_payloads

R = 7
NUMBERS = [-1, 0, 1, 2, 3, 5, 12, 255, 256, 2**31, 2**70, 1.5, float("nan")]
JUNK = st.sampled_from([None, True, "", "x", [], {}, *NUMBERS])
DTYPES = (np.uint8, np.int8, np.int16, ">u2", np.int32, np.uint64, np.int64, np.float32, bool, object, "S1")


def damage_array(array, data):
    """Another dtype, shape or id, rows lost, repeated or shifted."""
    array = array.copy()
    kinds = ["roll", "dtype", "shape", "cut", "repeat"] + ["id", "row"] * (array.dtype.kind in "iu")
    kind = data.draw(st.sampled_from(kinds))
    if kind == "id" and array.size:
        index = data.draw(st.integers(0, array.size - 1))
        info = np.iinfo(array.dtype)
        array.flat[index] = data.draw(st.integers(max(-3, info.min), min(300, info.max)))
    elif kind == "row" and len(array):
        low = 0 if array.dtype.kind == "u" else -1
        array[data.draw(st.integers(0, len(array) - 1))] = data.draw(st.integers(low, 1))
    elif kind == "roll":
        array = np.roll(array, data.draw(st.integers(-2, 2)), axis=data.draw(st.integers(0, array.ndim - 1)))
    elif kind == "dtype":
        array = array.astype(data.draw(st.sampled_from(DTYPES)))
    elif kind == "shape":
        axes = data.draw(st.permutations(range(array.ndim)))
        shapes = [array.transpose(axes), array.reshape(-1), array[None], array[..., None]]
        array = data.draw(st.sampled_from(shapes))
    elif kind == "cut":
        array = array[data.draw(st.integers(0, 2)) : data.draw(st.integers(0, len(array)))]
    else:
        array = np.concatenate([array, array[: data.draw(st.integers(0, len(array)))]])
    return array


def damage_text(text, data):
    """Characters replaced, lost or added; among them digits and separators, which change shapes."""
    if not text:
        return "A"
    at = data.draw(st.integers(0, len(text) - 1))
    kind = data.draw(st.sampled_from(["replace", "cut", "insert", "drop"]))
    new = data.draw(st.sampled_from("AB/+=0123x:,([{}'\"\n\x00é "))
    pieces = {
        "replace": text[:at] + new + text[at + 1 :],
        "cut": text[:at],
        "insert": text[:at] + new + text[at:],
        "drop": text[:at] + text[at + 1 :],
    }
    return pieces[kind]


def damage(value, data):
    """One fault somewhere in a payload."""
    if isinstance(value, torch.Tensor):
        array = damage_array(value.numpy(), data)
        is_tensor = array.dtype.kind in "iufb" and array.dtype.isnative
        return torch.from_numpy(np.ascontiguousarray(array)) if is_tensor else array
    if isinstance(value, np.ndarray):
        return damage_array(value, data)
    if isinstance(value, str):
        return damage_text(value, data)
    if data.draw(st.integers(0, 7)) == 0:
        return data.draw(JUNK)
    if isinstance(value, dict) and value:
        key = data.draw(st.sampled_from(sorted(value)))
        if data.draw(st.integers(0, 7)) == 0:
            return {name: value[name] for name in value if name != key}
        return {**value, key: damage(value[key], data)}
    if isinstance(value, list) and value:
        at = data.draw(st.integers(0, len(value) - 1))
        kind = data.draw(st.integers(0, 9))
        changed = {0: [], 1: [value[at]] * 2}.get(kind, [damage(value[at], data)])
        return [*value[:at], *changed, *value[at + 1 :]]
    return data.draw(JUNK)


def require_what_it_says(trace, value, source, model):
    """Every valid row of an accepted trace is the payload's row of that position, as plainly read."""
    assert isinstance(trace, RoutingTrace)
    RoutingTrace(trace.experts, trace.valid, trace.layer_ids, trace.num_experts).validate()
    assert trace.layer_ids == model.moe_layer_ids
    start, rows = source.naive(value)
    rows = np.asarray(rows).astype(np.int64)
    if rows.shape[1] == model.num_hidden_layers:
        rows = rows[:, list(model.moe_layer_ids)]
    positions = trace.valid[0].nonzero().flatten().numpy()
    assert np.array_equal(trace.experts[0, positions].numpy(), rows[positions - start])
    unread = set(range(start, start + len(rows))) - set(positions.tolist())
    dummy = [list(range(model.top_k))] * len(model.moe_layer_ids)
    for position in unread:  # a missing row, or padding from the last token on
        row = rows[position - start]
        padding = (row == 0).all() or row.tolist() == dummy
        assert (row == -1).all() or (padding and position >= trace.valid.shape[1] - 1)


@pytest.mark.parametrize("cases", [150, pytest.param(1_000, marks=pytest.mark.slow)])
def test_a_damaged_payload_is_refused_or_read_as_it_says(lay, source, campaign, cases):
    def check(data):
        value = source.write(lay.draw(R, seed=3))
        for _ in range(data.draw(st.integers(1, 2))):
            value = damage(copy.deepcopy(value), data)
        tokens = R + data.draw(st.integers(0, 1))
        try:
            trace = source.read(value, tokens)
        except RoutingError:
            return "refused"
        require_what_it_says(trace, value, source, lay.model)
        return "read"

    campaign(check, st.data(), cases=cases)


def file_of(lay, name, experts):
    """The bytes of a file of some format."""
    if name == "npy":
        return base64.b64decode(lay.npy(experts))
    if name == "miles":
        stream = io.BytesIO()
        torch.save([[torch.from_numpy(experts[:, layer].copy())] for layer in range(3)], stream)
        return stream.getvalue()
    value = lay.sources[name].write(experts)
    records = value if isinstance(value, list) else [value]
    return "\n".join(r if isinstance(r, str) else json.dumps(r) for r in records).encode()


@pytest.mark.parametrize("cases", [400, pytest.param(8_000, marks=pytest.mark.slow)])
def test_a_damaged_file_is_refused_or_holds_a_checked_trace(lay, tmp_path, campaign, damaged, cases):
    names = ["vllm http", "vllm 0.21", "sglang", "nemo-rl", "prime-rl", "router tracer", "npy", "miles"]
    files = {name: file_of(lay, name, lay.draw(R, seed=3)) for name in names}
    path = tmp_path / "damaged"

    def check(data):
        path.write_bytes(data.draw(damaged(files[data.draw(st.sampled_from(names))])))
        try:
            traces = [import_payload(payload, lay.model) for payload in read_payloads(path)]
        except RoutingError:
            return "refused"
        for trace in traces:
            RoutingTrace(trace.experts, trace.valid, trace.layer_ids, trace.num_experts).validate()
        return "read"

    assert campaign(check, st.data(), cases=cases).keys() == {"refused", "read"}
