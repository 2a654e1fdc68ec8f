"""Drawing: one panel of curves with bands, the colours of the arms, a log axis that shows zeros."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from moe_rl.analysis.comparison import ARM_ORDER
from moe_rl.analysis.curves import bands
from moe_rl.analysis.statistics import Summary

# Okabe and Ito's colours, which stay apart under the common colour blindnesses; yellow is too light for lines
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STEP = "step (rollout batches)"  # the x axis on which a run can be seen to end
DASHES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Look:
    """How an arm is drawn, the same in every figure of a report."""

    color: str
    dash: str


@dataclass(frozen=True)
class Panel:
    """What one pair of axes shows.

    curves: rows of arm, seed, x, value; with `bars`, one row a run.  log: a log axis, zeros on a line of
    their own.  ended: (arm, seed) of runs short of their last step, marked where they end.
    """

    title: str
    ylabel: str
    curves: pd.DataFrame
    xlabel: str = STEP
    log: bool = False
    percent: bool = False
    markers: bool = False
    bars: bool = False
    ended: frozenset[tuple[str, int]] = frozenset()


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """Colour and dash of every arm: the paper's three arms first, whatever else is compared."""
    ordered = [*ARM_ORDER, *sorted(set(arms) - set(ARM_ORDER))]
    return {
        arm: Look(PALETTE[i % len(PALETTE)], DASHES[(i // len(PALETTE)) % len(DASHES)])
        for i, arm in enumerate(ordered)
    }


def draw(panels: Sequence[Panel], look: Mapping[str, Look], columns: int = 2) -> Figure:
    """A figure of panels, with one legend that gives every arm's number of runs."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(8.2 if columns == 1 else 10.5, 0.55 + (3.6 if columns < 3 else 2.9) * rows))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, panel in zip(axes, panels, strict=False):
        dress(ax, panel)
        (draw_bars if panel.bars else draw_curves)(ax, panel, look)
        if panel.log:
            _log_axis(ax, panel)
    for ax in axes[len(panels) :]:
        ax.remove()
    legend(figure, panels, look)
    return figure


def dress(ax: Axes, panel: Panel) -> None:
    """Labels, a light grid, no box."""
    ax.set_title(panel.title, fontsize=10.5, loc="left")
    ax.set_xlabel(panel.xlabel, fontsize=9)
    ax.set_ylabel(panel.ylabel, fontsize=9)
    ax.tick_params(labelsize=8.5, which="both")
    ax.grid(color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if panel.percent:
        ax.yaxis.set_major_formatter(PercentFormatter(xmax=1))


def draw_curves(ax: Axes, panel: Panel, look: Mapping[str, Look]) -> None:
    """Thin lines for the runs, a thick line for their mean, a band where there are several."""
    floor = zero_line(panel) if panel.log else -np.inf
    band = bands(panel.curves)
    for arm in panel.curves["arm"].unique():
        style, mean = look[arm], band[band["arm"] == arm]
        for seed, run in panel.curves[panel.curves["arm"] == arm].groupby("seed"):
            run = run.dropna()  # what is not measured at every step is a line all the same
            ax.plot(run["x"], np.maximum(run["value"], floor), color=style.color, linewidth=0.6, alpha=0.35)
            if (arm, seed) in panel.ended:
                last = run.tail(1)
                ax.plot(last["x"], np.maximum(last["value"], floor), "x", color=style.color, markersize=7)
        marker = "o" if panel.markers else ""
        ax.plot(
            mean["x"],
            np.maximum(mean["mean"], floor),
            color=style.color,
            linestyle=style.dash,
            linewidth=2,
            marker=marker,
            markersize=4,
        )
        ax.fill_between(
            mean["x"],
            np.maximum(mean["low"], floor),
            np.maximum(mean["high"], floor),
            color=style.color,
            alpha=0.16,
            linewidth=0,
        )
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_bars(ax: Axes, panel: Panel, look: Mapping[str, Look]) -> None:
    """Bars of the mean over runs with the value written above, the runs as dots."""
    floor = zero_line(panel) if panel.log else -np.inf
    arms = list(panel.curves["arm"].unique())
    for position, arm in enumerate(arms):
        values = panel.curves.loc[panel.curves["arm"] == arm, "value"]
        height = float(values.mean())
        ax.bar(position, np.maximum([height], floor), color=look[arm].color, alpha=0.55, width=0.6)
        ax.plot([position] * len(values), np.maximum(values, floor), "o", color="#333333", markersize=3.5)
        ax.annotate(
            f"{height:.3g}",
            (position, np.maximum(values, floor).max()),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    ax.set_xticks(range(len(arms)), [arm.replace(" (", "\n(") for arm in arms])
    ax.grid(axis="x", visible=False)
    ax.margins(y=0.15)


def zero_line(panel: Panel) -> float:
    """Where a log axis shows zeros: below the smallest other value, which is the only honest place."""
    values = panel.curves["value"]
    positive = values[values > 0]
    return float(positive.min()) / 4 if len(positive) else 0.0


def _log_axis(ax: Axes, panel: Panel) -> None:
    """Make a drawn axis logarithmic and mark the line of the zeros, if there are any."""
    floor = zero_line(panel)
    if floor == 0:  # nothing that a log axis could show
        return
    ax.set_yscale("log")
    if (panel.curves["value"] <= 0).any():  # below zero by rounding, as a KL estimate can be
        ax.axhline(floor, color="#888888", linewidth=0.8, linestyle=":")
        ax.annotate(
            "0",
            (1, floor),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            ha="left",
            va="center",
            fontsize=8.5,
        )
        ax.set_ylim(bottom=floor / 2)


def band(
    ax: Axes, x: Sequence[float], found: Sequence[Summary], color: str, label: str, dash: str = "-"
) -> None:
    """Means as a line with points, their intervals as a band."""
    ax.plot(x, [s.mean for s in found], dash, color=color, marker="o", markersize=3, label=label)
    ax.fill_between(x, [s.low for s in found], [s.high for s in found], color=color, alpha=0.14, linewidth=0)


def legend(figure: Figure, panels: Sequence[Panel], look: Mapping[str, Look]) -> None:
    """One legend above the panels, with every arm's number of runs."""
    curves = pd.concat([panel.curves for panel in panels])
    handles, labels = [], []
    for arm in curves["arm"].unique():
        style = look[arm]
        (line,) = figure.axes[0].plot([], [], color=style.color, linestyle=style.dash, linewidth=2)
        handles.append(line)
        labels.append(f"{arm} (n = {curves.loc[curves['arm'] == arm, 'seed'].nunique()})")
    columns = min(len(labels), 4 if max(map(len, labels)) < 32 else 2)
    legend_rows = -(-len(labels) // columns)
    height = figure.get_figheight() + 0.25 * (legend_rows - 1)
    figure.set_figheight(height)
    figure.legend(handles, labels, loc="upper left", ncols=columns, frameon=False, fontsize=9.5)
    figure.tight_layout(rect=(0, 0, 1, 1 - (0.12 + 0.25 * legend_rows) / height))
