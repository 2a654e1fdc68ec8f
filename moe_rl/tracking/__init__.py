"""Trackers beside the run store: TensorBoard, Weights & Biases, trackio.

The run store stays the source of truth. A tracker shows its records, one row a training step, and may fail or
be left out without changing a run.
"""

from moe_rl.tracking.follow import Tracking
from moe_rl.tracking.registry import TRACKERS, get_tracker
from moe_rl.tracking.tracker import TrackedRun, Tracker

__all__ = ["TRACKERS", "TrackedRun", "Tracker", "Tracking", "get_tracker"]
