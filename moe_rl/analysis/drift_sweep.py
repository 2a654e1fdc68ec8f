"""Drift against what was swept: any key of the configuration, or a measured size of the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from moe_rl.analysis.comparison import arm_labels, setting
from moe_rl.analysis.drift_figures import CHANGED, DriftFigure, PointPanel, figure
from moe_rl.analysis.drift_tables import MEASURED, NOT_DRIFT, DriftRuns, chosen, ends_of_each, over_seeds
from moe_rl.analysis.plots import Look, Panel
from moe_rl.store import StoreError

FLOOR = "largest noise floor"
WIDE = 8.0  # a numeric axis that spans more than this factor is logarithmic


def default_x(runs: DriftRuns) -> str | None:
    """The one key in which the runs differ; None where there is none, or more than one."""
    return runs.swept[0] if len(runs.swept) == 1 else None


def sweep_table(runs: DriftRuns, x: str) -> pd.DataFrame:
    """One row a run, update and kind of token: experts changed, and the path of the largest floor.

    Columns label (of the runs that differ in x and seed alone), x, seed, subject, rows, metric, value, low,
    high, n, unit and path. `x` is a dotted key of the configuration or one of MEASURED. Raises StoreError for
    a key that no run has.
    """
    ignore = NOT_DRIFT if x in MEASURED else (*NOT_DRIFT, x)
    labels = arm_labels(runs.runs, ignore)
    if x not in MEASURED and all(setting(run, x) is None for run in runs.runs):
        raise StoreError(f"x={x}: expected a key of the configuration or one of {', '.join(MEASURED)}")
    drift = chosen(runs.table("drift"), metric="experts", by="all")
    floor = chosen(runs.table("floor"), metric="experts", by="all").assign(metric="floor")
    floor = floor.sort_values("value", kind="stable").groupby(["path", "rows"]).tail(1)
    updates = chosen(runs.table("updates"), metric=x)
    measured = {(row.path, row.subject): row.value for row in updates.itertuples()}
    table = pd.concat([drift, floor], ignore_index=True)
    by_path = {str(run.path): run for run in runs.runs}

    def place(path: str, subject: str) -> Any:
        return measured.get((path, subject)) if x in MEASURED else setting(by_path[path], x)

    table["x"] = [place(path, subject) for path, subject in zip(table["path"], table["subject"], strict=True)]
    table["label"] = [labels[by_path[path]] for path in table["path"]]
    return table


def draw_sweep(runs: DriftRuns, x: str, look: Mapping[str, Look]) -> DriftFigure | None:
    """Experts changed on response tokens against x, after the first and the last update; seeds as points."""
    table = chosen(sweep_table(runs, x), rows="response" if _has_response(runs) else "all")
    drift, floor = chosen(table, metric="experts"), chosen(table, metric="floor")
    if x in MEASURED:
        # every update of every run is a point: they are not averaged, since their x differ
        panels = [_panel(drift, "after each update", MEASURED[x], each=True)]
    else:
        panels = [_panel(pd.concat([after, floor]), title, x) for title, after in ends_of_each(drift)]
    caption = (
        f"Experts changed on response tokens against {MEASURED.get(x, x)}. Grey: with unchanged weights, on "
        "the path of the noise floor that changes most; the path that drift is measured by has 0 in float32."
    )
    return figure("sweep", f"Drift against {x}", caption, panels, {**look, FLOOR: Look("#777777", ":")})


def _has_response(runs: DriftRuns) -> bool:
    return bool((runs.table("drift")["rows"] == "response").any())


def _panel(table: pd.DataFrame, title: str, xlabel: str, each: bool = False) -> PointPanel:
    places = table["x"].tolist()
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in places)
    names: list[str] = []
    if not numeric:
        names = list(dict.fromkeys(shown(value) for value in places))
        places = [names.index(shown(value)) for value in places]
    table = table.assign(x=np.asarray(places, dtype=float))
    table["label"] = np.where(table["metric"] == "floor", FLOOR, table["label"])
    parts = []
    for (label, position), group in table.groupby(["label", "x"], sort=False):
        # a path of the floor and an update are other subjects of one number
        same = group.assign(label=label, subject="", metric="", at="")
        parts.append(over_seeds(same).assign(x=position))
    points = pd.concat(parts, ignore_index=True)
    curves = table.assign(arm=table["label"])[["arm", "seed", "x", "value"]]
    positive = table["x"].min() > 0 and table["x"].max() > WIDE * table["x"].min()
    values = table.loc[table["value"] > 0, "value"]
    log = len(values) == len(table) and values.max() > WIDE * values.min()
    if each:
        curves = curves.assign(seed=range(len(curves)))
    return PointPanel(
        Panel(title, CHANGED, curves, xlabel, percent=True, log=log),
        points,
        log_x=bool(numeric and positive),
        ticks=tuple(names),
    )


def shown(value: Any) -> str:
    """A setting as a tick: null is the default."""
    return "default" if value is None else str(value)
