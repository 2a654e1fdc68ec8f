"""Traces appended to disk."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from moe_rl.routing import RoutingError, RoutingTrace
from moe_rl.routing.stream import TraceStream, TraceWriter

LAYERS, E, K = (1, 3), 16, 4


def make(B=2, T=5, seed=0) -> RoutingTrace:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(B, T, 2, E, generator=generator).argsort(-1)[..., :K]
    valid = torch.rand(B, T, generator=generator) < 0.8
    return RoutingTrace(experts, valid, LAYERS, E).where(valid)


def equal(one: RoutingTrace, other: RoutingTrace) -> bool:
    return torch.equal(one.valid, other.valid) and torch.equal(one.experts.long(), other.experts.long())


@pytest.mark.parametrize("buffer_bytes", [1, 5_000, 1 << 20])
def test_sequences_of_any_length(tmp_path, buffer_bytes):
    traces = [make(B, T, seed) for seed, (B, T) in enumerate([(2, 5), (1, 7), (3, 2), (1, 6)])]
    with TraceWriter(tmp_path / "s", LAYERS, E, K, buffer_bytes=buffer_bytes) as writer:
        for trace in traces:
            writer.append(trace)
    stream = TraceStream(tmp_path / "s")
    assert stream.complete and len(stream) == {1: 4, 5_000: 2, 1 << 20: 1}[buffer_bytes]
    assert equal(stream.load(), RoutingTrace.cat([trace.fit(7) for trace in traces]))
    read = list(stream)
    assert sum(len(trace.valid) for trace in read) == 7
    assert all(trace.experts.dtype == torch.uint8 for trace in read)


def test_rows_of_the_same_sequences(tmp_path):
    steps = [make(T=T, seed=T) for T in (5, 1, 1, 3)]
    with TraceWriter(tmp_path / "s", LAYERS, E, K, dim=1, ordered=False, buffer_bytes=5_000) as writer:
        for step in steps:
            writer.append(step)
        with pytest.raises(RoutingError, match="2 sequences by rows, got rows of 3"):
            writer.append(make(B=3))
    stream = TraceStream(tmp_path / "s")
    whole = RoutingTrace.cat(steps, dim=1)
    assert len(stream) > 1 and stream.load().valid.shape == (2, 10)
    assert equal(stream.load(), dataclasses.replace(whole, experts=whole.experts.sort(-1).values))


def test_header_fields_travel(tmp_path):
    ids = torch.arange(10).view(2, 5)
    trace = dataclasses.replace(make(), source="engine", weights_version=4).for_tokens(ids)
    with TraceWriter(tmp_path / "s", LAYERS, E, K) as writer:
        writer.append(trace)
        writer.append(trace)
    loaded = TraceStream(tmp_path / "s").load()
    assert (loaded.source, loaded.weights_version) == ("engine", 4)
    loaded[2:].require_tokens(ids)


def test_a_crash_leaves_what_was_written(tmp_path):
    traces = [make(seed=seed) for seed in range(3)]
    with (
        pytest.raises(KeyboardInterrupt),
        TraceWriter(tmp_path / "s", LAYERS, E, K, buffer_bytes=1) as writer,
    ):
        for trace in traces:
            writer.append(trace)
        assert len(TraceStream(tmp_path / "s")) == 3  # readable while it is written
        writer._buffer_bytes = 1 << 20
        writer.append(make(seed=3))
        raise KeyboardInterrupt
    stream = TraceStream(tmp_path / "s")
    assert not stream.complete
    assert equal(stream.load(), RoutingTrace.cat(traces))
    (tmp_path / "s" / ".000003.safetensors.tmp").write_bytes(b"half a fi")  # killed while writing
    assert len(TraceStream(tmp_path / "s")) == 3
    with pytest.raises(RoutingError, match="not empty"):
        TraceWriter(tmp_path / "s", LAYERS, E, K)


def test_a_trace_of_another_model_is_refused(tmp_path):
    with TraceWriter(tmp_path / "s", LAYERS, E, K) as writer:
        writer.append(make())
        for other in (
            dataclasses.replace(make(), layer_ids=(0, 1)),
            dataclasses.replace(make(), num_experts=17),
            dataclasses.replace(make(), experts=make().experts[..., :2]),
        ):
            with pytest.raises(RoutingError, match="of a model with"):
                writer.append(other)
        with pytest.raises(RoutingError, match="twice"):
            writer.append(dataclasses.replace(make(), experts=torch.ones_like(make().experts)))
    assert equal(TraceStream(tmp_path / "s").load(), make())
    dataclasses.replace(make(), layer_ids=(0, 1)).save(tmp_path / "s" / "000000.safetensors")
    with pytest.raises(RoutingError, match="of a model with"):
        TraceStream(tmp_path / "s").load()


def test_directories_that_are_no_complete_stream(tmp_path):
    with pytest.raises(RoutingError, match=r"has no stream\.json"):
        TraceStream(tmp_path / "missing")
    path = tmp_path / "s"
    with TraceWriter(path, LAYERS, E, K, buffer_bytes=1) as writer:
        for seed in range(3):
            writer.append(make(seed=seed))
    good = json.loads((path / "stream.json").read_text())
    (path / "000001.safetensors").rename(path / "000003.safetensors")
    with pytest.raises(RoutingError, match="3 traces numbered from 0, found"):
        TraceStream(path)
    TraceWriter._write_manifest(writer, files=None)
    with pytest.raises(RoutingError, match="3 traces numbered from 0, found"):
        TraceStream(path)
    for text in (
        "",
        "[]",
        "{}",
        "[" * 100_000,
        *(json.dumps(good | part) for part in ({"version": 9}, {"dim": 1})),
    ):
        (path / "stream.json").write_text(text)
        with pytest.raises(RoutingError, match=r"not a stream|format 9|checksum of stream"):
            TraceStream(path)
    with TraceWriter(tmp_path / "empty", LAYERS, E, K):
        pass
    assert list(TraceStream(tmp_path / "empty")) == []


def resident_mib(field: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)
def test_memory_does_not_grow_with_the_stream(tmp_path):
    chunk = make(B=4, T=4_096)  # 132 KiB of ids

    def peak_growth(chunks: int) -> float:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident_mib("VmRSS")
        with TraceWriter(tmp_path / str(chunks), LAYERS, E, K, dim=1, buffer_bytes=1 << 20) as writer:
            for _ in range(chunks):
                writer.append(chunk)
        rows = sum(trace.valid.shape[1] for trace in TraceStream(tmp_path / str(chunks)))
        assert rows == 4_096 * chunks
        return resident_mib("VmHWM") - before

    peak_growth(16)  # allocators keep what they took
    assert peak_growth(512) < 20  # MiB, of 66 MiB of ids
