"""The reader of run directories: config, metrics as data frames, status."""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from moe_rl.store.files import StoreError, read_lines
from moe_rl.store.records import read_config, read_metrics, read_object, read_text

Status = Literal["done", "failed", "unfinished"]


@dataclass(frozen=True)
class Run:
    """One run directory, read only; a run that is still being written can be read too.

    Raises StoreError when `path` holds no run, and wherever a file of it is read that is damaged.
    """

    path: Path

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", Path(path))
        if not _is_run(self.path):
            raise StoreError(f"expected a run directory (config.yaml and environment.json), got {self.path}")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return read_config(self.path / "config.yaml")

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, machine, commit and start time of the first try."""
        return read_object(self.path / "environment.json")

    @property
    def status(self) -> Status:
        """done (DONE is there), failed (FAILED is there) or unfinished (running, interrupted, killed)."""
        if (self.path / "DONE").exists():
            return "done"
        return "failed" if (self.path / "FAILED").exists() else "unfinished"

    @property
    def summary(self) -> dict[str, Any]:
        """What the run wrote into DONE; empty before."""
        file = self.path / "DONE"
        return read_object(file) if file.exists() else {}

    @property
    def failure(self) -> str:
        """The traceback in FAILED; empty when the run did not fail."""
        file = self.path / "FAILED"
        return read_text(file, errors="replace") if self.status == "failed" else ""

    @property
    def arm(self) -> str:
        """Name of what is compared, e.g. "grpo+replay"."""
        if self.config.get("arm"):
            return str(self.config["arm"])
        objective = self._section("objective").get("name", "unnamed")
        replay = self._section("replay").get("source")
        return f"{objective}+replay" if replay else str(objective)

    @property
    def seed(self) -> int | None:
        seed = self.config.get("seed")
        if seed is not None and type(seed) is not int:
            raise StoreError(
                f"{self.path / 'config.yaml'} is damaged: expected an integer as seed, got {seed!r}"
            )
        return seed

    def steps(self) -> pd.DataFrame:
        """One row a rollout batch; list-valued columns stay lists."""
        # a hole in these would read as a value that is not finite: a collapse
        return self._frame("steps", whole=("reward/mean", "loss", "grad_norm"))

    def updates(self) -> pd.DataFrame:
        """One row a gradient update."""
        return self._frame("updates")

    def evals(self) -> pd.DataFrame:
        """One row an evaluation; step 0 is the cold start."""
        return self._frame("evals")

    def events(self) -> list[dict[str, Any]]:
        """Restarts, repairs and earlier failures, as logged."""
        return read_lines(self.path / "events.jsonl")

    def _frame(self, stream: str, whole: Collection[str] = ()) -> pd.DataFrame:
        return pd.DataFrame(read_metrics(self.path / f"{stream}.jsonl", whole))

    def _section(self, name: str) -> dict[str, Any]:
        section = self.config.get(name) or {}
        if not isinstance(section, dict):
            raise StoreError(
                f"{self.path / 'config.yaml'} is damaged: expected options below {name}, got {section!r}"
            )
        return section


def find_runs(*paths: str | Path) -> list[Run]:
    """Every run directory at or below the paths, once each, sorted by path; StoreError when there is none."""
    directories = {
        directory.resolve(): directory for path in paths for directory in _run_directories(Path(path))
    }
    if not directories:
        raise StoreError(
            f"expected run directories below {', '.join(map(str, paths)) or 'the paths'}, found none: "
            "give the output directory of a training command"
        )
    return [Run(directory) for directory in sorted(directories.values())]


def _run_directories(path: Path) -> Iterator[Path]:
    for directory, _, files in os.walk(path):  # which passes over what a running process removes meanwhile
        if "environment.json" in files and _is_run(Path(directory)):
            yield Path(directory)


def _is_run(path: Path) -> bool:
    # config.yaml alone would also match the .hydra folder that a launcher leaves inside a run
    return (path / "config.yaml").exists() and (path / "environment.json").exists()
