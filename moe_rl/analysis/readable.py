"""What the analysis needs of a run, so that damage is one clear error and no other number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from moe_rl.store import Run, StoreError


def require_readable(run: Run, steps: pd.DataFrame, updates: pd.DataFrame, evals: pd.DataFrame) -> None:
    """Raise StoreError, naming the file, for a run whose files do not fit together or hold no numbers."""
    _require_options(run)
    _require_summary(run, len(steps))
    _require_environment(run)
    _require_event(run)
    for name, frame in (("steps", steps), ("updates", updates), ("evals", evals)):
        _require_numbers(run.path / f"{name}.jsonl", frame)
    file = run.path / "steps.jsonl"
    if len(steps) and steps["step"].tolist() != list(range(1, len(steps) + 1)):
        raise _damaged(file, "steps 1, 2, 3, … without a gap", steps["step"].tolist()[:10])
    if len(updates) and "update" not in updates:
        raise _damaged(run.path / "updates.jsonl", "the number of each update as 'update'", list(updates))
    if evals.get("step", pd.Series(dtype=int)).duplicated().any():
        raise _damaged(run.path / "evals.jsonl", "one evaluation a step", evals["step"].tolist()[:10])


def _require_options(run: Run) -> None:
    file, config = run.path / "config.yaml", run.config
    planned, rule = config.get("steps", 0), config.get("collapse") or {}
    if type(planned) is not int:
        raise _damaged(file, "an integer as steps", planned)
    if not isinstance(rule, dict):
        raise _damaged(file, "options below collapse", rule)
    for name, value in rule.items():
        least = 0 if name == "fraction" else 1
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 10**9:
            raise _damaged(file, f"a number of at least {least} as collapse.{name}", value)
        if name in ("window", "patience") and not isinstance(value, int):
            raise _damaged(file, f"an integer as collapse.{name}", value)


def _require_summary(run: Run, steps: int) -> None:
    file, summary = run.path / "DONE", run.summary
    layers = summary.get("layer_ids") or []
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        raise _damaged(file, "a list of integers as layer_ids", layers)
    if summary.get("steps", steps) != steps:
        raise _damaged(run.path / "steps.jsonl", f"the {summary['steps']} steps that DONE counts", steps)


def _require_environment(run: Run) -> None:
    file, found = run.path / "environment.json", run.environment
    command, commit, versions = found.get("command"), found.get("git_commit"), found.get("versions")
    words = command if isinstance(command, list) else []
    if not isinstance(command, list | None) or not all(isinstance(word, str) for word in words):
        raise _damaged(file, "a list of words as command", command)
    if not isinstance(commit, str | None):
        raise _damaged(file, "a text as git_commit", commit)
    if not isinstance(versions, dict | None):
        raise _damaged(file, "the versions of packages", versions)


def _require_event(run: Run) -> None:
    """Of the events only the one of a collapse counts."""
    for event in run.events():
        if event.get("event") != "collapsed":
            continue
        if type(event.get("step")) is not int or not isinstance(event.get("reason"), str):
            raise _damaged(run.path / "events.jsonl", "step and reason of a collapse", event)


def _require_numbers(file: Path, frame: pd.DataFrame) -> None:
    for column in frame:
        found = frame[column].dropna()
        if any(isinstance(value, str) for value in found):
            raise _damaged(file, f"numbers as {column!r}", found.iloc[0])


def _damaged(file: Path, expected: str, got: Any) -> StoreError:
    return StoreError(f"{file} is damaged: expected {expected}, got {repr(got)[:80]}")
