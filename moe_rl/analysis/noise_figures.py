"""Figures of noise: against response length, and between the gradients of mini-batches."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_rl.analysis.claims_noise import RATIOS, lengths_of
from moe_rl.analysis.measured_files import Group, Measured, by_settings, over_seeds
from moe_rl.analysis.plots import PALETTE, Panel, band, dress
from moe_rl.analysis.statistics import summarise

COLORS = dict(zip(RATIOS, PALETTE, strict=False))


def noise_figures(measured: Sequence[Measured]) -> dict[str, Figure]:
    """By name; with several configurations their number is in it."""
    found: dict[str, Figure] = {}
    groups = list(by_settings(measured).values())
    for number, group in enumerate(groups, start=1):
        name = group[0].suite + (f"_{number}" if len(groups) > 1 else "")
        if len(lengths_of(group)) > 1:
            found[f"{name}_length"] = against_length(group)
        if any((one.rows["table"] == "gradients").any() for one in group):
            found[f"{name}_gradients"] = of_gradients(group)
    return found


def against_length(group: Group) -> Figure:
    """Variances with their prediction for independent tokens, shares outside the clip ranges, clip units."""
    figure = Figure(figsize=(10.5, 7.8))
    axes = figure.subplots(2, 2).ravel()
    titles = (
        ("variance of log s, length-normalised", "nats²"),
        ("variance of the product's log", "nats²"),
        ("outside the paper's clip ranges", "share"),
        ("mean |log-ratio| in clip units", "clip ranges"),
    )
    for ax, (title, unit) in zip(axes, titles, strict=True):
        dress(ax, Panel(title, unit, pd.DataFrame(), xlabel="response length (tokens)"))
        ax.set_xscale("log")
    for subject, ratio in RATIOS.items():
        color = COLORS[subject]
        for ax, kind in ((axes[0], "sequence"), (axes[1], "product")):
            _line(ax, group, subject, f"{kind}/variance", color, "-", ratio)
            _line(ax, group, subject, f"{kind}/independent", color, ":", f"{ratio}, tokens independent")
        for ax, end in ((axes[2], "_outside"), (axes[3], "")):
            _line(ax, group, subject, f"grpo/token{end}", color, "--", f"{ratio}, tokens (GRPO)")
            _line(ax, group, subject, f"gspo/sequence{end}", color, "-", f"{ratio}, responses (GSPO)")
    for ax in (axes[0], axes[1], axes[3]):
        ax.set_yscale("log")
    axes[3].axhline(1, color="#888888", linewidth=0.8)
    for ax in axes:
        ax.legend(frameon=False, fontsize=8)
    figure.suptitle(f"n = {len(group)} seeds", x=0.02, ha="left", fontsize=9.5)
    figure.tight_layout()
    return figure


def _line(ax: Axes, group: Group, subject: str, metric: str, color: str, dash: str, label: str) -> None:
    lengths = lengths_of(group)
    found = [
        over_seeds(group, lambda one: one.value("length", subject, metric, n))  # noqa: B023
        for n in lengths
    ]
    band(ax, lengths, found, color, label, dash)


def of_gradients(group: Group) -> Figure:
    """Mean cosine of two mini-batch gradients by objective, the seeds as dots."""
    figure = Figure(figsize=(7.4, 3.8))
    ax = figure.subplots()
    dress(ax, Panel("cosine of two mini-batches' gradients", "mean cosine", pd.DataFrame(), xlabel=""))
    known = dict.fromkeys(group[0].rows.query("table == 'gradients'")["subject"])
    arms = [arm for arm in known if group[0].value("gradients", arm, "norm") > 0]
    for place, arm in enumerate(arms):
        values = [one.value("gradients", arm, "cosine_pairs") for one in group]
        found = summarise(values)
        ax.plot([place + 0.12] * len(values), values, "o", color="#888888", markersize=3.5)
        ax.plot([place, place], [found.low, found.high], color=PALETTE[1], linewidth=2)
        ax.plot([place], [found.mean], "o", color=PALETTE[1], markersize=6)
    ax.set_xticks(range(len(arms)), [f"{arm}\n(n = {len(group)})" for arm in arms])
    ax.axhline(0, color="#888888", linewidth=0.8)
    ax.margins(x=0.2)
    figure.tight_layout()
    return figure
