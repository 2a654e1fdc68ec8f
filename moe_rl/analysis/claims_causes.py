"""Statements on causes: where routing breaks GRPO, what an intervention does, what becomes of a collapse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_rl.analysis.evidence import (
    Statement,
    Tested,
    final_reward,
    ids,
    limit,
    says,
    shown_difference,
    shown_p,
    shown_range,
    shown_summary,
    summary_of,
    tested,
)
from moe_rl.analysis.recovery import outcomes
from moe_rl.analysis.regimes import (
    dose_effects,
    dose_pairs,
    matched_controls,
    rates_of,
    regime_differences,
)
from moe_rl.analysis.run_files import CompactRun
from moe_rl.analysis.statistics import holm, proportion, summarise

Runs = Sequence[CompactRun]
IRREVERSIBLE = (
    "collapse is often irreversible: rolling back, retuning the clip range, longer generation or other "
    "queries may not recover it"
)
PAPERS_DOSE = 0.1  # of the experts, after one update (§5.3)
HEALTHY = "no claim: how many runs that did not collapse pass the test of recovery"


def regimes(suite: str, runs: Runs) -> Iterator[Statement]:
    """The search: where, if anywhere, replay does better than GRPO."""
    rows = regime_differences(runs)
    if not rows:
        return
    adjusted = holm([row.difference.test.p for row in rows])
    best = max(range(len(rows)), key=lambda index: rows[index].difference.summary.mean)
    row, p = rows[best].difference, adjusted[best]
    above = sum(r.difference.summary.mean > 0 for r in rows)
    yield Statement(
        "where routing is what breaks GRPO: replay then helps",
        "Fig. 3",
        suite,
        f"grpo+replay − grpo, final reward, in {len(rows)} regimes: {above} above 0; the largest "
        f"{shown_difference(row)} at {rows[best].regime} (chosen among them; {shown_p(p)} after Holm"
        f"{limit(row)}: {says(p)})",
        shown_range(row.summary.low, row.summary.high, row.n, signed=True),
        f"{row.n} pairs a regime",
        ids(runs),
        headline=True,
    )


def rates(suite: str, runs: Runs) -> Iterator[Statement]:
    """The search: each arm's final reward by learning rate, from which its own best one is taken."""
    for arm, by_rate in rates_of(runs).items():
        found = {rate: summary_of(group, final_reward) for rate, group in sorted(by_rate.items())}
        if len(found) < 2:
            continue
        best = max(found, key=lambda rate: found[rate].mean)
        shown = ", ".join(f"{rate:g}: {shown_summary(summary)}" for rate, summary in found.items())
        low, high, n = found[best].low, found[best].high, found[best].n
        edge = {min(found): ", the lowest tried", max(found): ", the highest tried"}.get(best, "")
        yield Statement(
            "no claim: the arm's own best learning rate",
            "–",
            suite,
            f"{arm}, final reward by learning rate: {shown}; best {best:g}{edge} (chosen after the fact)",
            shown_range(low, high, n) + f" at {best:g}",
            f"{n} a rate",
            ids(*by_rate.values()),
        )


def intervention(suite: str, runs: Runs) -> Iterator[Statement]:
    """Routing change by hand, with and without replay; what noise of the same KL does; frozen routers."""
    yield from tested(
        suite,
        [
            Tested(
                "token ratios of changed experts are what destabilises GRPO",
                "§5.3",
                f"{100 * pair.dose:g} % of experts changed in the ratio pass, {pair.objective}: final reward "
                "without − with replay of the changed experts",
                pair.difference,
                ids(pair.alone, pair.replayed),
                headline=pair.dose == PAPERS_DOSE,
            )
            for pair in dose_pairs(runs)
        ],
    )
    yield from tested(
        suite,
        [
            Tested(
                "changed experts break token ratios, and sequence ratios do not mind them",
                "§5.3",
                f"{effect.objective}: final reward with {100 * effect.dose:g} % of experts changed in the "
                "ratio pass − with none (replay)",
                effect.difference,
                ids(effect.runs),
                headline=effect.dose == PAPERS_DOSE or effect.objective == "gspo",
            )
            for effect in dose_effects(runs)
        ],
    )
    yield from tested(
        suite,
        [
            Tested(
                control.claim,
                "§5.3",
                f"{control.words}: final reward",
                control.difference,
                ids(control.runs),
                headline=control.dose in (None, PAPERS_DOSE),
            )
            for control in matched_controls(runs)
        ],
    )


def recovery(suite: str, runs: Runs, everything: Runs) -> Iterator[Statement]:
    """How many collapsed runs come back, by what was changed; and how many healthy ones keep as much."""
    for outcome in outcomes(runs, everything):
        share, mean = proportion(outcome.recovered, len(outcome.runs)), summarise(outcome.regained)
        yield Statement(
            HEALTHY if outcome.healthy else IRREVERSIBLE,
            "§1, §3",
            suite,
            f"{outcome.words}: {share.hits} of {share.n} ended at 90 % or more of the reward before "
            + ("going on" if outcome.healthy else "the decline")
            + f", {shown_summary(mean)} of it in the mean",
            f"95 %: {share.low:.2g} to {share.high:.2g} of runs (exact); the mean "
            + shown_range(mean.low, mean.high, mean.n),
            str(share.n),
            ids(outcome.runs),
            headline=outcome.words.startswith("left alone") or outcome.words.endswith("nothing changed"),
        )
