"""Trackers by name."""

from __future__ import annotations

from typing import Any

from moe_rl.tracking.tensorboard import TensorBoard
from moe_rl.tracking.tracker import Tracker
from moe_rl.tracking.trackio import Trackio
from moe_rl.tracking.wandb import Wandb

TRACKERS: dict[str, type] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
"""Tracker classes: dataclasses whose init fields are the tracker's options."""


def get_tracker(name: str, **options: Any) -> Tracker:
    """The tracker `name` with `options`.

    Raises ValueError for an unknown name, ModuleNotFoundError, with the extra, for a package that is missing.
    """
    if name not in TRACKERS:
        raise ValueError(f"unknown tracker {name!r}: choose from {', '.join(TRACKERS)}")
    tracker: Tracker = TRACKERS[name](**options)
    return tracker
