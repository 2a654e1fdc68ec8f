"""Statements on what Routing Replay costs: time, memory and bytes, against the length of responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_rl.analysis.evidence import Statement, ids, shown_range
from moe_rl.analysis.measured_files import Group, Measured, by_settings, over_seeds, places_of
from moe_rl.analysis.statistics import Summary

CLAIM, SOURCE = "Routing Replay costs memory and communication", "§5.3"
KINDS = {"replay": "the old policy's experts (R2)", "rollout_replay": "the sampler's (R3)"}


def cost_statements(measured: Sequence[Measured]) -> list[Statement]:
    """Every statement that the measurements allow, each of the seeds of one configuration."""
    return [
        statement
        for words, group in by_settings(measured).items()
        for section in (time, memory)
        for statement in section(words, group)
    ]


def lengths_of(group: Group) -> list[int]:
    """The lengths that every one of them measured, in tokens."""
    return places_of(group, "cost", "replay", "step/ratio")


def at_length(group: Group, subject: str, metric: str, length: int) -> Summary:
    """A metric over the seeds."""
    return over_seeds(group, lambda one: one.value("cost", subject, metric, length))


def time(words: str, group: Group) -> Iterator[Statement]:
    """A step with replay over a step without, of the same round."""
    lengths = lengths_of(group)
    if not lengths:
        return
    longest, last = lengths[-1], at_length(group, "replay", "step/ratio", lengths[-1])
    said = [
        f"{what}: "
        + ", ".join(f"{at_length(group, kind, 'step/ratio', n).mean:.3f}" for n in lengths)
        + f" (phases by wall clock at {longest}: "
        + ", ".join(
            f"{phase.replace('_', ' ')} {at_length(group, kind, f'{phase}/ratio', longest).mean:.2f}"
            for phase in ("rollout", "old_policy", "update")
        )
        + ")"
        for kind, what in KINDS.items()
    ]
    plain = at_length(group, "none", "step/ms", longest).mean
    yield Statement(
        CLAIM,
        SOURCE,
        group[0].suite,
        f"{words}CPU time of a training step with replay and the loop's diagnostics of it (native choices "
        "beside the forced ones; for R3 a native pass too) over one without, responses of "
        f"{', '.join(map(str, lengths))} tokens; {'; '.join(said)}; without: {plain:.3g} ms at {longest}",
        shown_range(last.low, last.high, last.n) + f" times (R2 at {longest})",
        f"{len(group)} seeds",
        ids(group),
        headline=True,
    )


def memory(words: str, group: Group) -> Iterator[Statement]:
    """Peak memory of a step, and bytes of the trace as measured and as computed from the topology."""
    lengths = lengths_of(group)
    if not lengths:
        return
    longest = lengths[-1]
    plain = at_length(group, "none", "memory/mib", longest).mean
    r2, r3 = (
        over_seeds(
            group,
            lambda one: (
                one.value("cost", kind, "memory/mib", longest)  # noqa: B023
                - one.value("cost", "none", "memory/mib", longest)
            ),
        )
        for kind in KINDS
    )
    held = [
        f"{at_length(group, 'trace', f'bytes/{kind}', longest).mean:.4g} {where} (computed "
        f"{at_length(group, 'trace', f'bytes/{kind}_computed', longest).mean:.4g})"
        for kind, where in (("memory", "in memory"), ("ordered", "in a file"), ("sets", "as sets"))
    ]
    yield Statement(
        CLAIM,
        SOURCE,
        group[0].suite,
        f"{words}bytes of a trace per token: {', '.join(held)}; peak memory of a step at {longest} tokens "
        f"with R2 {r2.mean:+.2g} MiB, with R3 {r3.mean:+.2g}, of {plain:.3g}",
        shown_range(r2.low, r2.high, r2.n, signed=True) + " MiB (R2)",
        f"{len(group)} seeds",
        ids(group),
    )
