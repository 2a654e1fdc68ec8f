"""The figures of a drift report: what each shows, in which units, and what its caption says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from moe_rl.analysis.drift_tables import DriftRuns, chosen, first_and_last, over_seeds, rows_named
from moe_rl.analysis.plots import Look, Panel, dress, legend

CHANGED = "experts changed"
PARTS = {"router": "#D55E00", "hidden": "#0072B2", "interaction": "#999999"}


@dataclass(frozen=True)
class PointPanel:
    """A panel of points with intervals.

    frame: its titles and axes, and the seeds' curves.  points: rows of label, x, value, low, high, seeds,
    interval.  ticks: the names of x = 0, 1, …, for what is no number.  floor: (name, value) of dotted lines.
    """

    frame: Panel
    points: pd.DataFrame
    log_x: bool = False
    ticks: tuple[str, ...] = ()
    floor: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class DriftFigure:
    """A finished figure: its data are the tables beside it."""

    name: str
    title: str
    caption: str
    figure: Figure


def draw_all(runs: DriftRuns, look: Mapping[str, Look]) -> list[DriftFigure]:
    """Every figure for which the runs have tables, in the order of the report."""
    found = [make(runs, look) for make in (by_layer, by_position, by_update, floor, attribution, margins)]
    return [figure for figure in found if figure is not None]


def panel(
    table: pd.DataFrame,
    title: str,
    xlabel: str,
    ylabel: str = CHANGED,
    x: str = "at",
    floor: tuple[tuple[str, float], ...] = (),
) -> PointPanel:
    """A panel of the rows of a table; `x` is the column on its axis."""
    points = over_seeds(table)
    points = points.assign(x=points[x].astype(float))
    curves = table.assign(arm=table["label"], x=table[x].astype(float))[["arm", "seed", "x", "value"]]
    return PointPanel(Panel(title, ylabel, curves, xlabel, percent=True), points, floor=floor)


def by_layer(runs: DriftRuns, look: Mapping[str, Look]) -> DriftFigure | None:
    """Experts changed by layer, after the first and the last update."""
    drift = runs.table("drift")
    table = chosen(drift, metric="experts", by="layer", rows=rows_named(drift)[0])
    panels = [
        panel(chosen(table, subject=subject), title, "MoE layer (number of the decoder layer)")
        for subject, title in first_and_last(table)
    ]
    caption = "Share of the old policy's experts that are no longer chosen, 1 − |A ∩ B| / K, by layer."
    return figure("drift_by_layer", "Drift by layer", caption, panels, look)


def by_position(runs: DriftRuns, look: Mapping[str, Look]) -> DriftFigure | None:
    """Experts changed by position in the response, after the last update."""
    drift = runs.table("drift")
    rows = rows_named(drift)[0]
    table = chosen(drift, metric="experts", by="position", rows=rows)
    where = (
        "position in the response (rows that score its tokens)" if rows == "response" else "row of the trace"
    )
    panels = [panel(chosen(table, subject=subject), title, where) for subject, title in first_and_last(table)]
    caption = "Experts changed over all layers, by position; only longer responses have the late ones."
    return figure("drift_by_position", "Drift by position", caption, panels, look)


def by_update(runs: DriftRuns, look: Mapping[str, Look]) -> DriftFigure | None:
    """Experts changed after each update of the batch, response and prompt tokens apart."""
    drift = runs.table("drift")
    table = chosen(drift, metric="experts", by="all")
    if table["subject"].nunique() < 2:
        return None
    lines = floor_lines(runs)
    panels = [
        panel(
            chosen(table, rows=rows),
            f"{rows} tokens",
            "updates since sampling",
            x="subject",
            floor=lines,
        )
        for rows in rows_named(drift)
    ]
    caption = (
        "Experts changed against π_old after every update of the rollout batch, on its own tokens. Dotted: "
        "the noise floor with unchanged weights, of the path where it is largest."
    )
    return figure("drift_by_update", "Drift by update", caption, panels, look)


def floor_lines(runs: DriftRuns) -> tuple[tuple[str, float], ...]:
    """The largest floor of a path on response tokens, by its mean: above it, drift is no rounding."""
    points = over_seeds(chosen(runs.table("floor"), metric="experts", by="all", rows="response"))
    if points.empty or points["value"].max() == 0:
        return ()
    largest = points.loc[points["value"].idxmax()]
    return ((f"floor: {largest['subject'].replace('_', ' ')}", float(largest["value"])),)


def floor(runs: DriftRuns, look: Mapping[str, Look]) -> DriftFigure | None:
    """Each path of the noise floor beside the drift, on a log axis."""
    of_path = chosen(runs.table("floor"), metric="experts", by="all", rows="response")
    if of_path.empty:
        return None
    drift = chosen(runs.table("drift"), metric="experts", by="all", rows="response")
    ends = [chosen(drift, subject=subject).assign(subject=title) for subject, title in first_and_last(drift)]
    points = over_seeds(pd.concat([of_path, *ends], ignore_index=True))
    names = list(dict.fromkeys(points["subject"]))
    labels = list(dict.fromkeys(points["label"]))
    drawn = Figure(figsize=(8.2, 1.2 + 0.3 * len(names) * max(1, 0.6 * len(labels))))
    ax = drawn.subplots()
    positive = points.loc[points["value"] > 0, "value"]
    zero = float(positive.min()) / 4 if len(positive) else 1e-6
    height = 0.8 / len(labels)
    for index, label in enumerate(labels):
        mine = points[points["label"] == label].set_index("subject").reindex(names)
        places = np.arange(len(names)) + (index - (len(labels) - 1) / 2) * height
        widths = np.maximum(mine["value"], zero)
        ax.barh(places, widths, height, color=look[label].color, alpha=0.6, label=label)
        for place, value, width in zip(places, mine["value"], widths, strict=True):
            if np.isfinite(value):
                text = "0" if value == 0 else f"{100 * value:.3g} %"
                ax.text(width, place, f" {text}", va="center", fontsize=8)
    dress(ax, Panel("", "", pd.DataFrame(), CHANGED))
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    ax.set_xlim(zero, float(points["value"].max()) * 4 if len(positive) else 1)
    ax.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    ax.invert_yaxis()
    if len(labels) > 1:
        ax.legend(frameon=False, fontsize=8.5)
    drawn.tight_layout()
    caption = (
        "Experts that differ with unchanged weights when the same tokens take another path, and below it the "
        "drift of the updates; response tokens, log axis, an exact zero at its left end. The floor is of "
        "the first mini-batch of the rollout."
    )
    return DriftFigure("floor", "Noise floor beside drift", caption, drawn)


def attribution(runs: DriftRuns, look: Mapping[str, Look]) -> DriftFigure | None:
    """Stacked by layer: changed by the router alone, by the hidden states alone, and what is left."""
    table = chosen(runs.table("attribution"), by="layer", rows="response")
    if table.empty:
        return None
    ends, labels = first_and_last(table), list(dict.fromkeys(table["label"]))
    drawn = Figure(figsize=(10.5, 0.5 + 2.9 * len(labels)))
    axes = drawn.subplots(len(labels), len(ends), squeeze=False)
    for row, label in enumerate(labels):
        for column, (subject, title) in enumerate(ends):
            points = over_seeds(chosen(table, label=label, subject=subject))
            points = points.assign(x=points["at"].astype(float))
            _stack(axes[row][column], points, title if len(labels) == 1 else f"{label}, {title}")
    drawn.tight_layout()
    caption = (
        "Why experts changed. Router: the new router on the old hidden states. Hidden states: the old router "
        "on the new ones. Interaction: what the two alone do not add up to; below zero where they undo each "
        "other. Dots: the actual change, the sum of the three."
    )
    return DriftFigure("attribution", "Attribution by layer", caption, drawn)


def _stack(ax: Axes, points: pd.DataFrame, title: str) -> None:
    dress(ax, Panel(title, CHANGED, pd.DataFrame(), "MoE layer", percent=True))
    above, below = None, None
    for part, color in PARTS.items():
        mine = chosen(points, metric=part).sort_values("x")
        values = mine["value"].to_numpy()
        above = np.zeros(len(values)) if above is None else above
        below = np.zeros(len(values)) if below is None else below
        start = np.where(values >= 0, above, below)
        ax.bar(mine["x"], values, bottom=start, color=color, alpha=0.75, width=0.8, label=part)
        above, below = above + np.maximum(values, 0), below + np.minimum(values, 0)
    both = chosen(points, metric="both").sort_values("x")
    ax.plot(both["x"], both["value"], "o", color="#111111", markersize=3.5, label="actual")
    ax.use_sticky_edges = False  # a part that is 0 would end the axis at the top of the bar below it
    ax.legend(frameon=False, fontsize=8)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def margins(runs: DriftRuns, look: Mapping[str, Look]) -> DriftFigure | None:
    """Drift by quantile of the router's margin, and how well changes were predicted, by layer."""
    by_quantile = chosen(runs.table("margins"), metric="sets", by="quantile")
    predicted = chosen(runs.table("prediction"), by="layer", rows="response")
    panels = [
        panel(
            chosen(by_quantile, subject=subject),
            f"sets changed, {title}",
            "margins by tenth, smallest first",
        )
        for subject, title in first_and_last(by_quantile)[:1]
    ]
    words = {"first_order": "first-order prediction", "margin_only": "smallest margins"}
    for method in words:
        for rate in ("precision", "recall"):
            table = chosen(predicted, metric=f"{method}/{rate}")
            panels += [
                panel(chosen(table, subject=subject), f"{words[method]}, {title}", "MoE layer", rate)
                for subject, title in first_and_last(table)[:1]
            ]
    caption = (
        "First: share of (token, layer) whose expert set changed, by the gap between the K-th and the "
        "(K+1)-th selection score before the update. Then the prediction of these changes from the "
        "derivative of the scores along the update: precision (of the changes predicted, how many came) and "
        "recall (of those that came, how many were predicted), beside picking as many tokens of the smallest "
        "margins."
    )
    return figure("margins", "Router margins and first-order prediction", caption, panels, look)


def figure(
    name: str, title: str, caption: str, panels: Sequence[PointPanel], look: Mapping[str, Look]
) -> DriftFigure | None:
    """Panels in two columns; None where none has a point."""
    panels = [one for one in panels if not one.points.empty]
    if not panels:
        return None
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    drawn = Figure(figsize=(8.2 if columns == 1 else 10.5, 0.55 + 3.5 * rows))
    axes = drawn.subplots(rows, columns, squeeze=False).ravel()
    for ax, one in zip(axes, panels, strict=False):
        dress(ax, one.frame)
        draw_points(ax, one, look)
    for ax in axes[len(panels) :]:
        ax.remove()
    legend(drawn, [one.frame for one in panels], look)
    return DriftFigure(name, title, f"{caption} {reading(panels)}".strip(), drawn)


def draw_points(ax: Axes, one: PointPanel, look: Mapping[str, Look]) -> None:
    """Thin lines for the seeds, a thick line for their mean, a band for the interval, dotted floors."""
    curves = one.frame.curves
    for label, points in one.points.groupby("label", sort=False):
        style, points = look[str(label)], points.sort_values("x")
        for _, run in curves[curves["arm"] == label].groupby("seed"):
            run = run.sort_values("x")
            ax.plot(run["x"], run["value"], color=style.color, linewidth=0.6, alpha=0.35)
        ax.plot(
            points["x"], points["value"], color=style.color, linestyle=style.dash, linewidth=1.8,
            marker="o", markersize=4,
        )  # fmt: skip
        low, high = (points[bound].fillna(points["value"]) for bound in ("low", "high"))
        ax.fill_between(points["x"], low, high, color=style.color, alpha=0.16, linewidth=0)
    for name, value in one.floor:
        ax.axhline(value, color="#555555", linewidth=0.9, linestyle=":")
        ax.annotate(
            name, (0.99, value), xycoords=("axes fraction", "data"), xytext=(0, 2),
            textcoords="offset points", ha="right", fontsize=7.5, color="#555555",
        )  # fmt: skip
    if one.log_x:
        ax.set_xscale("log")
    elif one.ticks:
        ax.set_xticks(range(len(one.ticks)), one.ticks)
    elif (one.points["x"] % 1 == 0).all():
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if one.frame.log:
        ax.set_yscale("log")


def reading(panels: Sequence[PointPanel]) -> str:
    """How lines and bands are to be read, for the runs at hand."""
    kinds = sorted({kind for one in panels for kind in one.points["interval"] if kind})
    seeds = max(int(one.points["seeds"].max()) for one in panels)
    lines = "Thin lines: seeds; thick line: their mean. " if seeds > 1 else ""
    return f"{lines}Band: {' or '.join(kinds)}." if kinds else lines.strip()
