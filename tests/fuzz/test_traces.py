"""Saved traces: what is written is read, and of damage nothing is read as another trace."""

import dataclasses
import json

import pytest
import torch
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from moe_rl.routing import RoutingError, RoutingTrace

FEW_OR_MANY = [60, pytest.param(4_000, marks=pytest.mark.slow)]


@st.composite
def traces(draw):
    """Any topology and shape, with any header."""
    E = draw(st.integers(1, 1024) | st.sampled_from([1, 2, 8, 16, 128, 256, 257, 1024]))
    K = draw(st.integers(1, min(E, 16)))
    B, T, L = draw(st.integers(0, 4)), draw(st.integers(0, 6)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    experts_BTLK = torch.rand(B, T, L, E, generator=generator).argsort(-1)[..., :K]
    valid_BT = torch.rand(B, T, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    trace = RoutingTrace(
        experts_BTLK.to(draw(st.sampled_from([torch.int16, torch.int32, torch.int64]))),
        valid_BT,
        tuple(draw(st.lists(st.integers(0, 200), min_size=L, max_size=L))),  # an index may repeat
        E,
        source=draw(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
        weights_version=draw(st.none() | st.integers(-(2**70), 2**70)),
    ).where(valid_BT)
    if draw(st.booleans()):
        trace = trace.for_tokens(torch.randint(0, 50_000, (B, T), generator=generator))
    return trace


def as_read(trace, ordered):
    """What a file of `trace` holds: as sets, the ids in ascending order."""
    return trace if ordered else dataclasses.replace(trace, experts=trace.experts.sort(-1).values)


def same(one, other):
    hashes = [trace.token_hash for trace in (one, other)]
    return (
        torch.equal(one.experts.long(), other.experts.long())
        and torch.equal(one.valid, other.valid)
        and all(
            getattr(one, name) == getattr(other, name)
            for name in ("layer_ids", "num_experts", "source", "weights_version")
        )
        and (hashes == [None, None] or (None not in hashes and torch.equal(*hashes)))
    )


@pytest.mark.parametrize("cases", FEW_OR_MANY)
def test_what_is_saved_is_loaded(tmp_path, campaign, cases):
    path = tmp_path / "trace"

    def check(trace, ordered, rows):
        trace.save(path, ordered)
        kept = as_read(trace, ordered)
        assert same(RoutingTrace.load(path), kept)
        rows = [row % len(trace.valid) for row in rows] if len(trace.valid) else []
        assert same(RoutingTrace.open(path)[rows], kept[rows])
        return "ordered" if ordered else "sets"

    endings = campaign(check, traces(), st.booleans(), st.lists(st.integers(0, 9), max_size=3), cases=cases)
    assert endings.keys() == {"ordered", "sets"}


@pytest.mark.parametrize("cases", FEW_OR_MANY)
def test_a_damaged_file_is_refused_or_reads_as_before(tmp_path, campaign, damaged, cases):
    path = tmp_path / "trace"

    def check(trace, ordered, data):
        trace.save(path, ordered)
        good = path.read_bytes()
        path.write_bytes(data.draw(damaged(good)))
        try:
            read = RoutingTrace.load(path)
        except RoutingError:
            return "refused"
        assert same(read, as_read(trace, ordered))
        return "unchanged"

    endings = campaign(check, traces(), st.booleans(), st.data(), cases=cases)
    assert endings["refused"] > 0.8 * endings.total()


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, False])
def test_every_bit_and_every_length(tmp_path, record_property, ordered):
    """Exhaustive on one file of 128 experts, top-8, with every header field."""
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand(2, 6, 3, 128, generator=generator).argsort(-1)[..., :8]
    valid = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    trace = RoutingTrace(experts, valid, (1, 2, 3), 128, source="engine", weights_version=3).where(valid)
    trace = trace.for_tokens(torch.arange(12).view(2, 6))
    path = tmp_path / "trace"
    trace.save(path, ordered)
    kept, good = as_read(trace, ordered), path.read_bytes()
    flipped = (
        good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :]
        for at in range(len(good))
        for bit in range(8)
    )
    cut = (good[:length] for length in range(len(good)))
    refused = unchanged = 0
    for data in (*flipped, *cut):
        path.write_bytes(data)
        try:
            assert same(RoutingTrace.load(path), kept)
            unchanged += 1
        except RoutingError:
            refused += 1
    name = f"fuzz/test_traces.py::every bit and length, ordered={ordered}"
    record_property("fuzz cases", f"{name}: {refused + unchanged} cases ({refused} refused)")
    assert refused > 0.97 * 9 * len(good)


def test_a_flipped_header_of_a_trace_without_sequences(tmp_path):
    """No sequence is read whose checksum would cover the header."""
    path = tmp_path / "trace"
    trace = RoutingTrace(torch.zeros(0, 3, 2, 2, dtype=torch.uint8), torch.ones(0, 3) > 0, (1, 3), 8)
    trace.save(path)
    good, refused = path.read_bytes(), 0
    for at in range(len(good)):
        for bit in (0, 1):  # a digit becomes another
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
            try:
                assert same(RoutingTrace.load(path), trace)
            except RoutingError:
                refused += 1
    assert refused > 0.97 * 2 * len(good)


@pytest.mark.parametrize(
    "change", [{"num_experts": 1 << 30}, {"num_experts": 60_000, "top_k": 30_000}, "[" * 100_000]
)
def test_a_header_that_would_cost_minutes_or_the_stack_is_refused(tmp_path, change):
    """The tables of sets of 60,000 experts take gigabytes: they are not built before the sizes fit."""
    path = tmp_path / "trace"
    trace = RoutingTrace(torch.tensor([[[[0, 1]]]]), torch.ones(1, 1, dtype=torch.bool), (0,), 3)
    trace.save(path, ordered=False)
    with safe_open(path, framework="np") as file:
        name, text = next(iter(file.metadata().items()))
    header = change if isinstance(change, str) else json.dumps(json.loads(text) | change)
    save_file(load_file(path), path, metadata={name: header})
    with pytest.raises(RoutingError, match="damaged"):
        RoutingTrace.load(path)


def test_more_experts_than_a_file_holds_are_refused_on_saving(tmp_path):
    experts = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    trace = RoutingTrace(experts, torch.ones(1, 1, dtype=torch.bool), (0,), 65_537)
    with pytest.raises(RoutingError, match="up to 65536 experts, got 65537"):
        trace.save(tmp_path / "trace")
