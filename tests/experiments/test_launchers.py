"""One sweep under every launcher: the same runs and numbers, also after an interruption; failures listed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.sweep import require_launcher
from experiments.train import main
from moe_rl.store import Run, find_runs

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "model.config.num_experts=4",
    "model.config.moe_intermediate_size=16",
    "task.min_length=3",
    "task.max_length=4",
    "rollout.prompts=2",
    "rollout.responses=2",
    "rollout.max_new_tokens=6",
    "optim.minibatches=2",
    "evaluation.prompts=2",
    "evaluation.every=2",
    "checkpoint_every=1",
    "cold_start.enabled=false",
    "steps=3",
]


def needs(launcher):
    """Skip where the launcher is not installed."""
    try:
        require_launcher([f"launcher={launcher}"])
    except SystemExit as stop:
        pytest.skip(stop.code)


def sweep(output, launcher, *overrides):
    """`python -m experiments.train -m …` in this process; its exit code."""
    before, sys.argv = (
        sys.argv,
        ["train.py", "-m", f"launcher={launcher}", f"output={output}", *SMALL, *overrides],
    )
    try:
        main()
    except SystemExit as stop:
        return stop.code
    finally:
        sys.argv = before
    return 0


def numbers(run: Run):
    """Everything that a run measured but its times."""
    for stream in ("steps", "updates", "evals"):
        for line in (run.path / f"{stream}.jsonl").read_text().splitlines():
            yield (
                stream,
                {key: value for key, value in json.loads(line).items() if not key.startswith("time/")},
            )


def names(runs):
    """The directories as `<arm>-<run id>/seed<n>`."""
    return [f"{run.path.parent.name}/{run.path.name}" for run in runs]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The runs of the sweep, one after the other and without an interruption."""
    output = tmp_path_factory.mktemp("whole")
    assert sweep(output, "basic", "seed=0,1") == 0
    return find_runs(output)


@pytest.mark.parametrize(
    "launcher",
    [
        "joblib",
        "submitit_local",
        pytest.param("basic", marks=pytest.mark.slow),
        pytest.param("ray", marks=pytest.mark.slow),
    ],
)
def test_the_same_runs_whichever_launcher_goes_on(tmp_path, whole, launcher, monkeypatch, capfd):
    """Seed 0 is done and seed 1 stopped in its second step when the sweep goes on with a run that fails."""
    needs(launcher)
    from moe_rl.training import loop

    saved = []

    def save(*arguments):
        saved.append(keep(*arguments))
        if len(saved) == 5:
            raise KeyboardInterrupt

    keep = loop.save
    monkeypatch.setattr(loop, "save", save)
    assert sweep(tmp_path, "basic", "seed=0,1") == 130
    assert "runs failed" not in capfd.readouterr().err
    monkeypatch.setattr(loop, "save", keep)
    done, stopped = find_runs(tmp_path)
    assert (done.status, stopped.status) == ("done", "unfinished")
    before = {file: file.stat().st_mtime_ns for file in done.path.rglob("*")}

    # submitit and Ray start a process a run: one less for them
    seeds = ("0", "1", "-1") if launcher in ("basic", "joblib") else ("1", "-1")
    assert sweep(tmp_path, launcher, f"seed={','.join(seeds)}") == 1
    runs = find_runs(tmp_path)
    assert names(runs) == names(whole)
    assert [run.status for run in runs] == ["done", "done"]
    for run, expected in zip(runs, whole, strict=True):
        assert list(numbers(run)) == list(numbers(expected))
    assert {file: file.stat().st_mtime_ns for file in done.path.rglob("*")} == before
    assert [event["step"] for event in runs[1].events() if event["event"] == "resumed"] == [2]
    failed = os.path.relpath(done.path.with_name("seed-1"))
    listed = f"runs failed:\n  {failed}: seed=-1: must be at least 0 (it numbers a stretch of the problems)\n"
    assert capfd.readouterr().err.endswith(f"1 of {len(seeds)} {listed}")


@pytest.mark.parametrize(
    ("launcher", "extra"), [(None, "sweep"), ("submitit_slurm", "slurm"), ("ray", "ray")]
)
def test_a_launcher_that_is_not_installed_names_its_extra(tmp_path, monkeypatch, launcher, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(
        sys, "argv", ["train.py", f"output={tmp_path}", *([f"launcher={launcher}"] if launcher else [])]
    )
    with pytest.raises(SystemExit, match=rf'pip install "moe_rl\[{extra}\]", or give launcher=basic'):
        main()


def test_tracking_is_no_part_of_a_run(tmp_path, whole):
    """The same run id and numbers, and TensorBoard's file has them."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert sweep(tmp_path, "basic", "seed=0", "tracking=tensorboard") == 0
    (run,) = find_runs(tmp_path)
    assert names([run]) == names(whole)[:1]
    assert list(numbers(run)) == list(numbers(whole[0]))
    events = EventAccumulator(str(run.path / "tracking"))
    events.Reload()
    steps, updates, evals = run.steps(), run.updates(), run.evals()
    for tag, stored in (
        ("loss", steps.set_index("step")["loss"]),
        ("update_2/grad_norm", updates[updates["update"] == 2].set_index("step")["grad_norm"]),
        ("eval/greedy", evals.set_index("step")["eval/greedy"]),
    ):
        shown = {event.step: event.value for event in events.Scalars(tag)}
        assert shown == pytest.approx(stored.to_dict()), tag
    last_layer = steps["drift/old_by_layer"].str[1]
    assert [event.value for event in events.Scalars("drift/old_by_layer/1")] == pytest.approx(
        list(last_layer)
    )


APP = """
import os, sys, time
from pathlib import Path
import hydra
from experiments.launch import attempt
from experiments.sweep import lists_failures

def run(cfg, path):
    if cfg.what == "killed":
        time.sleep(1)
        os.kill(os.getpid(), 9)
    if cfg.what == "bug":
        raise ZeroDivisionError("a bug")
    (path / "DONE").touch()

@lists_failures
@hydra.main(version_base="1.3", config_path=str(Path(__file__).parent), config_name="app")
def main(cfg):
    attempt(cfg, run)

if __name__ == "__main__":
    main()
"""
APP_CONFIG = """
defaults: [_self_, {override hydra/job_logging: none}, {override hydra/launcher: LAUNCHER}]
what: null
hydra:
  sweep: {dir: out, subdir: "${what}"}
  output_subdir: null
  callbacks: {sweep: {_target_: experiments.sweep.RememberSweep}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_bugs_and_killed_workers_are_listed(tmp_path, launcher):
    """Hydra's own launcher has no worker that could be killed without it."""
    needs(launcher)
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "app.yaml").write_text(APP_CONFIG.replace("LAUNCHER", launcher))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def go(*what):
        command = [sys.executable, "app.py", "-m", f"what={','.join(what)}"]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    result = go("fine", "bug")
    assert result.returncode == 1
    assert result.stderr.endswith("1 of 2 runs failed:\n  out/bug: a bug\n")
    if launcher == "basic":
        assert "ZeroDivisionError: a bug" in result.stderr, (
            "a bug has its traceback; submitit's is in its log"
        )
        return
    result = go("fine", "killed")
    assert result.returncode == 1
    reason = "did not finish: killed, or not started; the same command continues it"
    assert result.stderr.endswith(f"1 of 2 runs failed:\n  out/killed: {reason}\n")
