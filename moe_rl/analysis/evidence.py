"""How finished runs are compared: one number a run, by arm, differences paired by seed, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_rl.analysis.comparison import told_apart
from moe_rl.analysis.run_files import UNCLIPPED, CompactRun, Named
from moe_rl.analysis.statistics import (
    MIN_SEEDS_FOR_INTERVAL,
    PairedTest,
    Summary,
    differences,
    holm,
    paired_difference,
    paired_test,
    summarise,
)
from moe_rl.analysis.survival import Lifetimes, log_rank
from moe_rl.analysis.tables import FINAL_SHARE, three_digits
from moe_rl.store import StoreError

SIGNIFICANT = 0.05
Measure = Callable[[CompactRun], float]
Arms = dict[str, list[CompactRun]]


def final_reward(run: CompactRun) -> float:
    """Mean reward of the last 10 % of steps; 0 for a run whose policy is no longer finite."""
    if run.header["status"] == "collapsed":
        return 0.0
    tail = max(1, math.ceil(FINAL_SHARE * len(run.steps)))
    return float(run.steps["reward/mean"].tail(tail).mean())


def final_greedy(run: CompactRun) -> float:
    """Held-out greedy accuracy at the end; 0 for a run whose policy is no longer finite."""
    if run.header["status"] == "collapsed":
        return 0.0
    values = run.evaluations("eval/greedy")["value"]
    return float(values.iloc[-1]) if len(values) else math.nan


def mean_of(column: str) -> Measure:
    """Mean over steps of a column; NaN where it was not logged."""

    def measure(run: CompactRun) -> float:
        return float(run.steps[column].mean()) if column in run.steps else math.nan

    return measure


def reward_at_unclipped(run: CompactRun, tokens: float) -> float:
    """Reward, mean of five steps, where the cumulative number of unclipped tokens reaches `tokens`."""
    if UNCLIPPED not in run.steps or not len(run.steps):
        return math.nan
    spent = run.steps[UNCLIPPED].cumsum()
    reached = np.flatnonzero(spent >= tokens)
    if not len(reached):
        return math.nan
    smooth = run.steps["reward/mean"].rolling(5, min_periods=1).mean()
    return float(smooth.iloc[reached[0]])


def arms_of(runs: Sequence[CompactRun]) -> Arms:
    """Runs by arm; an arm of several configurations is split by the settings in which they differ."""
    arms: Arms = {}
    for arm in dict.fromkeys(run.arm for run in runs):
        same = [run for run in runs if run.arm == arm]
        for run, settings in zip(same, told_apart([run.config for run in same]), strict=True):
            arms.setdefault(f"{arm} ({settings})" if settings else arm, []).append(run)
    return arms


def by_seed(runs: Iterable[CompactRun], measure: Measure) -> dict[int, float]:
    """The measure of each run by its seed. Raises StoreError for two runs of one seed, of which one would be
    dropped unseen."""
    found: dict[int, CompactRun] = {}
    for run in runs:
        other = found.setdefault(run.seed, run)
        if other is not run:
            raise StoreError(
                f"{other.id} and {run.id} are both seed {run.seed} of one arm: they differ in a setting that "
                "is not compared here; remove the tables of one of the two configurations"
            )
    return {seed: measure(run) for seed, run in found.items()}


def lifetimes(runs: Iterable[CompactRun]) -> Lifetimes:
    """Steps to collapse of these runs."""
    return Lifetimes.of([run.collapse for run in runs])


def gains(arm: Iterable[CompactRun], minus: Iterable[CompactRun], measure: Measure) -> dict[int, float]:
    """The measure of one arm minus that of another, by the seeds that both have."""
    return differences(by_seed(arm, measure), by_seed(minus, measure))


@dataclass(frozen=True)
class Difference:
    """One arm minus another over the seeds that both have, with its test."""

    arm: str
    minus: str
    summary: Summary
    test: PairedTest

    @property
    def n(self) -> int:
        return self.summary.n


def difference(
    arm: str, minus: str, arms: Mapping[str, Sequence[CompactRun]], measure: Measure
) -> Difference:
    """The paired difference of a measure between two arms."""
    values, baseline = by_seed(arms[arm], measure), by_seed(arms[minus], measure)
    return Difference(arm, minus, paired_difference(values, baseline), paired_test(values, baseline))


def says(p: float) -> str:
    """What an adjusted p value allows to say."""
    if not math.isfinite(p):
        return "not tested"
    return "they differ" if p < SIGNIFICANT else "not separated"


def shown_p(p: float) -> str:
    return "no test" if not math.isfinite(p) else f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"


def shown_range(low: float, high: float, n: int, signed: bool = False) -> str:
    """An interval in words: confidence from five runs on, else the range of the runs."""
    if n == 0 or not (math.isfinite(low) and math.isfinite(high)):
        return "none"
    sign = "+" if signed else ""
    body = f"{low:{sign}.3g} to {high:{sign}.3g}"
    if n >= MIN_SEEDS_FOR_INTERVAL:
        return f"95 %: {body}"
    return f"range of {n}: {body}" if n > 1 else "one run"


def shown_summary(summary: Summary) -> str:
    return three_digits(summary.mean) if summary.n else "no value"


@dataclass(frozen=True)
class Statement:
    """A row of the claim table: what the paper says, what the runs of a suite gave, and from which runs.

    headline: whether the README shows it, beside the page that shows all.
    """

    claim: str
    source: str
    suite: str
    measured: str
    interval: str
    n: str
    runs: tuple[str, ...] = field(default=())
    headline: bool = False


def shown_difference(row: Difference) -> str:
    """The mean of a paired difference, with its sign."""
    return f"{round(row.summary.mean, 12) + 0.0:+.3g}" if row.n else "no pairs"  # no 1e-17, no -0


def limit(row: Difference, family: int = 1) -> str:
    """What limits the test of a difference among the `family` that Holm adjusts for, to follow its p."""
    if row.test.note:
        return f"; {row.test.note}"
    smallest = family * 2.0 ** (1 - row.n)
    if row.n and smallest > SIGNIFICANT:
        return f"; {row.n} pairs give no p below {smallest:.3g} among {family} comparisons"
    return ""


def ids(*groups: Iterable[Named]) -> tuple[str, ...]:
    """Names of the runs, or measurements, behind a statement."""
    return tuple(run.id for group in groups for run in group)


def summary_of(runs: Iterable[CompactRun], measure: Measure) -> Summary:
    """Mean and interval of a measure over runs."""
    return summarise([measure(run) for run in runs])


@dataclass(frozen=True)
class Tested:
    """A difference to be tested among its kind: `words` go before it, `after` follows its test."""

    claim: str
    source: str
    words: str
    difference: Difference
    runs: tuple[str, ...]
    after: str = ""
    headline: bool = False


def tested(suite: str, rows: Sequence[Tested]) -> Iterator[Statement]:
    """A statement for each difference, its p value adjusted by Holm over all of `rows`."""
    adjusted = holm([row.difference.test.p for row in rows])
    for row, p in zip(rows, adjusted, strict=True):
        found = row.difference
        yield Statement(
            row.claim,
            row.source,
            suite,
            f"{row.words} {shown_difference(found)} ({shown_p(p)}{limit(found, len(rows))}: {says(p)})"
            f"{row.after}",
            shown_range(found.summary.low, found.summary.high, found.n, signed=True),
            f"{found.n} pairs",
            row.runs,
            row.headline,
        )


def collapses_compared(pairs: Sequence[tuple[Lifetimes, Lifetimes]]) -> list[str]:
    """How many of two groups collapsed, with the p value of the log-rank test, by Holm over `pairs`."""
    tests = [log_rank(*pair) for pair in pairs]
    words = []
    for (one, other), test, p in zip(pairs, tests, holm([test.p for test in tests]), strict=True):
        rank = ", ".join(filter(None, (shown_p(p) if math.isfinite(p) else "", test.note)))
        words.append(f"{one.events} of {one.n} against {other.events} of {other.n} collapsed ({rank})")
    return words
