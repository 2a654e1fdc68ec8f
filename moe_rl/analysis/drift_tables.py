"""Drift runs as one long table: every number of every run, and its mean and interval over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_rl.analysis.comparison import arm_labels, differing, flatten
from moe_rl.analysis.statistics import summarise_columns
from moe_rl.store import Run, StoreError

DRIFT_TABLE = Path("tables") / "drift.csv"
NOT_DRIFT = ("drift.floor", "drift.reasons", "drift.resamples")  # what is measured beside it
KEYS = ["label", "subject", "rows", "metric", "by", "at"]  # what names a number, its seed apart
# What can be the x axis of a sweep besides a key of the configuration: numbers of the updates table.
MEASURED = {
    "relative_update_norm": "update norm ‖Δθ‖/‖θ‖",
    "kl_k3": "KL(old ‖ new), k3 estimate (nats per token)",
    "log_ratio_sq": "mean square token log-ratio (nats²)",
}


def is_drift_run(run: Run) -> bool:
    """Whether `measure_drift` made the run directory."""
    return "drift" in run.config


@dataclass(frozen=True)
class DriftRuns:
    """Measurements; runs that differ in more than their seed have labels of their own.

    runs: those that have their tables, in the order of their labels, then seeds.  left_out: the others,
    unfinished or failed.
    """

    runs: tuple[Run, ...]
    left_out: tuple[Run, ...]

    def __init__(self, runs: Sequence[Run]) -> None:
        measured = [run for run in runs if (run.path / DRIFT_TABLE).exists()]
        if not measured:
            raise StoreError("expected finished runs of measure_drift (tables/drift.csv in them), found none")
        labels = arm_labels(measured, NOT_DRIFT)
        ordered = sorted(measured, key=lambda run: (natural(labels[run]), run.seed or 0))
        object.__setattr__(self, "runs", tuple(ordered))
        object.__setattr__(self, "left_out", tuple(run for run in runs if run not in measured))

    @cached_property
    def labels(self) -> dict[Run, str]:
        """The arm of each run, with the settings in which it differs from other runs of that arm."""
        found = arm_labels(self.runs, NOT_DRIFT)
        return {run: found[run] for run in self.runs}

    @cached_property
    def swept(self) -> list[str]:
        """Dotted keys of the configuration that differ between runs, seeds and labels apart."""
        keys = differing([flatten(run.config) for run in self.runs])
        return [key for key in keys if key not in ("arm", "experiment", *NOT_DRIFT)]

    @cached_property
    def _tables(self) -> dict[str, pd.DataFrame]:
        return {}

    def table(self, name: str) -> pd.DataFrame:
        """tables/<name>.csv of all runs, with label, seed and path; empty where no run has it."""
        if name not in self._tables:
            self._tables[name] = self._read(name)
        return self._tables[name]

    def over_seeds(self, name: str) -> pd.DataFrame:
        """`over_seeds` of tables/<name>.csv of all runs, computed once."""
        if name not in self._over_seeds:
            self._over_seeds[name] = over_seeds(self.table(name))
        return self._over_seeds[name]

    @cached_property
    def _over_seeds(self) -> dict[str, pd.DataFrame]:
        return {}

    def _read(self, name: str) -> pd.DataFrame:
        parts = []
        for run in self.runs:
            file = run.path / "tables" / f"{name}.csv"
            if file.exists():
                part = pd.read_csv(file, dtype={"subject": str, "rows": str, "at": str}, keep_default_na=True)
                part[["rows", "at"]] = part[["rows", "at"]].fillna("")
                parts.append(part.assign(label=self.labels[run], seed=run.seed or 0, path=str(run.path)))
        columns = [*KEYS, "seed", "path", "sum", "count", "value", "low", "high", "n", "unit"]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def natural(text: str) -> tuple[Any, ...]:
    """A key that sorts optim.lr=3e-05 before optim.lr=0.0001."""
    parts: list[Any] = []
    for word in text.replace("(", " ").replace(")", " ").replace("=", " ").replace(",", " ").split():
        try:
            parts.append((0, float(word), ""))
        except ValueError:
            parts.append((1, 0.0, word))
    return tuple(parts)


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """One row for each number: KEYS, value, low, high, seeds, n, interval.

    Of several seeds, the mean and its interval over seeds (`statistics.summarise_columns`); of one, its own
    value with the bootstrap interval over its responses or prompts.
    """
    if table.empty:
        return pd.DataFrame(columns=[*KEYS, "value", "low", "high", "seeds", "n", "interval"])
    numbers = table.groupby(KEYS, sort=False)
    found = numbers.agg(low=("low", "first"), high=("high", "first"), unit=("unit", "first"), n=("n", "sum"))
    found["seeds"] = numbers.size()
    place, turn = numbers.ngroup().to_numpy(), numbers.cumcount().to_numpy()
    values_NC = np.full((int(turn.max()) + 1, len(found)), np.nan)
    values_NC[turn, place] = table["value"]
    over = summarise_columns(values_NC).set_index(found.index)
    several = found["seeds"] > 1
    found["value"] = over["mean"]
    for bound in ("low", "high"):
        found[bound] = over[bound].where(several, found[bound])
    own = ("95 % bootstrap interval over " + found["unit"].astype(str)).where(found["low"].notna(), "")
    found["interval"] = over["interval"].where(several, own)
    return found.reset_index()[[*KEYS, "value", "low", "high", "seeds", "n", "interval"]]


def chosen(
    table: pd.DataFrame, *, metric: str | None = None, by: str | None = None, **equal: str
) -> pd.DataFrame:
    """The rows of a table with these values."""
    wanted = equal | {key: value for key, value in (("metric", metric), ("by", by)) if value is not None}
    keep = np.ones(len(table), dtype=bool)
    for key, value in wanted.items():
        keep &= (table[key] == value).to_numpy()
    return table[keep]


def first_and_last(table: pd.DataFrame) -> list[tuple[str, str]]:
    """The first and the last update that a table has, with their titles; one where they are the same."""
    numbers = sorted({int(subject) for subject in table["subject"] if str(subject).isdigit()})
    if not numbers:
        return []
    if numbers[0] == numbers[-1]:
        return [(str(numbers[0]), "after the update" if numbers[0] == 1 else f"after update {numbers[0]}")]
    return [(str(numbers[0]), "after the first update"), (str(numbers[-1]), "after the last update")]


def ends_of_each(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows after the first update of each run and, where any has more, after its own last, with titles.

    Of a table with a column `path`; runs of one sweep may split a rollout into other numbers of updates.
    """
    ends = first_and_last(table)
    if len(ends) < 2:
        return [(title, chosen(table, subject=subject)) for subject, title in ends]
    numbers = pd.to_numeric(table["subject"])
    last = table[numbers == numbers.groupby(table["path"]).transform("max")]
    return [(ends[0][1], chosen(table, subject=ends[0][0])), (ends[1][1], last)]


def rows_named(table: pd.DataFrame) -> list[str]:
    """Response before prompt; of traces without a prompt length, all."""
    present = set(table["rows"])
    return [name for name in ("response", "prompt", "all") if name in present]
