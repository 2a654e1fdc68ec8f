"""Writes a report of drift runs, one or many: a page, every figure as PNG, the numbers over seeds as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_rl.analysis.drift_figures import draw_all
from moe_rl.analysis.drift_page import render
from moe_rl.analysis.drift_sweep import default_x, draw_sweep, sweep_table
from moe_rl.analysis.drift_tables import DriftRuns
from moe_rl.analysis.plots import looks
from moe_rl.analysis.report import write_csv, write_png
from moe_rl.store import Run, write_atomic
from moe_rl.store.files import writing


def write_drift_report(runs: Sequence[Run], out: Path, command: str, x: str | None = None) -> Path:
    """Write out/index.html, out/figures/*.png, and of several runs out/tables/*.csv; returns the page's path.

    x: what a sweep's figure has on its axis, a dotted key of the configuration or a measured number
    (`drift_tables.MEASURED`); None takes the one key in which the runs differ. Every file is whole at any
    moment, the page comes last. Raises StoreError for no runs, an x that no run has, and a folder that
    cannot be written.
    """
    found = DriftRuns(runs)
    look = looks(list(dict.fromkeys(found.labels.values())))
    tables, figures = {}, []
    if len(found.runs) > 1:
        tables["drift_over_seeds"] = found.over_seeds("drift")
        x = x or default_x(found)
        if x is not None:
            tables["sweep"] = sweep_table(found, x)
            of_sweep = looks(list(dict.fromkeys(tables["sweep"]["label"])))
            figures += [one for one in [draw_sweep(found, x, of_sweep)] if one is not None]
    figures += draw_all(found, look)
    for folder in ("figures", "tables"):
        with writing(out):
            (out / folder).mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        write_csv(table, out / "tables" / f"{name}.csv")
    for figure in figures:
        write_png(figure.figure, out / "figures" / f"{figure.name}.png")
    page = out / "index.html"
    write_atomic(page, render(found, figures, out, command))
    return page
