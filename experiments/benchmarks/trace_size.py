"""Bytes of routing per token, in memory and on disk, and the speed of packing, by model topology.

    python -m experiments.benchmarks.trace_size

Sizes are of whole files with random experts, validity and checksums included; the bound is ⌈log2 C(E, K)⌉
bits per token and MoE layer. Speed is million experts per second of CPU time on one thread, from ids in
memory to packed bytes and back; saving and loading add validation, checksum and the file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from experiments.benchmarks.pairs import Ratio, rounds, seconds
from experiments.benchmarks.results import Bound, Report, Row, Table, arguments, publish
from experiments.benchmarks.topologies import TOPOLOGIES, Topology, random_trace
from moe_rl.routing import RoutingTrace
from moe_rl.routing.storage import RowCode

SEQUENCES, TOKENS, ROUNDS = 8, 1024, 7
SIZE, SPEED = Bound("at most", 1.05), Bound("at least", 50)
COLUMNS = (
    "model", "layers", "E", "K", "int32", "int16", "in memory", "file, ordered", "file, sets", "bound",
    "pack ordered", "unpack ordered", "pack sets", "unpack sets", "save sets", "load sets",
)  # fmt: skip


def main() -> None:
    """Print the table."""
    options = arguments(__doc__).parse_args()
    publish(measure(quick=options.quick), options)


def measure(*, quick: bool) -> Report:
    torch.set_num_threads(1)
    sequences, tokens = (2, 256) if quick else (SEQUENCES, TOKENS)
    report = Report(
        "trace_size",
        "Size of a trace, speed of packing",
        f"Random experts, {sequences} x {tokens} tokens; bytes per token, million experts per CPU second of "
        f"one thread (median of {ROUNDS}).",
    )
    cells: list[list[str | float]] = []
    with tempfile.TemporaryDirectory() as directory:
        for topology in TOPOLOGIES:
            cells.append(
                add(report, topology, random_trace(topology, sequences, tokens), Path(directory) / "trace")
            )
    report.tables.append(Table("Bytes per token; million experts per second", COLUMNS, cells))
    return report


def add(report: Report, topology: Topology, trace: RoutingTrace, path: Path) -> list[str | float]:
    """A topology's rows against the bounds, and its line of the table."""
    tokens, slots = trace.valid.numel(), topology.layers * topology.top_k
    bound = topology.layers * topology.subset_bits / 8
    ordered, sets = (file_bytes(trace, path, ordered) / tokens for ordered in (True, False))
    speeds = [
        *code_speeds(trace, ordered=True),
        *code_speeds(trace, ordered=False),
        *file_speeds(trace, path),
    ]
    report.rows.append(
        Row(f"{topology.name}: file", f"{sets:.1f} bytes a token", f"⌈log2 C(E, K)⌉: {bound:.1f}",
            Ratio.exactly(sets / bound), "x", SIZE)
    )  # fmt: skip
    report.rows += [
        Row(f"{topology.name}: {name}", "sets", f"ids in order: {beside} M/s", speed, "M experts/s", SPEED)
        for name, speed, beside in (("pack", speeds[2], speeds[0]), ("unpack", speeds[3], speeds[1]))
    ]
    name, memory = topology.name, trace.nbytes / tokens
    line = [
        name,
        topology.layers,
        topology.experts,
        topology.top_k,
        4 * slots,
        2 * slots,
        memory,
        ordered,
        sets,
    ]
    return [*line, bound, *(speed.median for speed in speeds)]


def file_bytes(trace: RoutingTrace, path: Path, ordered: bool) -> int:
    """Size of the whole file."""
    trace.save(path, ordered)
    return path.stat().st_size


def code_speeds(trace: RoutingTrace, *, ordered: bool) -> list[Ratio]:
    """Of packing and of unpacking."""
    code = RowCode(trace.num_experts, trace.top_k, ordered)
    experts_NK = trace.experts.flatten(0, 2).numpy()
    data = code.pack(experts_NK)
    works = (lambda: code.pack(experts_NK), lambda: code.unpack(data, len(experts_NK)))
    return [speed(work, experts_NK.size) for work in works]


def file_speeds(trace: RoutingTrace, path: Path) -> list[Ratio]:
    """Of saving as sets and of loading, checks included."""
    fresh = RoutingTrace(trace.experts, trace.valid, trace.layer_ids, trace.num_experts)
    works = (lambda: fresh.save(path, ordered=False), lambda: RoutingTrace.load(path))
    return [speed(work, trace.experts.numel()) for work in works]


def speed(work: Callable[[], object], experts: int) -> Ratio:
    """Million experts per CPU second."""
    (times,) = rounds([lambda: seconds(work)], ROUNDS, warm=1)
    return Ratio.of([experts / 1e6 / time for time in times])


if __name__ == "__main__":
    main()
