"""engine=trl from the command line: the run directory it leaves, resumption, what it refuses."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt -e '.[trl]'")
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM

from experiments import trl_trainer
from experiments.config import build_objective, build_task, train_config
from experiments.launch import CONF
from experiments.train import main
from experiments.trl_engine import require_whole_parameters
from experiments.trl_options import grpo_settings, require_honoured
from moe_rl.integrations import trl
from moe_rl.store import Run, find_runs

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "model.config.num_experts=4",
    "model.config.moe_intermediate_size=16",
    "+model.config.initializer_range=0.2",
    "task.min_length=2",
    "task.max_length=3",
    "rollout.prompts=4",
    "rollout.responses=4",
    "rollout.max_new_tokens=4",
    "optim.minibatches=2",
    "optim.lr=3e-3",
    "optim.warmup_updates=3",
    "evaluation.prompts=8",
    "evaluation.every=2",
    "checkpoint_every=2",
    "cold_start.target_accuracy=0.1",
    "cold_start.steps=120",
    "cold_start.batch_size=16",
    "cold_start.eval_every=10",
    "cold_start.eval_prompts=32",
    "steps=4",
    "arm=grpo_replay",
]


PARTS = ("better", "worse")


def numbers(run, stream, above=-1):
    """The records of a stream without times."""
    for line in (run.path / f"{stream}.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["step"] > above:
            yield {key: value for key, value in record.items() if not key.startswith("time/")}


def only_run(output):
    (run,) = find_runs(output)
    return run


@pytest.fixture
def train(monkeypatch):
    def run(output, *overrides):
        monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, *overrides, f"output={output}"])
        main()
        return only_run(output)

    return run


def test_a_run_is_that_of_the_loop_and_resumes(tmp_path, monkeypatch, train):
    whole = train(tmp_path / "whole", "engine=trl")
    assert whole.status == "done" and whole.summary["layer_ids"] == [0, 1] and len(whole.steps()) == 4
    assert list(whole.steps()["lr"]) == pytest.approx([2e-3, 3e-3, 3e-3, 3e-3])  # of a step's last update
    assert list(whole.updates()["lr"])[:3] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert whole.steps()["drift/old"].max() > 0 and whole.steps()["reward/mean"].max() > 0
    AutoModelForCausalLM.from_pretrained(whole.path / "final")

    # the loop's records, but for what TRL has no part of
    shutil.copytree(tmp_path / "whole" / "cold_starts", tmp_path / "native" / "cold_starts")
    native = train(tmp_path / "native", "steps=1")
    for stream, missing in (("steps", ("mismatch/", "time/")), ("updates", ()), ("evals", ())):
        mine, loops = set(next(numbers(whole, stream))), set(next(numbers(native, stream)))
        left = {n for n in loops - mine if not n.startswith(missing)}
        assert left <= {
            "replay/replaced",
            "rollout/rounds",
            "response/length_better",
            "response/length_worse",
        }
    assert next(numbers(native, "evals")) == next(numbers(whole, "evals"))  # one cold start, one evaluation

    # stopped after a step that no checkpoint has
    shutil.copytree(tmp_path / "whole" / "cold_starts", tmp_path / "stopped" / "cold_starts")
    record = trl_trainer.StoredTrainer._step_record

    def interrupted(self, step):
        if step == 4:
            raise KeyboardInterrupt
        return record(self, step)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(trl_trainer.StoredTrainer, "_step_record", interrupted)
        train(tmp_path / "stopped", "engine=trl")
    stopped = only_run(tmp_path / "stopped")
    assert stopped.status != "done" and len(stopped.steps()) == 3
    resumed = train(tmp_path / "stopped", "engine=trl")
    for stream in ("steps", "updates", "evals"):
        assert list(numbers(resumed, stream)) == list(numbers(whole, stream)), stream


@pytest.mark.slow
def test_two_processes_write_one_run_and_resume(tmp_path):
    """`accelerate launch` with the shipped FSDP2 config; weights and moments return to their shards."""
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    launch += ["--config_file", "conf/accelerate/fsdp2.yaml", "--main_process_port", "0"]
    launch += ["-m", "experiments.train", "engine=trl", *SMALL, f"output={tmp_path}"]

    def run():
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(launch, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return only_run(tmp_path)

    first = run()
    assert first.status == "done" and len(first.steps()) == 4 and len(first.updates()) == 8
    later = list(numbers(first, "steps", above=2))
    AutoModelForCausalLM.from_pretrained(first.path / "final")
    (first.path / "DONE").unlink()
    shutil.rmtree(first.path / "checkpoints" / "step-00000004")
    again = run()
    assert len(again.steps()) == 4
    for one, other in zip(numbers(again, "steps", above=2), later, strict=True):
        assert {k: v for k, v in one.items() if isinstance(v, float)} == pytest.approx(
            {k: v for k, v in other.items() if isinstance(v, float)}, rel=1e-4, abs=1e-6
        )


def options(*overrides):
    with initialize_config_dir(CONF, version_base="1.3"):
        cfg = compose("config", ["engine=trl", *overrides])
    return train_config(cfg), build_objective(cfg), build_task(cfg)


def test_what_trl_cannot_honour_is_refused_by_name():
    overrides = ["optim.nonfinite=skip", "rollout.sampler_dtype=bfloat16", "mismatch.correction=token_tis"]
    overrides += ["optim.microbatch=3", "replay.source=old_policy", "replay.variant=response"]
    overrides += ["objective=ppo"]
    with pytest.raises(ValueError) as refused:
        require_honoured(*options(*overrides), processes=1)
    text = str(refused.value)
    for name in (*overrides[:3], "replay.variant='response'", "micro-batches of 3", "needs old_values_BT"):
        assert name.partition("=")[0] in text, name
    with pytest.raises(ValueError, match=r"rollout.prompts=32 on 5 processes"):
        require_honoured(*options(), processes=5)
    with pytest.raises(ValueError, match=r"an option of engine=trl, the native engine has none"):
        options("engine=native", "engine.vllm=true")


@pytest.mark.parametrize(
    "environment",
    [{"ACCELERATE_USE_DEEPSPEED": "true"}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}],
)
def test_shards_that_checkpoints_cannot_gather_are_refused(monkeypatch, environment):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    require_whole_parameters()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="run directories hold whole tensors"):
        require_whole_parameters()


def test_drift_under_rollout_replay_is_of_native_routing(tmp_path, monkeypatch, train):
    """As in the loop: another routing of the sampler is no drift of the policy, which does not move here."""

    def of_another_sampler(recorder):
        def sampled(mask, columns):
            trace = recorder.trace(mask)
            return replace(trace, experts=(trace.experts + 1) % trace.num_experts)

        return sampled

    monkeypatch.setattr(trl, "from_recorder", of_another_sampler)
    run = train(tmp_path, "engine=trl", "arm=grpo_rollout_replay", "optim.lr=1e-30", "steps=1")
    assert list(run.updates()["drift/old"]) == list(run.updates()["drift/step"]) == [0, 0]
    assert run.updates()["replay/overridden"].min() > 0.3


def test_one_optimiser_step_of_trl_is_one_update():
    config, objective, task = options("optim.microbatch=8", "optim.epochs=2", "steps=10")
    require_honoured(config, objective, task, processes=2)
    settings = grpo_settings(config, objective, "out", done=4, processes=2)
    # 32 x 8 responses in 4 mini-batches: 64 an update, 32 a process, 4 micro-batches of 8
    assert settings["per_device_train_batch_size"] == 8
    assert settings["gradient_accumulation_steps"] == 4
    assert settings["steps_per_generation"] == 16
    assert settings["num_iterations"] == 2
    assert settings["max_steps"] == (10 - 4) * 4 * 2


def test_the_reference_policy_is_the_starting_point(tmp_path, train):
    run: Run = train(tmp_path, "engine=trl", "arm=grpo", "objective.kl_coef=0.1", "steps=1", "drift_every=0")
    first, second = run.updates()["kl/reference_k3"]
    assert first == pytest.approx(0, abs=1e-6) and second > 1e-6
    assert "kl/reference_k3" in run.steps() and (run.path / "start" / "model.safetensors").exists()
    assert not any(name.startswith(("drift/", "load/")) for name in run.steps())


def test_an_update_that_is_not_finite_ends_the_run(tmp_path, train):
    with pytest.raises(SystemExit):
        train(tmp_path, "engine=trl", "optim.lr=1e30", "optim.warmup_updates=0")
    run = only_run(tmp_path)
    assert run.failure.startswith("collapsed: step 1, update 2: gradient norm nan")
    assert [event["event"] for event in run.events()][-1] == "collapsed"
