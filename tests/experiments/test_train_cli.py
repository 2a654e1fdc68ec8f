"""The real command line on a model that trains in seconds."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.train import main
from moe_rl.store import Run, find_runs

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "model.config.num_experts=4",
    "model.config.moe_intermediate_size=16",
    "+model.config.initializer_range=0.2",
    "task.min_length=3",
    "task.max_length=4",
    "rollout.prompts=4",
    "rollout.responses=4",
    "rollout.max_new_tokens=6",
    "optim.minibatches=2",
    "evaluation.prompts=8",
    "evaluation.every=2",
    "checkpoint_every=2",
    "cold_start.target_accuracy=0",
    "cold_start.steps=2",
    "cold_start.batch_size=8",
    "cold_start.eval_every=2",
    "cold_start.eval_prompts=8",
]


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def command(output, *overrides):
    return [sys.executable, "-m", "experiments.train", *overrides, f"output={output}", *SMALL]


def train(output, *overrides):
    return subprocess.run(
        command(output, *overrides), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )


def numbers(run: Run, stream):
    for line in (run.path / f"{stream}.jsonl").read_text().splitlines():
        yield {key: value for key, value in json.loads(line).items() if not key.startswith("time/")}


@pytest.mark.parametrize("launcher", ["basic", pytest.param("joblib", marks=pytest.mark.slow)])
def test_a_sweep_with_a_failing_run(tmp_path, monkeypatch, capfd, launcher):
    """Two arms and one bad option: the good ones finish, the bad one says why, the exit code tells."""

    def sweep(*overrides):
        arguments = [*overrides, f"launcher={launcher}", f"output={tmp_path}", *SMALL]
        monkeypatch.setattr(sys, "argv", ["train.py", "-m", *arguments])
        main()

    with pytest.raises(SystemExit) as stop:
        sweep("steps=2", "arm=grpo_replay,gspo", "optim.lr=1e-3,-1.0")
    assert stop.value.code == 1
    result = capfd.readouterr()
    assert result.err.count("failed: optim.lr=-1.0: must be a number") == 2, (
        "each failed run names its reason"
    )
    assert result.out.count(": done, held-out greedy accuracy") == 2
    runs = {run.arm: run for run in find_runs(tmp_path)}
    assert set(runs) == {"grpo+replay", "gspo"}
    for run in runs.values():
        assert run.status == "done"
        assert len(run.steps()) == 2
        assert run.summary["layer_ids"] == [0, 1]
        assert (run.path / "final" / "model.safetensors").exists()
    assert len(list((tmp_path / "cold_starts").glob("*/result.json"))) == 1, "one cold start for both"
    replay = runs["grpo+replay"]
    assert replay.config["replay"]["source"] == "old_policy"
    assert replay.environment["command"][:4] == ["python", "-m", "experiments.train", "steps=2"]
    assert "replay/overridden" in replay.steps()

    # A second time: what is done is left alone.
    before = {run.arm: (run.path / "steps.jsonl").read_text() for run in runs.values()}
    sweep("steps=2", "arm=grpo_replay,gspo", "optim.lr=1e-3")
    assert capfd.readouterr().out.count("done already") == 2
    assert before == {run.arm: (run.path / "steps.jsonl").read_text() for run in find_runs(tmp_path)}


def test_a_starting_model_for_every_seed(tmp_path, monkeypatch):
    """model.seed=null and cold_start.seed=null are the run's seed, and the seeds are still one arm."""

    def weights(*overrides):
        arguments = [*overrides, "steps=1", "launcher=basic", f"output={tmp_path}", *SMALL]
        monkeypatch.setattr(sys, "argv", ["train.py", "-m", *arguments])
        main()
        return {run.path: run.summary["starting_weights"] for run in find_runs(tmp_path)}

    own = weights("seed=1,2", "model.seed=null", "cold_start.seed=null")
    assert len({path.parent for path in own}) == 1 and len(set(own.values())) == 2
    given = weights("seed=0", "model.seed=2", "cold_start.seed=2")
    (again,) = [given[path] for path in given if path not in own]
    assert again == next(found for path, found in own.items() if path.name == "seed2")
    assert len(list((tmp_path / "cold_starts").glob("*/result.json"))) == 2


@pytest.mark.slow
def test_kill_9_and_the_same_command_again(tmp_path):
    whole = train(tmp_path / "whole", "steps=6")
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen(command(tmp_path / "cut", "steps=6"), cwd=ROOT, env=ENVIRONMENT)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "cut").glob("single/*/seed0/checkpoints/step-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (cut,) = find_runs(tmp_path / "cut")
    assert cut.status == "unfinished"
    result = train(tmp_path / "cut", "steps=6")
    assert result.returncode == 0, result.stderr
    (first,) = find_runs(tmp_path / "whole")
    for stream in ("steps", "updates", "evals"):
        assert list(numbers(cut, stream)) == list(numbers(first, stream)), stream


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.lrr=1"], "Key 'lrr' not in 'OptimConfig'"),
        (["optim.minibatches=four"], "could not be converted to Integer"),
        (["objective=grpoo"], "Could not find 'objective/grpoo'"),
        (["objective.clip_hi=0.3"], "Key 'clip_hi' not in"),
        (["rollout.top_p=0.9"], "truncated sampler"),
        (["rollout.prompts=6", "optim.minibatches=4"], "rollout.prompts=6 is not a multiple"),
        (["+model.config.num_expert=4"], "Qwen3MoeConfig has no such field"),
        (["model.config.num_experts_per_tok=1"], "that weight is always 1"),
        (["model=checkpoint", "model.path=/nowhere"], "there is no such directory"),
        (["model=checkpoint", "model.path=no/such/model"], "cannot be loaded as a causal LM"),
        (["task=jsonl"], "missing mandatory value: path full_key: task.path"),
        (["task=jsonl", "task.path=/nowhere.jsonl"], "task.path: no such file: /nowhere.jsonl"),
        (["objective=dpo", "rollout.responses=3"], "must be even"),
        (["model.path=/nowhere"], "is read by model=checkpoint"),
        (["task.min_length=9", "task.max_length=4"], "min_length"),
        (["device=nowhere"], "device=nowhere: not usable here"),
        (["rollout.max_new_tokens=5000"], "longer than the model's max_position_embeddings"),
        (["model=dense", "replay=old_policy", "steps=1"], "no MoE layers"),
    ],
)
def test_a_mistake_is_one_clear_line(tmp_path, overrides, message, monkeypatch, capfd):
    arguments = ["train.py", *overrides, f"output={tmp_path}", "cold_start.enabled=false"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("**/steps.jsonl"))
    failed = list(tmp_path.glob("single/*/seed0/FAILED"))
    assert len(list(tmp_path.glob("single/*"))) == len(failed), "nothing is left of a run that never began"
