"""The figures of the evidence, from the tables of finished runs; thick lines are IQMs over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from moe_rl.analysis.claims_models import TOPOLOGY
from moe_rl.analysis.claims_warning import SUITE, warning_figure
from moe_rl.analysis.clip_grid import clip_cells
from moe_rl.analysis.comparison import said
from moe_rl.analysis.contrasts import contrasts
from moe_rl.analysis.evidence import arms_of, final_greedy, final_reward, lifetimes, mean_of, summary_of
from moe_rl.analysis.plots import STEP, Look, Panel, dress, legend, looks
from moe_rl.analysis.recovery import BACK, outcomes
from moe_rl.analysis.regimes import dose_of, objective_of, regime_differences, replayed
from moe_rl.analysis.run_files import UNCLIPPED, CompactRun
from moe_rl.analysis.statistics import Summary, iqm_columns, summarise
from moe_rl.analysis.survival import kaplan_meier

Runs = Sequence[CompactRun]
POINTS = 60  # of a curve against cumulative tokens


def step_curves(runs: Runs, column: str) -> pd.DataFrame:
    """A column of every run as rows of arm, seed, x = step, value; evaluations begin at step 0."""
    parts = []
    for arm, group in arms_of(runs).items():
        for run in group:
            if column in run.table:
                rows = run.table[run.table[column].notna()]
                parts.append(
                    pd.DataFrame({"arm": arm, "seed": run.seed, "x": rows["step"], "value": rows[column]})
                )
    return _joined(parts)


def token_curves(runs: Runs, grid: int = POINTS) -> pd.DataFrame:
    """Reward (mean of five steps) against cumulative unclipped tokens, as far as all runs of an arm go."""
    parts = []
    for arm, group in arms_of(runs).items():
        having = [run for run in group if UNCLIPPED in run.steps]
        if not having:
            continue
        spent = [run.steps[UNCLIPPED].cumsum().to_numpy(dtype=float) for run in having]
        x = np.linspace(max(s[0] for s in spent), min(s[-1] for s in spent), grid)
        for run, tokens in zip(having, spent, strict=True):
            smooth = run.steps["reward/mean"].rolling(5, min_periods=1).mean()
            value = np.interp(x, tokens, smooth.to_numpy(dtype=float))
            parts.append(pd.DataFrame({"arm": arm, "seed": run.seed, "x": x, "value": value}))
    return _joined(parts)


def iqm_bands(curves: pd.DataFrame) -> pd.DataFrame:
    """IQM over seeds at every x: rows of arm, x, n, iqm, low, high, interval."""
    parts = []
    for arm, group in curves.groupby("arm", sort=False):
        table = group.pivot_table(index="seed", columns="x", values="value", dropna=False)
        band = iqm_columns(table.to_numpy(dtype=float))
        band.insert(0, "arm", arm)
        band.insert(1, "x", table.columns)
        parts.append(band[band["n"] > 0])
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def draw_iqm(ax: Axes, panel: Panel, look: Mapping[str, Look]) -> None:
    """Thin lines for the runs, a thick line for their IQM, its band."""
    dress(ax, panel)
    band = iqm_bands(panel.curves)
    for (arm, _), run in panel.curves.groupby(["arm", "seed"], sort=False):
        ax.plot(run["x"], run["value"], color=look[arm].color, linewidth=0.5, alpha=0.3)
    for arm, rows in band.groupby("arm", sort=False) if len(band) else ():
        style = look[str(arm)]
        ax.plot(rows["x"], rows["iqm"], color=style.color, linestyle=style.dash, linewidth=2)
        ax.fill_between(rows["x"], rows["low"], rows["high"], color=style.color, alpha=0.16, linewidth=0)


def curve_figure(panels: Sequence[Panel]) -> Figure:
    """Panels of IQM curves side by side, with one legend that gives the number of runs."""
    panels = [panel for panel in panels if len(panel.curves)]
    figure = Figure(figsize=(5.2 * len(panels), 4.2))
    axes = figure.subplots(1, len(panels), squeeze=False).ravel()
    look = looks([arm for panel in panels for arm in panel.curves["arm"].unique()])
    for ax, panel in zip(axes, panels, strict=True):
        draw_iqm(ax, panel, look)
    legend(figure, panels, look)
    return figure


def convergence(runs: Runs) -> Figure | None:
    """Figures 1 and 3: reward and held-out accuracy by step."""
    panels = [
        Panel("mean reward of the rollout batch", "reward", step_curves(runs, "reward/mean")),
        Panel("held-out accuracy, greedy", "accuracy (fraction)", step_curves(runs, "eval/greedy")),
    ]
    return curve_figure(panels) if any(len(panel.curves) for panel in panels) else None


def lengthening(runs: Runs) -> Figure | None:
    """Figure 1's second half: reward and response length while generation is lengthened."""
    panel = Panel("mean response length", "tokens", step_curves(runs, "response/length"))
    reward = Panel("held-out accuracy, greedy", "accuracy (fraction)", step_curves(runs, "eval/greedy"))
    return curve_figure([reward, panel]) if len(panel.curves) else None


def efficiency(runs: Runs) -> Figure | None:
    """Reward against unclipped tokens, and how many tokens were clipped."""
    tokens = Panel(
        "reward (mean of 5 steps)", "reward", token_curves(runs), xlabel="cumulative tokens not clipped"
    )
    clipped = Panel("tokens clipped", "fraction of tokens", step_curves(runs, "clip_frac/token"))
    return curve_figure([tokens, replace(clipped, xlabel=STEP)]) if len(tokens.curves) else None


def survival(runs: Runs) -> Figure | None:
    """Kaplan–Meier curves of the arms; a tick where runs were censored."""
    figure = Figure(figsize=(7.2, 4.4))
    ax = figure.subplots()
    dress(ax, Panel("time to collapse (Kaplan–Meier, 95 %)", "share not collapsed", pd.DataFrame()))
    arms = arms_of(runs)
    look = looks(list(arms))
    for arm, group in arms.items():
        lives = lifetimes(group)
        curve, style = kaplan_meier(lives), look[arm]
        ax.step(
            curve.steps,
            curve.survival,
            where="post",
            color=style.color,
            linestyle=style.dash,
            linewidth=2,
            label=f"{arm} ({curve.events} of {curve.n} collapsed)",
        )
        ax.fill_between(curve.steps, curve.low, curve.high, step="post", color=style.color, alpha=0.13)
        ends = [step for step, hit in zip(lives.steps, lives.collapsed, strict=True) if not hit]
        ax.plot(ends, [curve.at(step)[0] for step in ends], "|", color=style.color, markersize=9)
    ax.set_ylim(-0.03, 1.05)
    ax.legend(frameon=False, fontsize=8.5)
    figure.tight_layout()
    return figure


def clip_grid(runs: Runs) -> Figure | None:
    """Figure 2 over the grid: clip fractions and final accuracy against the scale of the ranges."""
    cells = clip_cells(runs)
    if not all(cells.values()):
        return None
    figure = Figure(figsize=(10.4, 4.0))
    left, right = figure.subplots(1, 2)
    look = looks(list(cells))
    scale = "clip range, as a multiple of the paper's"
    fraction = Panel("tokens clipped", "fraction of tokens", pd.DataFrame(), xlabel=scale)
    accuracy = Panel("final accuracy, greedy", "accuracy (fraction)", pd.DataFrame(), xlabel=scale)
    for ax, panel, measure in (
        (left, fraction, mean_of("clip_frac/token")),
        (right, accuracy, final_greedy),
    ):
        dress(ax, panel)
        for arm, by_scale in cells.items():
            points = {x: summary_of(group, measure) for x, group in sorted(by_scale.items())}
            _error_bars(ax, list(points), list(points.values()), look[arm], arm)
        scales = sorted({x for by_scale in cells.values() for x in by_scale})
        ax.set_xscale("log")
        ax.set_xticks(scales, [f"{x:g}" for x in scales])
        ax.set_xticks([], minor=True)
        ax.legend(frameon=False, fontsize=8.5)
    if all(mean_of("clip_frac/token")(run) > 0 for run in runs):
        left.set_yscale("log")
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    figure.tight_layout()
    return figure


def regimes(runs: Runs) -> Figure | None:
    """The search: replay minus GRPO in every regime."""
    rows = regime_differences(runs)
    if not rows:
        return None
    return _forest(
        [row.regime for row in rows],
        [row.difference.summary for row in rows],
        "final reward, grpo+replay − grpo",
    )


def doses(runs: Runs) -> Figure | None:
    """Final reward against the share of experts changed in the ratio pass, with and without replay."""
    having = [run for run in runs if dose_of(run) is not None]
    if not having:
        return None
    figure = Figure(figsize=(6.4, 4.2))
    ax = figure.subplots()
    panel = Panel("experts changed by hand", "final reward", pd.DataFrame(), "share of experts changed")
    dress(ax, panel)
    kinds = {
        name + (" (replayed: in both passes)" if both else " (in the ratio pass alone)"): (name, both)
        for name, both in sorted({(objective_of(run), replayed(run)) for run in having})
    }
    look = looks(list(kinds))
    for label, (name, both) in kinds.items():
        group = [run for run in having if objective_of(run) == name and replayed(run) == both]
        shares = sorted({dose_of(run) or 0.0 for run in group})
        at = {share: [run for run in group if (dose_of(run) or 0.0) == share] for share in shares}
        found = [summary_of(at[share], final_reward) for share in shares]
        _error_bars(ax, shares, found, look[label], label)
    ax.legend(frameon=False, fontsize=8.5)
    figure.tight_layout()
    return figure


def recovery(runs: Runs, everything: Runs) -> Figure | None:
    """What runs ended at, over their level before the decline, by start and treatment."""
    found = outcomes(runs, everything)
    if not found:
        return None
    figure = _forest(
        [outcome.words for outcome in found],
        [summarise(outcome.regained) for outcome in found],
        "reward at the end / before the decline (healthy: before going on)",
    )
    figure.axes[0].axvline(BACK, color="#888888", linewidth=0.8, linestyle=":")
    return figure


def forest_of(key: str, base: object, context: Sequence[str]) -> Callable[[Runs], Figure | None]:
    """A figure of the final reward at every other value of a setting less that at `base`, by context."""

    def draw(runs: Runs) -> Figure | None:
        found = contrasts(runs, key, base, context, final_reward)
        names = [", ".join(filter(None, (one.words, said(key, one.value)))) for one in found]
        rows = [contrast.difference.summary for contrast in found]
        return _forest(names, rows, f"final reward less that with {said(key, base)}") if found else None

    return draw


FIGURES: dict[str, dict[str, Callable[[Runs], Figure | None]]] = {
    "fig1_longer": {"longer": lengthening},
    "fig1": {"convergence": convergence, "survival": survival, "efficiency": efficiency},
    "fig2": {"clip_grid": clip_grid},
    "search_rates": {},
    "search": {"regimes": regimes},
    "intervention": {"doses": doses},
    "recompute": {"skipped": forest_of("rollout.recompute", True, ("arm", "rollout.sampler_dtype"))},
    "partial_rollout": {"ahead": forest_of("rollout.ahead", 0, ("arm", "rollout.recompute"))},
    "two_turn": {"turns": forest_of("advantages_by", "response", ("arm",))},
    "length_growth": {"lengths": lengthening},
    "dense_control": {"arms": forest_of("arm", "grpo", TOPOLOGY)},
    "moe_configurations": {"arms": forest_of("arm", "grpo", TOPOLOGY)},
}


def draw_all(runs: Runs) -> dict[str, Figure]:
    """Every figure that the runs allow, by <suite>_<name>."""
    found: dict[str, Figure] = {}
    for suite in sorted({run.suite for run in runs}):
        mine = [run for run in runs if run.suite == suite]
        prefix = next((name for name in FIGURES if suite.startswith(name)), None)
        for name, recipe in FIGURES[prefix].items() if prefix is not None else ():
            figure = recipe(mine)
            if figure is not None:
                found[f"{suite}_{name}"] = figure
        if suite.startswith("recovery"):
            figure = recovery(mine, runs)
            if figure is not None:
                found[suite] = figure
    warning = warning_figure(runs)
    return found if warning is None else found | {SUITE: warning}


def _error_bars(ax: Axes, x: Sequence[float], found: Sequence[Summary], style: Look, label: str) -> None:
    middle = np.array([summary.mean for summary in found])
    reach = np.abs(np.array([[s.low for s in found], [s.high for s in found]]) - middle)
    n = sorted({summary.n for summary in found})
    shown = f"{label} (n = {'–'.join(map(str, dict.fromkeys((n[0], n[-1]))))})" if n else label
    ax.errorbar(
        x, middle, yerr=reach, color=style.color, linestyle=style.dash, marker="o", markersize=4,
        capsize=2.5, label=shown,
    )  # fmt: skip


def _forest(names: Sequence[str], found: Sequence[Summary], xlabel: str) -> Figure:
    figure = Figure(figsize=(9.0, 1.2 + 0.36 * len(names)))
    ax = figure.subplots()
    dress(ax, Panel("", "", pd.DataFrame(), xlabel=xlabel))
    for place, summary in enumerate(found):
        ax.plot([summary.low, summary.high], [place, place], color="#0072B2", linewidth=2)
        ax.plot([summary.mean], [place], "o", color="#0072B2", markersize=5)
    ax.axvline(0, color="#888888", linewidth=0.8)
    labels = [f"{name} (n = {summary.n})" for name, summary in zip(names, found, strict=True)]
    ax.set_yticks(range(len(names)), labels, fontsize=8)
    ax.invert_yaxis()
    figure.tight_layout()
    return figure


def _joined(parts: list[pd.DataFrame]) -> pd.DataFrame:
    return (
        pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["arm", "seed", "x", "value"])
    )
