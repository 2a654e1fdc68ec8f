"""A trace of up to 128k tokens, streamed to disk and back: resident memory against length.

    python -m experiments.benchmarks.trace_stream

One sequence with the routing of Qwen3-30B-A3B, appended 1,024 tokens at a time and read back part by part.
Memory is how far the peak of resident memory of a fresh process passes what was resident before.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from experiments.benchmarks.fresh import in_fresh_process
from experiments.benchmarks.memory import rise_mib
from experiments.benchmarks.pairs import Ratio
from experiments.benchmarks.results import Bound, Report, Row, Table, arguments, publish
from experiments.benchmarks.topologies import TOPOLOGIES, random_trace
from moe_rl.routing import RoutingTrace
from moe_rl.routing.stream import TraceStream, TraceWriter

CHUNK, BUFFER_MIB = 1024, 4
LENGTHS = (4_096, 16_384, 65_536, 131_072)
MEMORY = Bound("at most", 32)  # MiB, whatever the length: buffer, one part packed and unpacked, allocator


def main() -> None:
    """Print the table."""
    options = arguments(__doc__).parse_args()
    publish(measure(quick=options.quick), options)


def measure(*, quick: bool) -> Report:
    torch.set_num_threads(1)
    topology = TOPOLOGIES[0]
    cells: list[list[str | float]] = []
    with tempfile.TemporaryDirectory() as directory:
        for length in LENGTHS[:2] if quick else LENGTHS:
            path = Path(directory) / str(length)
            writing, reading = (
                in_fresh_process(f"experiments.benchmarks.trace_stream:memory_of_{what}", str(path), length)
                for what in ("writing", "reading")
            )
            int32 = 4 * length * topology.layers * topology.top_k / 2**20
            disk = sum(file.stat().st_size for file in path.iterdir()) / 2**20
            cells.append([f"{length:,}", int32, disk, writing, reading])
    longest, int32, _, writing, reading = cells[-1]
    report = Report(
        "trace_stream",
        "Memory of a streamed trace against its length",
        f"{topology.name} ({topology.layers} MoE layers, {topology.experts} experts, top-{topology.top_k}), "
        f"one sequence, a buffer of {BUFFER_MIB} MiB; MiB.",
    )
    report.rows = [
        Row(f"{what} {longest} tokens", "extra resident memory", f"the trace as int32: {int32:.0f} MiB",
            Ratio.exactly(float(value)), "MiB", MEMORY)
        for what, value in (("writing", writing), ("reading", reading))
    ]  # fmt: skip
    columns = ("tokens", "as int32", "on disk", "extra memory, writing", "extra memory, reading")
    report.tables.append(Table("MiB", columns, cells))
    return report


def memory_of_writing(path: str, length: int) -> float:
    """MiB."""
    chunk = random_trace(TOPOLOGIES[0], 1, CHUNK)
    return rise_mib(lambda: write(path, chunk, length))


def memory_of_reading(path: str, length: int) -> float:
    """MiB."""
    return rise_mib(lambda: read(path, length))


def write(path: str, chunk: RoutingTrace, length: int) -> None:
    with TraceWriter(
        path,
        chunk.layer_ids,
        chunk.num_experts,
        chunk.top_k,
        dim=1,
        ordered=False,
        buffer_bytes=BUFFER_MIB << 20,
    ) as writer:
        for _ in range(length // CHUNK):
            writer.append(chunk)


def read(path: str, length: int) -> None:
    rows = sum(int(trace.valid.sum()) for trace in TraceStream(path))
    if rows != length:
        raise SystemExit(f"expected {length} rows on disk, read {rows}")


if __name__ == "__main__":
    main()
