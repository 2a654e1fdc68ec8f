"""The reader of run directories: config, metrics as data frames, status."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import yaml

from moe_rl.store.files import StoreError, read_lines

Status = Literal["done", "failed", "unfinished"]


@dataclass(frozen=True)
class Run:
    """One run directory, read only; a run that is still being written can be read too.

    Raises StoreError when `path` holds no run.
    """

    path: Path

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", Path(path))
        if not _is_run(self.path):
            raise StoreError(f"expected a run directory (config.yaml and environment.json), got {self.path}")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        config: dict[str, Any] = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        return config

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, machine, commit and start time of the first try."""
        record: dict[str, Any] = json.loads((self.path / "environment.json").read_text(encoding="utf-8"))
        return record

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
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    @property
    def failure(self) -> str:
        """The traceback in FAILED; empty when the run did not fail."""
        file = self.path / "FAILED"
        return file.read_text(encoding="utf-8") if self.status == "failed" else ""

    @property
    def arm(self) -> str:
        """Name of what is compared, e.g. "grpo+replay"."""
        if self.config.get("arm"):
            return str(self.config["arm"])
        objective = (self.config.get("objective") or {}).get("name", "unnamed")
        replay = (self.config.get("replay") or {}).get("source")
        return f"{objective}+replay" if replay else str(objective)

    @property
    def seed(self) -> int | None:
        return self.config.get("seed")

    def steps(self) -> pd.DataFrame:
        """One row a rollout batch; list-valued columns stay lists."""
        return self._frame("steps")

    def updates(self) -> pd.DataFrame:
        """One row a gradient update."""
        return self._frame("updates")

    def evals(self) -> pd.DataFrame:
        """One row an evaluation; step 0 is the cold start."""
        return self._frame("evals")

    def events(self) -> list[dict[str, Any]]:
        """Restarts, repairs and earlier failures, as logged."""
        return read_lines(self.path / "events.jsonl")

    def _frame(self, stream: str) -> pd.DataFrame:
        return pd.DataFrame(read_lines(self.path / f"{stream}.jsonl"))


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
