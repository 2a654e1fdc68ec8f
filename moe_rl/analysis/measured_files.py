"""One small file per finished measurement of noise or cost, as `run_files` has one per run of training.

A file is `<folder>/<suite>/<arm>-<config hash>-seed<n>.csv`: a first line `# {...}` with everything that
names the measurement, then the rows of all its tables, the name of the table in front
(docs/open_questions.md).
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from moe_rl.analysis.comparison import told_apart
from moe_rl.analysis.run_files import Named, config_hash
from moe_rl.analysis.statistics import Summary, summarise
from moe_rl.store import Run, StoreError, write_atomic
from moe_rl.store.files import writing

COLUMNS = ("table", "subject", "metric", "at", "value", "low", "high", "n", "unit")


@dataclass(frozen=True)
class Measured(Named):
    """header: suite, arm, seed, config_hash, config, command, versions and commit.  rows: of COLUMNS."""

    rows: pd.DataFrame

    def values(self, table: str, subject: str, metric: str) -> pd.Series:
        """A metric by `at` (response length in tokens, 0 where there is one value); empty if not measured."""
        rows = self.rows
        found = rows[(rows["table"] == table) & (rows["subject"] == subject) & (rows["metric"] == metric)]
        return pd.Series(found["value"].to_numpy(), index=found["at"].fillna(0).astype(int))

    def value(self, table: str, subject: str, metric: str, at: int = 0) -> float:
        """One value; NaN if not measured."""
        return float(self.values(table, subject, metric).get(at, float("nan")))


Group = Sequence[Measured]  # of one configuration


def compact_measured(run: Run, suite: str) -> Measured | None:
    """The compact form of a run directory of a measurement; None for one that is not done."""
    files = sorted((run.path / "tables").glob("*.csv"))
    if run.status != "done" or not files:
        return None
    parts = []
    for file in files:
        try:
            part = pd.read_csv(file)
            part.insert(0, "table", file.stem)
            parts.append(part[list(COLUMNS)])
        except (OSError, ValueError, KeyError) as error:
            raise StoreError(f"{file} is no table of a measurement: {error}") from error
    environment = run.environment
    header = {
        "suite": suite,
        "arm": run.arm,
        "seed": run.seed or 0,
        "config_hash": config_hash(run.config),
        "config": run.config,
        **{key: environment.get(key) for key in ("command", "versions", "git_commit", "git_dirty")},
    }
    return Measured(header, pd.concat(parts, ignore_index=True))


def export_measured(runs: Iterable[Run], suite: str, folder: Path) -> list[Path]:
    """Write the file of every measurement that is done; the paths written."""
    found = [measured for run in runs if (measured := compact_measured(run, suite)) is not None]
    paths = [folder / f"{measured.id}.csv" for measured in found]
    for measured, path in zip(found, paths, strict=True):
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        rows = measured.rows.to_csv(index=False, float_format="%.6g")
        write_atomic(path, f"# {json.dumps(measured.header, sort_keys=True)}\n{rows}")
    return paths


def read_measured(folder: Path) -> list[Measured]:
    """Every measurement below `folder`, by suite, configuration and seed; StoreError for any other file."""
    found = []
    for path in sorted(folder.glob("*/*.csv")):
        try:
            first, _, rest = path.read_text(encoding="utf-8").partition("\n")
            measured = Measured(json.loads(first.removeprefix("# ")), pd.read_csv(io.StringIO(rest)))
            if f"{measured.id}.csv" != f"{path.parent.name}/{path.name}":
                raise ValueError(f"it says that it is {measured.id}")
            _ = measured.rows[list(COLUMNS)], measured.config
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise StoreError(f"{path} is no table of a measurement: {reason}") from error
        found.append(measured)
    return sorted(found, key=lambda one: (one.suite, one.header["config_hash"], one.seed))


def by_settings(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    """The measurements of each configuration, named by the settings in which they differ."""
    groups: dict[str, list[Measured]] = defaultdict(list)
    for one, words in zip(measured, told_apart([one.config for one in measured]), strict=True):
        groups[f"{words}: " if words else ""].append(one)
    return groups


def over_seeds(group: Group, measure: Callable[[Measured], float]) -> Summary:
    """Mean and interval of one number a seed."""
    return summarise([measure(one) for one in group])


def places_of(group: Group, table: str, subject: str, metric: str) -> list[int]:
    """The values of `at` at which every one of them measured a metric, in order."""
    found = [set(one.values(table, subject, metric).index) for one in group]
    return sorted(set.intersection(*found)) if found else []
