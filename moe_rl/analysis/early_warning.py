"""Which signal warns before a collapse, by how many steps, at a fixed rate of false alarms.

An alarm is the first step at which a signal's excess lies above a threshold. The excess of a step is the mean
of the values logged in its last TRAILING steps, minus the mean of the run's own BASELINE steps, over their
standard deviation (or a tenth of their mean, where that is more: two equal values are no sign of precision).
So levels that differ between objectives do not matter, and a signal that is logged every few steps has an
excess at these steps.

The threshold is the lowest that keeps to the false-alarm rate on runs of other seeds (`FOLDS`): it is
exceeded in at most that share of their runs without a collapse, and on at most that share of the steps of
their collapsed runs that lie more than HORIZON steps before the decline. It is then applied to the runs held
out.

Two steps say when a run collapsed. The rule's own (`moe_rl.analysis.collapse`) comes late: it waits until the
reward has stayed low. The decline begins the step after the last at which the trailing mean of the reward,
over the rule's window, was at least 90 % of its best so far. An alarm warns only if it comes before that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import bootstrap

from moe_rl.analysis.collapse import WINDOW
from moe_rl.analysis.comparison import setting
from moe_rl.analysis.run_files import CompactRun
from moe_rl.analysis.statistics import (
    CONFIDENCE,
    MIN_SEEDS_FOR_INTERVAL,
    RESAMPLES,
    Proportion,
    proportion,
)

BASELINE = (4, 10)  # first and last step; the learning rate warms up before
TRAILING = 3  # steps in the mean that is compared with the baseline
HORIZON = 20  # steps before the decline: an alarm further ahead is not counted as a warning of it
FALSE_ALARMS = 0.1
LEAST_SCALE = 0.1  # of the baseline's mean
DECLINE = 0.9  # of the best trailing reward: below it for good, the decline has begun
FOLDS = 2  # a seed belongs to fold seed % FOLDS; thresholds for a fold come from the other seeds


@dataclass(frozen=True)
class Signal:
    """A number a step that grows with danger: `read` makes it of `columns` of a run's steps. Runs without the
    setting `of` do not have it: where nothing can be clipped, no clip fraction is 0."""

    columns: tuple[str, ...]
    read: Callable[[pd.DataFrame], pd.Series]
    of: str | None = None


def _tail(steps: pd.DataFrame) -> pd.Series:
    with np.errstate(divide="ignore"):  # a ratio that underflowed to 0 is as far out as can be
        low, high = -np.log(steps["ratio/token_min"]), np.log(steps["ratio/token_max"])
    return pd.Series(np.maximum(low, high), index=steps.index)


SIGNALS: dict[str, Signal] = {
    "drift": Signal(("drift/old",), lambda steps: steps["drift/old"]),
    "router shift": Signal(("router_shift/gamma_mean",), lambda steps: 1 - steps["router_shift/gamma_mean"]),
    "ratio tail": Signal(("ratio/token_min", "ratio/token_max"), _tail),
    "clip fraction": Signal(
        ("clip_frac/token",), lambda steps: steps["clip_frac/token"], "objective.clip_low"
    ),
    "entropy, falling": Signal(("entropy",), lambda steps: -steps["entropy"]),
    "entropy, rising": Signal(("entropy",), lambda steps: steps["entropy"]),
    "gradient norm": Signal(("grad_norm",), lambda steps: steps["grad_norm"]),
    "KL": Signal(("kl/k3",), lambda steps: steps["kl/k3"]),
    "reward, falling": Signal(("reward/mean",), lambda steps: -steps["reward/mean"]),  # the control
}


def has(run: CompactRun, signal: Signal) -> bool:
    """Whether the run logged the signal at all."""
    there = signal.of is None or setting(run, signal.of) is not None
    return there and len(logged(run.steps, signal)[0]) > 0


def logged(steps: pd.DataFrame, signal: Signal) -> tuple[np.ndarray, np.ndarray]:
    """Steps at which the signal was logged, and its values there; both empty where it never was."""
    if not set(signal.columns) <= set(steps):
        return np.empty(0, dtype=int), np.empty(0)
    values = signal.read(steps).to_numpy(dtype=float)
    there = ~np.isnan(values)
    return steps["step"].to_numpy(dtype=int)[there], values[there]


def excess(steps: pd.DataFrame, signal: Signal) -> pd.Series:
    """The excess by step, for logged steps after the baseline; empty with fewer than two baseline values.

    A baseline that is 0 throughout has no scale: whatever exceeds it is infinite, what equals it 0.
    """
    at, values = logged(steps, signal)
    base = values[(at >= BASELINE[0]) & (at <= BASELINE[1])]
    if len(base) < 2:
        return pd.Series(dtype=float)
    scale = max(float(base.std()), LEAST_SCALE * abs(float(base.mean())))
    since = np.searchsorted(at, at - TRAILING, side="right")  # the first value of each trailing mean
    after = np.flatnonzero(at > BASELINE[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        risen = np.array([values[since[i] : i + 1].mean() for i in after]) - base.mean()
        found = risen / scale
    return pd.Series(np.where(np.isnan(found), 0.0, found), index=at[after])


def decline(run: CompactRun) -> int | None:
    """The first step of a collapsed run's decline, at most the rule's step; None without a collapse."""
    step = run.collapse.step
    if step is None:
        return None
    seen = run.steps[run.steps["step"] <= step].set_index("step")["reward/mean"]
    window = int(setting(run, "collapse.window") or WINDOW)
    trailing = seen.where(np.isfinite(seen)).rolling(window, min_periods=1).mean().iloc[window - 1 :]
    held = trailing[trailing >= DECLINE * trailing.cummax()]
    return min(step, int(held.index[-1]) + 1) if len(held) else step


@dataclass(frozen=True)
class Watched:
    """One signal of one run: its excess by step, and when the run's decline and the rule's collapse were."""

    run: CompactRun
    excess: pd.Series
    decline: int | None

    @property
    def calm(self) -> pd.Series:
        """The excess on steps without a collapse within HORIZON steps: all, or those well before it."""
        return self.excess if self.decline is None else self.excess.loc[: self.decline - HORIZON - 1]

    @property
    def heard(self) -> bool:
        """Whether the signal was judged at all before the decline."""
        return len(self.excess) > 0 and (self.decline is None or int(self.excess.index[0]) < self.decline)

    def alarm(self, threshold: float) -> int | None:
        """The first step above the threshold."""
        above = self.excess.index[self.excess > threshold]
        return int(above[0]) if len(above) else None


def watchable(runs: Iterable[CompactRun]) -> list[CompactRun]:
    """Runs that can be judged, each once: where the rewards of one are the first of another's (two arms that
    came to the same updates, a shorter run of the same configuration), the longer one stands for both.

    Not runs that start from another's model (suite recovery), whose baseline is no beginning, nor those that
    never earned reward, which cannot collapse by the rule.
    """
    kept: list[CompactRun] = []
    beginnings: set[tuple[int, tuple[float, ...]]] = set()
    for run in sorted(runs, key=lambda run: -len(run.steps)):
        if run.suite.startswith("recovery") or run.collapse.reason == "never earned reward":
            continue
        rewards = tuple(run.steps["reward/mean"])
        if (run.seed, rewards) not in beginnings:
            kept.append(run)
            beginnings |= {(run.seed, rewards[:length]) for length in range(1, len(rewards) + 1)}
    return kept


def threshold(watched: Sequence[Watched], rate: float = FALSE_ALARMS) -> float:
    """The lowest threshold that keeps to the rate on these runs; NaN where none of them has a calm step."""
    highest = [float(w.excess.max()) for w in watched if w.decline is None and len(w.excess)]
    before = [float(z) for w in watched if w.decline is not None for z in w.calm]
    bounds = [_exceeded_by(rate, found) for found in (highest, before) if found]
    return max(bounds, default=math.nan)


def _exceeded_by(rate: float, values: list[float]) -> float:
    """The lowest of the values that at most this share of them exceeds."""
    allowed = math.floor(rate * len(values) + 1e-9)  # 0.3 * 10 is a little less than 3
    return sorted(values)[-1 - allowed]


@dataclass(frozen=True)
class EarlyWarning:
    """What one signal gave on runs held out.

    warned       of the collapses whose decline came after the signal's first judged step, those with an alarm
                 before the decline and at most HORIZON steps ahead of it
    too_soon     the other collapses, before whose decline no alarm could come
    early        collapsed runs whose first alarm came sooner than that: false
    late         those whose first alarm came with the decline or after it
    lead         steps from alarm to decline of warned and late runs, negative where late; lead_rule: to the
                 rule's step
    false_alarms    of the runs without a collapse, those with an alarm
    calm_steps   of the steps more than HORIZON before a decline, the share above the threshold; NaN for none
    unjudged     runs held out without a threshold, no run of the other seeds having a calm step
    """

    signal: str
    warned: Proportion
    early: int
    late: int
    lead: tuple[int, ...]
    lead_rule: tuple[int, ...]
    false_alarms: Proportion
    calm_steps: float
    too_soon: int
    unjudged: int

    @property
    def collapses(self) -> int:
        """All of them."""
        return self.warned.n + self.too_soon


def early_warning(name: str, runs: Sequence[CompactRun], rate: float = FALSE_ALARMS) -> EarlyWarning:
    """Judge a signal on runs (`watchable`): every fold by the threshold of the other seeds."""
    signal = SIGNALS[name]
    watched = [Watched(run, excess(run.steps, signal), decline(run)) for run in runs if has(run, signal)]
    # a run that ended before any excess is no evidence of calm
    watched = [w for w in watched if len(w.excess) or w.decline is not None]
    alarms: list[tuple[Watched, int | None]] = []
    before: list[bool] = []
    unjudged = 0
    for fold in range(FOLDS):
        held_out = [w for w in watched if w.run.seed % FOLDS == fold]
        level = threshold([w for w in watched if w.run.seed % FOLDS != fold], rate)
        if math.isnan(level):
            unjudged += len(held_out)
            continue
        alarms += [(w, w.alarm(level)) for w in held_out]
        before += [z > level for w in held_out if w.decline is not None for z in w.calm]
    collapsed = [(w.decline, w.run.collapse.step, at) for w, at in alarms if w.decline is not None]
    calm = [at for w, at in alarms if w.decline is None]
    too_soon = sum(not w.heard for w, _ in alarms if w.decline is not None)
    told = [(d, c or d, at) for d, c, at in collapsed if at is not None and at >= d - HORIZON]
    return EarlyWarning(
        name,
        warned=proportion(sum(at < d for d, _, at in told), len(collapsed) - too_soon),
        early=sum(at is not None and at < d - HORIZON for d, _, at in collapsed),
        late=sum(at >= d for d, _, at in told),
        lead=tuple(d - at for d, _, at in told),
        lead_rule=tuple(c - at for _, c, at in told),
        false_alarms=proportion(sum(at is not None for at in calm), len(calm)),
        calm_steps=float(np.mean(before)) if before else math.nan,
        too_soon=too_soon,
        unjudged=unjudged,
    )


def all_signals(runs: Iterable[CompactRun]) -> list[EarlyWarning]:
    """Every signal that the runs logged."""
    kept = watchable(runs)
    return [
        early_warning(name, kept) for name, signal in SIGNALS.items() if any(has(run, signal) for run in kept)
    ]


@dataclass(frozen=True)
class Median:
    """A median with its 95 % percentile bootstrap, or below five values their range; NaN for none."""

    n: int
    value: float
    low: float
    high: float


def median(values: Sequence[float]) -> Median:
    """The median of one number a run."""
    n = len(values)
    if n == 0:
        return Median(0, math.nan, math.nan, math.nan)
    low, high = float(min(values)), float(max(values))
    if n >= MIN_SEEDS_FOR_INTERVAL and low < high:
        found = bootstrap(
            (np.asarray(values, dtype=float),), np.median, method="percentile", n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE, rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        low, high = float(found.low), float(found.high)
    return Median(n, float(np.median(values)), low, high)
