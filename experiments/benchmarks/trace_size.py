"""Bytes of routing per token, in memory and on disk, and the speed of packing, by model topology.

    python -m experiments.benchmarks.trace_size            # sizes and speed
    python -m experiments.benchmarks.trace_size --stream   # memory against length, streamed to disk

Sizes are of whole files with random experts, validity and checksums included; the bound is
⌈log2 C(E, K)⌉ bits per token and MoE layer. Speed is experts per second of CPU time on one thread, from ids
in memory to packed bytes and back; saving and loading add validation, checksum and the file.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from pathlib import Path

import numpy as np
import torch

from moe_rl.routing import RoutingTrace
from moe_rl.routing.storage import RowCode
from moe_rl.routing.stream import TraceStream, TraceWriter


@dataclass(frozen=True)
class Topology:
    """MoE layers, experts and experts per token, as in the model's config."""

    name: str
    layers: int
    experts: int
    top_k: int


TOPOLOGIES = (
    Topology("Qwen3-30B-A3B", 48, 128, 8),
    Topology("Qwen3-235B-A22B", 94, 128, 8),
    Topology("DeepSeek-V3", 58, 256, 8),
    Topology("Kimi-K2", 60, 384, 8),
    Topology("gpt-oss-120b", 36, 128, 4),
    Topology("Mixtral-8x7B", 32, 8, 2),
    Topology("Llama-4-Scout", 48, 16, 1),
    Topology("Qwen3-Next-80B-A3B", 48, 512, 10),
)
SEQUENCES, TOKENS = 8, 1024


def main() -> None:
    """Print the table that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stream", action="store_true", help="memory against length instead of sizes")
    streams = parser.parse_args().stream
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        (print_streams if streams else print_sizes)(Path(directory))


def print_sizes(directory: Path) -> None:
    """One line a topology: bytes per token, the packed file over the bound, experts per second."""
    print(f"{'':33}bytes per token{'':35}million experts per second")
    print(
        f"{'':75}ordered       sets        sets\n"
        f"{'model':20} {'L':>3} {'E/K':>7} {'int32':>6} {'int16':>6} {'memory':>7} {'ordered':>8} "
        f"{'sets':>6} {'bound':>6}   pack unpack   pack unpack   save load"
    )
    for topology in TOPOLOGIES:
        trace = random_trace(topology, SEQUENCES, TOKENS)
        tokens, slots = trace.valid.numel(), topology.layers * topology.top_k
        bound = topology.layers * subset_bits(topology) / 8
        sizes = [file_bytes(trace, directory / "trace", ordered) / tokens for ordered in (True, False)]
        speeds = [speed / 1e6 for ordered in (True, False) for speed in code_speeds(trace, ordered)]
        speeds += [speed / 1e6 for speed in file_speeds(trace, directory / "trace")]
        print(
            f"{topology.name:20} {topology.layers:3} {topology.experts:>4}/{topology.top_k:<2} "
            f"{4 * slots:6} {2 * slots:6} {trace.nbytes / tokens:7.1f} {sizes[0]:8.1f} {sizes[1]:6.1f} "
            f"{bound:6.1f}   " + "{:4.0f} {:6.0f}   {:4.0f} {:6.0f}   {:4.0f} {:4.0f}".format(*speeds)
        )


def print_streams(directory: Path) -> None:
    """One line a length: a sequence of so many tokens, appended 1024 rows at a time and read back."""
    topology = TOPOLOGIES[0]
    chunk = random_trace(topology, 1, TOKENS)
    print(f"{topology.name}, one sequence; peak resident memory of this process in MiB")
    print(f"{'tokens':>8} {'as int32':>9} {'on disk':>8} {'peak before':>12} {'peak after':>11}")
    for length in (4_096, 16_384, 65_536, 131_072):
        before = peak_mib()
        path = directory / str(length)
        with TraceWriter(
            path, chunk.layer_ids, chunk.num_experts, chunk.top_k, dim=1, ordered=False, buffer_bytes=4 << 20
        ) as writer:
            for _ in range(length // TOKENS):
                writer.append(chunk)
        rows = sum(int(trace.valid.sum()) for trace in TraceStream(path))
        if rows != length:
            raise SystemExit(f"expected {length} rows on disk, read {rows}")
        int32 = 4 * length * topology.layers * topology.top_k
        disk = sum(file.stat().st_size for file in path.iterdir())
        print(f"{length:8} {int32 / 2**20:9.1f} {disk / 2**20:8.1f} {before:12.1f} {peak_mib():11.1f}")


def random_trace(topology: Topology, sequences: int, tokens: int) -> RoutingTrace:
    """Every set of experts equally likely, in random order: 4096 draws, repeated in random places."""
    rng = np.random.default_rng(0)
    draws = rng.random((4096, topology.experts)).argsort(1)[:, : topology.top_k]
    places = rng.integers(len(draws), size=(sequences, tokens, topology.layers))
    valid = torch.ones(sequences, tokens, dtype=torch.bool)
    layer_ids = tuple(range(topology.layers))
    return RoutingTrace(torch.from_numpy(draws[places]), valid, layer_ids, topology.experts).compact()


def subset_bits(topology: Topology) -> int:
    """⌈log2 C(E, K)⌉."""
    return (comb(topology.experts, topology.top_k) - 1).bit_length()


def file_bytes(trace: RoutingTrace, path: Path, ordered: bool) -> int:
    """Size of the whole file."""
    trace.save(path, ordered)
    return path.stat().st_size


def code_speeds(trace: RoutingTrace, ordered: bool) -> tuple[float, float]:
    """Experts per CPU second of packing and unpacking, best of three."""
    code = RowCode(trace.num_experts, trace.top_k, ordered)
    experts_NK = trace.experts.flatten(0, 2).numpy()
    data = code.pack(experts_NK)
    seconds = (
        best_of_three(lambda: code.pack(experts_NK)),
        best_of_three(lambda: code.unpack(data, len(experts_NK))),
    )
    return experts_NK.size / seconds[0], experts_NK.size / seconds[1]


def file_speeds(trace: RoutingTrace, path: Path) -> tuple[float, float]:
    """Experts per CPU second of saving as sets and of loading, checks included."""
    fresh = RoutingTrace(trace.experts, trace.valid, trace.layer_ids, trace.num_experts)
    seconds = (
        best_of_three(lambda: fresh.save(path, ordered=False)),
        best_of_three(lambda: RoutingTrace.load(path)),
    )
    return trace.experts.numel() / seconds[0], trace.experts.numel() / seconds[1]


def best_of_three(work: Callable[[], object]) -> float:
    """CPU seconds."""
    times = []
    for _ in range(3):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def peak_mib() -> float:
    """Peak resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


if __name__ == "__main__":
    main()
