"""A run as training writes it, without a model."""

import math

import pytest

from moe_rl.store import RunStore
from moe_rl.tracking import Tracking, get_tracker

CONFIG = {"experiment": "exp", "arm": "grpo+replay", "seed": 3, "optim": {"lr": 1e-3}}


def write(store, first, last):
    """Steps `first` to `last` of two updates each, evaluated before the first and after every second one."""
    if first == 1:
        store.log("evals", {"step": 0, "eval/greedy": 0.25})
    for step in range(first, last + 1):
        for update in (1, 2):
            record = {
                "step": step,
                "update": update,
                "loss": step + update / 7,
                "drift": [0.1 * step, update / 3],
            }
            store.log("updates", record)
        reward = math.nan if step == 2 else 1 / step
        store.log("steps", {"step": step, "reward/mean": reward, "loss": -step / 3, "grad_norm": 1.0})
        if step % 2 == 0:
            store.log("evals", {"step": step, "eval/greedy": step / 7})


class Example:
    """A run directory and a tracker, opened anew at every try."""

    def __init__(self, path):
        self.path = path / "exp" / "grpo+replay-1a2b3c4d" / "seed3"

    def store(self, name, tracker=None, **options):
        store = RunStore.open(self.path, CONFIG, {"started": "now"})
        store.follow(Tracking(store, tracker or get_tracker(name, **options), name))
        return store

    def interrupted(self, name, first, last, tracker=None, **options):
        """One try, stopped after step `last` by the user; it resumed from the step before `first`."""
        with pytest.raises(KeyboardInterrupt), self.store(name, tracker, **options) as store:
            store.rewind(first - 1 if first > 1 else -1)
            write(store, first, last)
            raise KeyboardInterrupt

    def finished(self, name, first, last, tracker=None, **options):
        with self.store(name, tracker, **options) as store:
            store.rewind(first - 1 if first > 1 else -1)
            write(store, first, last)
            store.finish({"steps": last})


@pytest.fixture
def example(tmp_path):
    return Example(tmp_path)
