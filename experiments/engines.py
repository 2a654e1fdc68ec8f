"""The trainers that a run can have, behind the four calls in which they differ."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config import Config
from moe_rl.models import LanguageModel
from moe_rl.store import RunStore, whole_directory
from moe_rl.training.loop import train


@dataclass(frozen=True)
class Engine:
    """`check(config, objective, task)` refuses what the engine cannot honour."""

    check: Callable[..., None]
    open_store: Callable[..., RunStore]
    train: Callable[..., None]
    save_final: Callable[[LanguageModel, Path], None]


def engine_of(config: Config) -> Engine:
    """The engine that a run's options name. Raises `ModuleNotFoundError` where its package is missing."""
    if config.engine.name == "native":
        return Engine(anything, RunStore.open, train, save)
    from experiments import trl_engine  # needs the extra

    return Engine(trl_engine.check, trl_engine.open_store, trl_engine.train, trl_engine.save_final)


def first_process() -> bool:
    """Whether this process writes the run directory: all but the first of `accelerate launch` do not."""
    return int(os.environ.get("RANK", 0)) == 0


def anything(*_: Any) -> None:
    """The loop has all options."""


def save(lm: LanguageModel, path: Path) -> None:
    with whole_directory(path) as folder:
        lm.save(folder)
