"""Rows, what a tracker is sent and when, and trackers that fail."""

import json
import sys

import numpy as np
import pytest

from moe_rl.store import Run, StoreError
from moe_rl.tracking import get_tracker
from moe_rl.tracking.rows import stored_rows


class Recorder:
    """Keeps what it is sent; raises where it is told to."""

    def __init__(self, holds=-1, fails_in="", at=0):
        self.holds, self.fails_in, self.at = holds, fails_in, at
        self.run, self.rows, self.status = None, [], None

    def open(self, run):
        self.run = run
        self._fail("open")
        return self.holds

    def log(self, step, row):
        if step == self.at:
            self._fail("log")
        self.rows.append((step, row))

    def close(self, status):
        self._fail("close")
        self.status = status

    def _fail(self, where):
        if where == self.fails_in:
            raise ConnectionError("no\nnetwork")

    @property
    def steps(self):
        return [step for step, _ in self.rows]


def test_a_row_is_a_step(example):
    """Worked by hand: update records under their number, lists by position, no `step` and no text."""
    recorder = Recorder()
    with example.store("x", recorder) as store:
        store.log("evals", {"step": 0, "eval/greedy": 0.25, "eval/n": 8})
        store.log("updates", {"step": 1, "update": 1, "loss": 0.5, "drift/old_by_layer": [0.0, 1.0]})
        store.log("updates", {"step": 1, "update": 2, "loss": 0.75})
        store.log("steps", {"step": 1, "loss": 0.625, "note": "text"})
        store.log("evals", {"step": 1, "eval/greedy": 0.5})
        assert recorder.steps == [0], "step 1 may still be added to"
        store.finish({})
    expected = {
        0: {"eval/greedy": 0.25, "eval/n": 8},
        1: {
            "update_1/loss": 0.5,
            "update_1/drift/old_by_layer/0": 0.0,
            "update_1/drift/old_by_layer/1": 1.0,
            "update_2/loss": 0.75,
            "loss": 0.625,
            "eval/greedy": 0.5,
        },
    }
    assert dict(recorder.rows) == expected == stored_rows(example.path)
    assert recorder.status == "done"


def test_how_a_run_is_named(example):
    recorder, other = Recorder(), Recorder()
    example.interrupted("x", 1, 2, recorder)
    example.finished("x", 3, 4, other)
    run = recorder.run
    assert (run.name, run.group, run.experiment) == ("grpo+replay seed 3", "grpo+replay-1a2b3c4d", "exp")
    assert run.config["optim"] == {"lr": 1e-3}
    assert run == other.run, "a resumed run goes on in the same tracker run"


def test_what_will_be_run_again_is_not_sent(example):
    recorder = Recorder()
    example.interrupted("x", 1, 3, recorder)
    assert recorder.steps == [0, 1, 2]
    assert recorder.status == "unfinished"


@pytest.mark.parametrize("holds", [-1, 1, 4])
def test_a_resumed_run_sends_what_the_tracker_does_not_hold(example, holds):
    """Killed after step 4, resumed from step 2: a tracker may be behind the checkpoint or ahead of it."""
    example.interrupted("x", 1, 4, Recorder())
    recorder = Recorder(holds)
    example.finished("x", 3, 6, recorder)
    assert recorder.steps == list(range(holds + 1, 7))
    stored = stored_rows(example.path)
    np.testing.assert_equal(dict(recorder.rows), {step: stored[step] for step in recorder.steps})  # with NaN


def test_a_collapsed_run_is_whole_a_failed_one_is_run_again(example):
    for message, steps in (("collapsed: reward", [0, 1, 2]), ("disk full", [0, 1])):
        recorder = Recorder()
        with pytest.raises(RuntimeError), example.store("x", recorder) as store:
            store.rewind(-1)
            store.log("evals", {"step": 0, "eval/greedy": 0.25})
            for step in (1, 2):
                store.log("steps", {"step": step, "loss": 1.0, "reward/mean": 0.5, "grad_norm": 1.0})
            raise RuntimeError(message)
        assert (recorder.steps, recorder.status) == (steps, "failed")


@pytest.mark.parametrize(("fails_in", "sent"), [("open", []), ("log", [0, 1]), ("close", [0, 1, 2, 3, 4])])
def test_a_tracker_that_fails_does_not_fail_the_run(example, capsys, fails_in, sent):
    recorder = Recorder(fails_in=fails_in, at=2)
    example.finished("wandb", 1, 4, recorder)
    assert recorder.steps == sent
    run = Run(example.path)
    assert run.status == "done"
    assert list(run.steps()["step"]) == [1, 2, 3, 4]
    said = capsys.readouterr().err.splitlines()
    assert said == [f"{example.path}: tracking=wandb stopped: no network; the run goes on"]
    (event,) = (event for event in run.events() if event["event"] == "tracking_stopped")
    assert (event["tracker"], event["text"]) == ("wandb", "no network")


def test_the_stores_own_failure_is_the_runs(example, monkeypatch):
    with pytest.raises(StoreError, match="expected a stream"), example.store("x", Recorder()) as store:
        store.log("stepz", {"step": 1})


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_names_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf'pip install "moe_rl\[{name}\]"'):
        get_tracker(name)


def test_wrong_names_and_modes():
    with pytest.raises(ValueError, match="choose from tensorboard, wandb, trackio"):
        get_tracker("mlflow")
    with pytest.raises(ValueError, match=r"tracking\.mode=cloud: expected online, offline or null"):
        get_tracker("wandb", mode="cloud")


def test_the_followed_records_are_the_stored_ones(example):
    """An array in a record is a list to the tracker, as it is in the file."""
    recorder = Recorder()
    with example.store("x", recorder) as store:
        store.log("steps", {"step": 1, "by_layer": np.array([0.5, 0.25]), "n": np.int64(2)})
        store.finish({})
    assert recorder.rows == [(1, {"by_layer/0": 0.5, "by_layer/1": 0.25, "n": 2})]
    assert json.loads((example.path / "steps.jsonl").read_text())["by_layer"] == [0.5, 0.25]
