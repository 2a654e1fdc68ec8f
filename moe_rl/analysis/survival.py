"""Time to collapse as censored data: Kaplan–Meier curves and the log-rank test.

A run that did not collapse was watched up to its last step and no further: it is censored there, neither safe
nor left out.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import CensoredData, ecdf, logrank

from moe_rl.analysis.collapse import Collapse
from moe_rl.analysis.statistics import CONFIDENCE

EXACT = 200_000  # relabellings of the runs, up to which the log-rank test counts them all


@dataclass(frozen=True)
class Lifetimes:
    """Steps to the collapse of each run, or to its last step where `collapsed` is False (censored)."""

    steps: tuple[float, ...]
    collapsed: tuple[bool, ...]

    @staticmethod
    def of(outcomes: Sequence[Collapse]) -> Lifetimes:
        """From the outcomes of the collapse rule; runs without a step are left out."""
        times = [c.step if c.step is not None else c.censored_at for c in outcomes]
        kept = [(float(t), c.step is not None) for t, c in zip(times, outcomes, strict=True) if t]
        return Lifetimes(tuple(t for t, _ in kept), tuple(hit for _, hit in kept))

    @property
    def n(self) -> int:
        return len(self.steps)

    @property
    def events(self) -> int:
        return sum(self.collapsed)

    def data(self) -> CensoredData:
        """The same for scipy."""
        return CensoredData.right_censored(self.steps, [not hit for hit in self.collapsed])


@dataclass(frozen=True)
class SurvivalCurve:
    """Kaplan–Meier estimate of the share of runs that have not collapsed.

    steps: where runs collapsed or were censored, ascending, 0 in front; survival, low, high: from there on,
    the latter the pointwise 95 % log-log interval.  It is undefined where nobody, or everybody, has collapsed
    so far: NaN there.  median: the first step at which survival is at most one half, None where it stays
    above.  note: what the data cannot say, empty if nothing.
    """

    n: int
    events: int
    steps: np.ndarray
    survival: np.ndarray
    low: np.ndarray
    high: np.ndarray
    median: float | None
    note: str

    def at(self, step: float) -> tuple[float, float, float]:
        """Survival, low and high after `step`; beyond the last run's end the estimate says nothing: NaN."""
        if step > self.steps[-1]:
            return (np.nan, np.nan, np.nan)
        index = int(np.searchsorted(self.steps, step, side="right")) - 1
        return float(self.survival[index]), float(self.low[index]), float(self.high[index])


def kaplan_meier(lives: Lifetimes) -> SurvivalCurve:
    """Kaplan–Meier with the log-log interval (scipy's ecdf of right-censored data)."""
    start = np.zeros(1)
    if lives.n == 0:
        nothing = np.full(1, np.nan)
        return SurvivalCurve(0, 0, start, nothing, nothing, nothing, None, "no runs")
    estimate = ecdf(lives.data()).sf
    survival = np.concatenate([np.ones(1), estimate.probabilities])
    low = high = np.full(len(survival), np.nan)
    if lives.n > 1 and lives.events:
        with warnings.catch_warnings():  # of the log-log of 0 and 1, left undefined below
            warnings.simplefilter("ignore", RuntimeWarning)
            bounds = estimate.confidence_interval(CONFIDENCE, method="log-log")
        inside = (survival > 0) & (survival < 1)
        low = np.where(inside, np.concatenate([start, bounds.low.probabilities]), np.nan)
        high = np.where(inside, np.concatenate([start, bounds.high.probabilities]), np.nan)
    steps = np.concatenate([start, estimate.quantiles])
    below = np.flatnonzero(survival <= 0.5)
    median = float(steps[below[0]]) if len(below) else None
    return SurvivalCurve(lives.n, lives.events, steps, survival, low, high, median, _note(lives))


def _note(lives: Lifetimes) -> str:
    if lives.n == 1:
        return "one run: no interval"
    if lives.events == 0:
        return f"none of {lives.n} collapsed by step {max(lives.steps):.0f}: all are censored"
    if lives.events == lives.n:
        return f"all {lives.n} collapsed"
    return ""


@dataclass(frozen=True)
class LogRank:
    """Two-sided log-rank test that two groups collapse at one rate; p NaN without a test, for `note`.

    statistic: the usual standardised one.
    """

    statistic: float
    p: float
    note: str


def log_rank(one: Lifetimes, other: Lifetimes) -> LogRank:
    """Compare two groups; nothing to compare where no run of either collapsed, or a group is empty.

    The p value is exact: the share of all ways to deal the runs to groups of these sizes in which the
    observed less the expected collapses of a group are at least as far from 0 as here. Collapses are few, and
    the normal approximation then finds far too much. It stays for groups so large that nobody could count,
    and `note` says where collapses are few all the same.
    """
    if one.n == 0 or other.n == 0:
        return LogRank(float("nan"), float("nan"), "no test: a group has no runs")
    events = one.events + other.events
    if events == 0:
        return LogRank(float("nan"), float("nan"), "no test: no run of either group collapsed")
    with np.errstate(divide="ignore", invalid="ignore"):  # a variance of 0, said below
        found = logrank(one.data(), other.data())
    if not np.isfinite(found.pvalue):
        return LogRank(float("nan"), float("nan"), "no test: every run collapsed at the same step")
    if math.comb(one.n + other.n, one.n) <= EXACT:
        return LogRank(float(found.statistic), _exact(one, other), "")
    few = f"normal approximation on {events} collapse{'s' * (events > 1)}" if events < 10 else ""
    return LogRank(float(found.statistic), float(found.pvalue), few)


def _exact(one: Lifetimes, other: Lifetimes) -> float:
    """The permutation p value. Observed less expected collapses of a group are a sum over its runs, of 1 or 0
    for its collapse less the hazard (Nelson–Aalen, of all runs together) that it lived through."""
    steps_N = np.array([*one.steps, *other.steps])
    collapsed_N = np.array([*one.collapsed, *other.collapsed])
    hazard_N = np.zeros(len(steps_N))
    for step in np.unique(steps_N[collapsed_N]):
        hazard_N[steps_N >= step] += collapsed_N[steps_N == step].sum() / (steps_N >= step).sum()
    excess_N = collapsed_N - hazard_N
    groups = np.array(list(itertools.combinations(range(len(steps_N)), one.n)))
    sums = np.abs(excess_N[groups].sum(axis=1))
    return float(np.mean(sums >= abs(excess_N[: one.n].sum()) - 1e-9))
