"""Expert change between two large traces: CPU time, and the memory it takes beside the traces.

    python -m experiments.benchmarks.drift_speed

Two traces of 10 million token-layers, 128 experts, top-8, of which a tenth of the experts differ; beside
one read of both from memory (a sum over their bytes). Extra memory is how far the peak of resident memory
during the first comparison passes what the traces take.
"""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.benchmarks.memory import rise_mib
from experiments.benchmarks.pairs import Ratio, rounds, seconds
from experiments.benchmarks.results import Bound, Report, Row, arguments, publish
from moe_rl.routing import RoutingTrace, expert_change
from moe_rl.routing.drift import ExpertChange

LAYERS, EXPERTS, TOP_K = 48, 128, 8
TOKENS = 208_334  # times 48 layers: 10.0 million token-layers
CHANGED = 0.1
SECONDS, MEMORY = Bound("at most", 0.3), Bound("at most", 0.1)


def main() -> None:
    """Print the table."""
    options = arguments(__doc__).parse_args()
    publish(measure(quick=options.quick), options)


def measure(*, quick: bool) -> Report:
    torch.set_num_threads(1)
    tokens = TOKENS // 100 if quick else TOKENS
    old, new = two_traces(tokens)
    size = (old.nbytes + new.nbytes) / 2**20
    changes: list[ExpertChange] = []
    extra = rise_mib(lambda: changes.append(expert_change(old, new)))
    compared, read = rounds(
        [lambda: seconds(lambda: expert_change(old, new)), lambda: seconds(lambda: (total(old), total(new)))],
        3 if quick else 15,
    )
    what = f"{tokens * LAYERS / 1e6:.1f} million token-layers"
    report = Report(
        "drift_speed",
        "Drift between two traces",
        f"`expert_change` of two traces of {what}, E = {EXPERTS}, K = {TOP_K}, {size:.0f} MiB together, "
        f"{changes[0].experts:.1%} of experts changed; one thread, {len(compared)} rounds in turn.",
    )
    beside = f"one read of both: {Ratio.of(read)} CPU s"
    ratio = Ratio.of([a / b for a, b in zip(compared, read, strict=True)])
    report.rows = [
        Row("time", "expert_change", beside, Ratio.of(compared), "CPU s", SECONDS),
        Row("time", "expert_change", beside, ratio, "x"),
        Row("extra memory", f"expert_change: {extra:.1f} MiB", f"both traces: {size:.0f} MiB",
            Ratio.exactly(extra / size), "of the traces", MEMORY),
    ]  # fmt: skip
    return report


def two_traces(tokens: int) -> tuple[RoutingTrace, RoutingTrace]:
    """Distinct experts a row."""
    generator = torch.Generator().manual_seed(0)
    old_TLK = torch.empty(tokens, LAYERS, TOP_K, dtype=torch.uint8)
    new_TLK = torch.empty_like(old_TLK)
    for start in range(0, tokens, 1024):
        rows = slice(start, min(start + 1024, tokens))
        shape = (rows.stop - rows.start, LAYERS, 1)
        # Eight distinct experts 16 apart; a changed one moves to its neighbour, which no other slot holds.
        first = torch.randint(EXPERTS // TOP_K // 2, shape, generator=generator) * 2
        old = first + torch.arange(0, EXPERTS, EXPERTS // TOP_K)
        old_TLK[rows] = old
        new_TLK[rows] = old + (torch.rand(old.shape, generator=generator) < CHANGED)
    valid, layers = torch.ones(1, tokens, dtype=torch.bool), tuple(range(LAYERS))
    return RoutingTrace(old_TLK[None], valid, layers, EXPERTS), RoutingTrace(
        new_TLK[None], valid, layers, EXPERTS
    )


def total(trace: RoutingTrace) -> int:
    """Reads every byte of the experts once, in words of eight."""
    words: Tensor = trace.experts.view(torch.int64)
    return int(words.sum())


if __name__ == "__main__":
    main()
