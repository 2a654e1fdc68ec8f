"""The file of a trace: what it keeps, what it costs, and that damage is refused."""

import dataclasses
import json
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from moe_rl.routing import (
    RoutingError,
    RoutingTrace,
    expert_change,
    expert_load,
    record_routing,
    replay_routing,
)
from moe_rl.routing.tokens import hash_tokens


def make(B=3, T=7, L=3, K=4, E=16, seed=0, valid=0.7, **header) -> RoutingTrace:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(B, T, L, E, generator=generator).argsort(-1)[..., :K]
    valid_BT = torch.rand(B, T, generator=generator) < valid
    trace = RoutingTrace(experts, valid_BT, tuple(range(1, L + 1)), E, **header)
    return trace.where(valid_BT)


def assert_equal(one: RoutingTrace, other: RoutingTrace) -> None:
    assert torch.equal(one.experts.long(), other.experts.long())
    assert torch.equal(one.valid, other.valid)
    for name in ("layer_ids", "num_experts", "source", "weights_version"):
        assert getattr(one, name) == getattr(other, name)
    assert (one.token_hash is None) == (other.token_hash is None)
    assert one.token_hash is None or torch.equal(one.token_hash, other.token_hash)


def as_sets(trace: RoutingTrace) -> RoutingTrace:
    return dataclasses.replace(trace, experts=trace.experts.sort(-1).values)


@settings(max_examples=60, deadline=None)  # tables of a new topology take up to 0.1 s
@given(st.data(), st.booleans())
def test_what_is_saved_is_loaded(tmp_path_factory, data, ordered):
    E = data.draw(st.sampled_from([1, 2, 3, 8, 60, 128, 256, 257, 512, 40_000]), label="E")
    K = data.draw(st.integers(1, min(E, 12 if E < 1000 else 2)), label="K")
    B, T, L = (data.draw(st.integers(low, 5)) for low in (0, 0, 1))
    trace = make(B, T, L, K, E, data.draw(st.integers(0, 99)), source="engine", weights_version=7)
    trace = trace.for_tokens(torch.arange(B * T).view(B, T))
    path = tmp_path_factory.mktemp("trace") / "file"
    trace.save(path, ordered)
    loaded = RoutingTrace.load(path)
    assert_equal(loaded, trace if ordered else as_sets(trace))
    assert loaded.experts.dtype == (torch.uint8 if E <= 256 else torch.int16 if E <= 32_768 else torch.int32)


def test_the_layout_by_hand(tmp_path):
    """2 of 4 experts, 3 rows of which one is padding, 2 layers: 4 bits in order, ⌈log2 6⌉ = 3 as sets."""
    experts = torch.tensor([[[[3, 1], [0, 2]], [[0, 0], [0, 0]], [[2, 3], [1, 0]]]])
    trace = RoutingTrace(experts, torch.tensor([[True, False, True]]), (0, 5), 4)
    trace.save(tmp_path / "ordered")
    tensors = load_file(tmp_path / "ordered")
    # lowest bits first: 3, 1, 0, 2 then 2, 3, 1, 0
    assert tensors["experts"].tolist() == [3 | 1 << 2 | 0 << 4 | 2 << 6, 2 | 3 << 2 | 1 << 4 | 0 << 6]
    assert tensors["valid"].tolist() == [[0b101]]
    trace.save(tmp_path / "sets", ordered=False)
    # ranks: {1, 3}: C(1, 1) + C(3, 2) = 4; {0, 2}: 0 + 1; {2, 3}: 2 + 3; {0, 1}: 0
    assert load_file(tmp_path / "sets")["experts"].tolist() == [4 | 1 << 3 | (5 & 0b11) << 6, 5 >> 2 | 0 << 1]


@pytest.mark.parametrize(
    ("E", "K"), [(128, 8), (256, 8), (384, 8), (128, 4), (8, 2), (16, 1), (512, 10), (768, 12)]
)
def test_files_cost_their_bits(tmp_path, E, K):
    trace = make(B=2, T=700, L=12, K=K, E=E, valid=0.9)
    token_layers = int(trace.valid.sum()) * 12
    size = {}
    for ordered in (True, False):
        trace.save(tmp_path / "trace", ordered)
        size[ordered] = 8 * (tmp_path / "trace").stat().st_size
    spare = 8 * 600 + 2 * 700  # headers, and one bit a row
    assert size[True] <= token_layers * K * (E - 1).bit_length() + spare
    bound = token_layers * (comb(E, K) - 1).bit_length()
    assert bound <= size[False] <= 1.05 * bound + spare


def test_sets_are_enough_for_drift(tmp_path):
    old, new = make(seed=0, valid=1), make(seed=1, valid=1)
    old.save(tmp_path / "old", ordered=False)
    loaded = RoutingTrace.load(tmp_path / "old")
    assert (
        expert_change(loaded, new).changed_experts.tolist()
        == expert_change(old, new).changed_experts.tolist()
    )
    assert torch.equal(expert_load(loaded), expert_load(old))


@pytest.mark.parametrize(("K", "ordered", "bitwise"), [(4, True, True), (2, False, True), (4, False, False)])
def test_replay_of_a_file(tmp_path, build, batch, K, ordered, bitwise):
    """In order, bitwise; as sets, the same experts and the same sums in another order. Two terms have one."""
    ids, mask = batch
    model = build("qwen3_moe", num_experts_per_tok=K, num_experts=16)
    with torch.no_grad(), record_routing(model) as recorder:
        plain = model(input_ids=ids, attention_mask=mask).logits
    trace = recorder.trace()
    trace.save(tmp_path / "trace", ordered)
    loaded = RoutingTrace.load(tmp_path / "trace")
    with torch.no_grad(), replay_routing(model, loaded) as replay:
        logits = model(input_ids=ids, attention_mask=mask).logits
    assert expert_change(trace, replay.native).sets == 0
    assert torch.equal(logits, plain) == bitwise
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ordered", [True, False])
def test_sequences_are_read_on_demand(tmp_path, ordered):
    trace = make(B=5, E=512, K=10, source="engine").for_tokens(torch.arange(35).view(5, 7))
    trace.save(tmp_path / "trace", ordered)
    kept = trace if ordered else as_sets(trace)
    file = RoutingTrace.open(tmp_path / "trace")
    assert (len(file), file.shape, file.ordered, file.top_k) == (5, (5, 7), ordered, 10)
    assert torch.equal(file.valid, trace.valid)
    for rows in (
        0,
        -1,
        slice(1, 4),
        slice(None, None, 2),
        [3, 1, 1],
        [],
        torch.tensor([True] * 2 + [False] * 3),
    ):
        assert_equal(file[rows], kept[rows])
    with pytest.raises(RoutingError, match=r"sequences \[5\]"):
        file[5]


def test_only_the_sequences_asked_for_are_checked_and_read(tmp_path):
    trace = make(B=3, valid=1)
    trace.save(tmp_path / "trace")
    data = bytearray((tmp_path / "trace").read_bytes())
    start = data.index(load_file(tmp_path / "trace")["experts"].tobytes())
    data[start] ^= 1  # of the first sequence
    (tmp_path / "trace").write_bytes(data)
    file = RoutingTrace.open(tmp_path / "trace")
    assert_equal(file[1:], trace[1:])
    with pytest.raises(RoutingError, match="checksum of sequence 0"):
        file[0]


@pytest.mark.parametrize("ordered", [True, False])
def test_no_altered_byte_is_read_as_another_trace(tmp_path, ordered):
    trace = make(B=2, T=5, source="engine", weights_version=3).for_tokens(torch.arange(10).view(2, 5))
    path = tmp_path / "trace"
    trace.save(path, ordered)
    kept, data = trace if ordered else as_sets(trace), path.read_bytes()
    refused = 0
    for place in range(len(data)):
        flip = 1 << place % 8
        path.write_bytes(data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :])
        try:
            assert_equal(RoutingTrace.load(path), kept)  # what means nothing, such as space in JSON
        except RoutingError:
            refused += 1
    assert refused > 0.97 * len(data)


def test_no_truncated_file_is_read(tmp_path):
    path = tmp_path / "trace"
    make().save(path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(RoutingError, match="not a routing trace, or damaged"):
            RoutingTrace.load(path)


def test_files_that_are_no_trace(tmp_path):
    path = tmp_path / "other.safetensors"
    save_torch({"experts": torch.zeros(1)}, path)
    with pytest.raises(RoutingError, match="not a routing trace"):
        RoutingTrace.load(path)
    path.write_bytes(b"not a safetensors file at all")
    with pytest.raises(RoutingError, match="not a routing trace"):
        RoutingTrace.load(path)
    save_file({}, path, metadata={"moe_rl.routing_trace": json.dumps({"version": 99})})
    with pytest.raises(RoutingError, match="format 99"):
        RoutingTrace.load(path)
    for header in ("[]", "{}", "1", "{", '{"version": 2, "shape": [1]}'):
        save_file({}, path, metadata={"moe_rl.routing_trace": header})
        with pytest.raises(RoutingError, match="not a routing trace"):
            RoutingTrace.load(path)
    with pytest.raises(FileNotFoundError):
        RoutingTrace.load(tmp_path / "missing.safetensors")


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_experts", value) for value in (1.5, -1, 0, "3", None, True, 10**30)]
    + [("top_k", value) for value in (2.0, 0, -1, 4, [2], 10**30)]
    + [("layer_ids", value) for value in (["a"], [-1], [10**30], 0, None, [0.5], "0", [], [0, 1])]
    + [("shape", value) for value in ([1, 1.0], [-1, 1], [1], [1, 1, 1], "11", None, [1, 10**30])]
    + [("ordered", value) for value in ("x", 1, None)]
    + [("source", 1), ("weights_version", "1")],
)
def test_headers_of_wrong_types_are_refused(tmp_path, name, value):
    path = tmp_path / "trace"
    make(B=1, T=1, L=1, K=2, E=3).save(path)
    text = json.loads(path.read_bytes()[8:].split(b"}}", 1)[0] + b"}}")["__metadata__"][
        "moe_rl.routing_trace"
    ]
    header = json.loads(text) | {name: value}
    save_file(load_file(path), path, metadata={"moe_rl.routing_trace": json.dumps(header)})
    with pytest.raises(RoutingError):
        RoutingTrace.load(path)


def test_a_file_with_valid_checksums_and_impossible_content_is_refused(tmp_path):
    """What a writer with a bug would leave: every check but the ids' own passes."""
    import zlib

    path = tmp_path / "trace"

    def write(ordered: bool, experts: list[int]) -> None:
        trace = RoutingTrace(torch.tensor([[[[0, 1]]]]), torch.ones(1, 1, dtype=torch.bool), (0,), 3)
        trace.save(path, ordered)
        tensors = load_file(path)
        text = json.loads(path.read_bytes()[8:].split(b"}}", 1)[0] + b"}}")["__metadata__"]
        tensors["experts"] = np.array(experts, np.uint8)
        check = zlib.crc32(
            tensors["experts"],
            zlib.crc32(tensors["valid"], zlib.crc32(text["moe_rl.routing_trace"].encode())),
        )
        tensors["checksum"] = np.array([check], np.uint32)
        save_file(tensors, path, metadata=text)

    write(True, [2 | 1 << 2])
    assert RoutingTrace.load(path).experts.tolist() == [[[[2, 1]]]]
    write(False, [2])
    assert RoutingTrace.load(path).experts.tolist() == [[[[1, 2]]]]
    for ordered, experts, reason in [
        (True, [3 | 1 << 2], r"\[0, 3\)"),
        (True, [1 | 1 << 2], "twice"),
        (False, [3], "too large"),
        (True, [2 | 1 << 2, 0], "do not fill"),
    ]:
        write(ordered, experts)
        with pytest.raises(RoutingError, match=reason):
            RoutingTrace.load(path)


def test_saving_refuses_bad_ids_and_replaces_a_file_whole(tmp_path):
    path = tmp_path / "trace"
    trace = make()
    trace.save(path)
    bad = dataclasses.replace(trace, experts=torch.ones_like(trace.experts))
    with pytest.raises(RoutingError, match="twice"):
        bad.save(path)
    assert_equal(RoutingTrace.load(path), trace)
    assert [file.name for file in tmp_path.iterdir()] == ["trace"]


def test_a_token_hash_tells_tokens_positions_and_sequences_apart():
    ids = torch.tensor([[5, 6, 7, 0], [5, 7, 6, 0], [6, 5, 7, 0], [0, 5, 6, 7]])
    mask = ids > 0
    hashes = hash_tokens(ids, mask)
    assert hashes.dtype == torch.int64 and len(set(hashes.tolist())) == 4
    assert torch.equal(hash_tokens(ids[:3, :3]), hashes[:3])  # padding on the right does not count
    assert torch.equal(hash_tokens(ids + 9 * ~mask, mask), hashes)
    assert not torch.equal(hash_tokens(ids), hashes)
    # by hand: SplitMix64's first output for the seeds (0 << 32) + 0 and (1 << 32) + 3, added
    assert hash_tokens(torch.tensor([[0]])).tolist() == [0xE220A8397B1DCDAF - 2**64]
