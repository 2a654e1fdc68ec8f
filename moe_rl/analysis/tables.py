"""The numbers of a comparison: one row a run, one row an arm, differences paired by seed."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moe_rl.analysis.comparison import Comparison, Member, ended_as_collapsed
from moe_rl.analysis.statistics import paired_difference, summarise

FINAL_SHARE = 0.1  # of the steps a run has done: what "final reward" averages over


@dataclass(frozen=True)
class Measure:
    """A column of the run table: its label and how a value is printed."""

    key: str
    label: str
    percent: bool = False

    def show(self, value: float) -> str:
        """Three significant digits; an en dash for a value that was not recorded."""
        if not math.isfinite(value):
            return "–"
        return f"{three_digits(100 * value)} %" if self.percent else three_digits(value)


def three_digits(value: float) -> str:
    """0.200, 12.0, 1234, 3.00e-05: comparable down a column."""
    if value == 0:
        return "0"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".removesuffix(".")


MEASURES = (
    Measure("start_greedy", "Start accuracy, greedy"),
    Measure("start_sampled", "Start accuracy, sampled"),
    Measure("final_greedy", "Final accuracy, greedy"),
    Measure("final_sampled", "Final accuracy, sampled"),
    Measure("final_reward", "Final reward (mean of the last 10 % of steps)"),
    Measure("clip_token", "Tokens clipped (fraction, mean over steps)"),
    Measure("drift_first", "Experts changed after the first update of a batch", percent=True),
    Measure("drift_old", "Experts changed after all updates of a batch", percent=True),
    Measure("drift_first_layer", "… in the first MoE layer", percent=True),
    Measure("drift_last_layer", "… in the last MoE layer", percent=True),
    Measure("seconds_per_step", "Seconds per step"),
)
COMPARED = ("final_reward", "final_greedy", "final_sampled")


def run_table(comparison: Comparison) -> pd.DataFrame:
    """One row a run: arm, seed, status, steps done and planned, collapse, and the keys of MEASURES.

    status is the run's own, or "collapsed" for one that ended itself at a value that is not finite.
    """
    return pd.DataFrame([_run_row(member) for member in comparison.members])


def _run_row(member: Member) -> dict[str, object]:
    steps = member.steps
    tail = max(1, math.ceil(FINAL_SHARE * len(steps)))
    rewards = steps["reward/mean"] if "reward/mean" in steps else pd.Series(dtype=float)
    return {
        "arm": member.arm,
        "seed": member.run.seed,
        "status": "collapsed" if ended_as_collapsed(member.run) else member.run.status,
        "short": member.short,
        "steps": len(steps),
        "steps_planned": member.run.config.get("steps"),
        "last_evaluation": int(member.evals["step"].iloc[-1]) if len(member.evals) else None,
        "start_greedy": _evaluation(member, "eval/greedy", at_start=True),
        "start_sampled": _evaluation(member, "eval/sampled", at_start=True),
        "final_greedy": _evaluation(member, "eval/greedy", at_start=False),
        "final_sampled": _evaluation(member, "eval/sampled", at_start=False),
        "final_reward": float(rewards.iloc[-tail:].mean()),
        "clip_token": _mean(steps, "clip_frac/token"),
        "drift_first": _mean(steps, "drift/first"),
        "drift_old": _mean(steps, "drift/old"),
        "drift_first_layer": _layer_mean(steps, 0),
        "drift_last_layer": _layer_mean(steps, -1),
        "seconds_per_step": _mean(steps, "time/total"),
        "collapse_step": member.collapse.step,
        "censored_at": member.collapse.censored_at,
        "collapse": str(member.collapse),
        "path": str(member.run.path),
    }


def _evaluation(member: Member, column: str, at_start: bool) -> float:
    """Accuracy at step 0, or at the last evaluation after it."""
    evals = member.evals
    if column not in evals:
        return math.nan
    chosen = evals.loc[evals["step"] == 0 if at_start else evals["step"] > 0, column]
    return float(chosen.iloc[-1]) if len(chosen) else math.nan


def _mean(steps: pd.DataFrame, column: str) -> float:
    return float(steps[column].mean()) if column in steps else math.nan


def _layer_mean(steps: pd.DataFrame, layer: int) -> float:
    if "drift/old_by_layer" not in steps:
        return math.nan
    return float(np.mean([layers[layer] for layers in steps["drift/old_by_layer"].dropna()]))


def arm_table(runs: pd.DataFrame) -> pd.DataFrame:
    """One row an arm from a run table: seeds, unfinished runs, collapses, and a summary of every measure.

    A measure gives <key>, <key>_iqm, <key>_low, <key>_high, <key>_n; `interval` says what low and high are.
    `clip_ratio` is the arm's mean clip fraction over that of grpo, NaN where grpo is absent or clips nothing.
    """
    rows = []
    for arm, group in runs.groupby("arm", sort=False):
        row: dict[str, object] = {
            "arm": arm,
            "seeds": group["seed"].nunique(),
            "short": int(group["short"].sum()),
            "collapse": _collapses(group),
            "interval": summarise(group["steps"]).interval,
        }
        for measure in MEASURES:
            found = summarise(group[measure.key])
            row |= {
                measure.key: found.mean,
                f"{measure.key}_iqm": found.iqm,
                f"{measure.key}_low": found.low,
                f"{measure.key}_high": found.high,
                f"{measure.key}_n": found.n,
            }
        rows.append(row)
    table = pd.DataFrame(rows)
    baseline = table.loc[table["arm"] == "grpo", "clip_token"]
    divisor = baseline.iloc[0] if len(baseline) and baseline.iloc[0] > 0 else math.nan
    table["clip_ratio"] = table["clip_token"] / divisor
    return table


def _collapses(group: pd.DataFrame) -> str:
    hit = group[group["collapse_step"].notna()].sort_values("collapse_step")
    survived = group[group["collapse_step"].isna()]
    steps = sorted({int(step) for step in survived["censored_at"]})
    horizon = f"none by step {' and '.join(map(str, steps))}"
    never = int(survived["collapse"].str.contains("never earned").sum())
    parts = []
    if len(hit):
        where = ", ".join(f"seed {row.seed} at {row.collapse}" for row in hit.itertuples())
        parts.append(f"{len(hit)} of {len(group)}: {where}")
    if len(survived):
        parts.append(f"the other{'s' * (len(survived) > 1)} {horizon}" if len(hit) else horizon)
    if never:
        parts.append(f"{never} never earned reward")
    return "; ".join(parts)


def difference_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Every arm minus the first arm of a run table, over shared seeds: one row an arm and measure."""
    arms = list(dict.fromkeys(runs["arm"]))
    rows = []
    for arm in arms[1:]:
        for key in COMPARED:
            found = paired_difference(_by_seed(runs, arm, key), _by_seed(runs, arms[0], key))
            rows.append(
                {
                    "arm": arm,
                    "minus": arms[0],
                    "measure": key,
                    "difference": found.mean,
                    "low": found.low,
                    "high": found.high,
                    "pairs": found.n,
                    "interval": found.interval,
                }
            )
    return pd.DataFrame(rows)


def _by_seed(runs: pd.DataFrame, arm: str, key: str) -> dict[int, float]:
    rows = runs[runs["arm"] == arm]
    return dict(zip(rows["seed"], rows[key], strict=True))
