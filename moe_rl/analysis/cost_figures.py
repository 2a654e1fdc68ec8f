"""Figures of what Routing Replay costs against the length of responses."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_rl.analysis.claims_cost import KINDS, at_length, lengths_of
from moe_rl.analysis.measured_files import Group, Measured, by_settings
from moe_rl.analysis.plots import PALETTE, Panel, band, dress

LABELS = {"none": "no replay", "replay": "+ replay (R2)", "rollout_replay": "+ rollout replay (R3)"}
COLORS = dict(zip(LABELS, PALETTE, strict=False))


def cost_figures(measured: Sequence[Measured]) -> dict[str, Figure]:
    """By name; with several configurations their number is in it."""
    groups = [(words, group) for words, group in by_settings(measured).items() if lengths_of(group)]
    return {
        group[0].suite + (f"_{number}" if len(groups) > 1 else ""): against_length(words, group)
        for number, (words, group) in enumerate(groups, start=1)
    }


def against_length(words: str, group: Group) -> Figure:
    """Time of a step, its ratio to one without replay, and peak memory, by length of the responses."""
    figure = Figure(figsize=(12.5, 3.9))
    axes = figure.subplots(1, 3)
    for ax, (title, unit) in zip(
        axes,
        (
            ("CPU time of a training step", "ms"),
            ("… over one without replay", "ratio"),
            ("peak memory of a step", "MiB"),
        ),
        strict=True,
    ):
        dress(ax, Panel(title, unit, pd.DataFrame(), xlabel="response length (tokens)"))
        ax.set_xscale("log")
    for subject in LABELS:
        _line(axes[0], group, subject, "step/ms")
        _line(axes[2], group, subject, "memory/mib")
    for subject in KINDS:
        _line(axes[1], group, subject, "step/ratio")
    axes[0].set_yscale("log")
    axes[2].set_yscale("log")
    axes[1].axhline(1, color="#888888", linewidth=0.8)
    for ax in axes:
        ax.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{words}n = {len(group)} seeds", x=0.02, ha="left", fontsize=9.5)
    figure.tight_layout()
    return figure


def _line(ax: Axes, group: Group, subject: str, metric: str) -> None:
    lengths = lengths_of(group)
    found = [at_length(group, subject, metric, n) for n in lengths]
    band(ax, lengths, found, COLORS[subject], LABELS[subject])
