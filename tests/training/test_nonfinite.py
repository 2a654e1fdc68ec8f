"""A loss, a gradient norm or a policy that is not finite: stop or skip, with the evidence kept."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from experiments.train import main
from moe_rl.analysis.comparison import collapse_of
from moe_rl.objectives import get_objective
from moe_rl.store import Run, RunStore
from moe_rl.training import loop, nonfinite
from moe_rl.training.config import OptimConfig, ReplayConfig
from moe_rl.training.learner import make_learner
from moe_rl.training.nonfinite import CollapseError
from moe_rl.training.passes import old_policy_pass, split
from moe_rl.training.signal import learning_signal
from moe_rl.training.update import gradient_update

OPTIM = OptimConfig(lr=3e-3, minibatches=2, warmup_updates=1)


class PlantedReward:
    """A grader that pays `value` for the first response to the second prompt of step `step`."""

    def __init__(self, task, seed=0, step=2, value=math.inf):
        self.task, self.value, self.planted = task, value, False
        self.prompt = task.train(seed * 10_000_000 + (step - 1) * 4 + 1).prompt

    def __getattr__(self, name):
        return getattr(self.task, name)

    def reward(self, problem, text):
        if problem.prompt == self.prompt and not self.planted:
            self.planted = True
            return self.value
        return self.task.reward(problem, text)


def train(path, lm, task, config, objective="grpo"):
    with RunStore.open(path, {"seed": config.seed}) as store:
        loop.train(lm, task, get_objective(objective), config, store)
    return Run(path)


def events(run, name):
    return [event for event in run.events() if event["event"] == name]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("objective", ["grpo", "gspo", "ppo"])
def test_an_infinite_reward_stops_the_run_as_collapsed(tmp_path, fresh, ones_task, config, value, objective):
    lm, task = fresh(), PlantedReward(ones_task, value=value)
    settings = config(checkpoint_every=1)
    with pytest.raises(CollapseError, match=r"collapsed: step 2, update 1: loss nan, gradient norm nan"):
        train(tmp_path, lm, task, settings, objective)
    run = Run(tmp_path)
    assert (tmp_path / "FAILED").read_text().startswith("collapsed: step 2, update 1: loss nan")
    assert run.steps()["step"].tolist() == [1, 2]
    assert str(collapse_of(run, run.steps())).startswith("step 2 (non-finite")
    # the last good checkpoint stays, and the policy in memory is still the one it holds
    with RunStore.open(tmp_path, {"seed": 0}) as store:
        checkpoint = store.latest_checkpoint()
    assert checkpoint.step == 1
    saved = checkpoint.model()
    for name, tensor in lm.model.named_parameters():
        assert torch.equal(saved[f"policy.{name}"], tensor), name
    (event,) = events(run, "nonfinite_update")
    assert (event["step"], event["update"], event["action"]) == (2, 1, "stop")
    batch = load_file(tmp_path / event["file"])
    assert batch["rewards"].shape == (8,) and not batch["rewards"][4].isfinite()
    assert batch["rewards"].isfinite().sum() == 7
    shape = batch["input_ids"].shape
    assert all(batch[k].shape == shape for k in ("attention_mask", "response_mask", "mask", "new_logp"))
    assert torch.equal(batch["old_logp"], batch["new_logp"]), "nothing was wrong with the policy"
    if objective != "ppo":  # which whitens over the whole batch
        assert batch["advantages"].isnan().tolist() == [False] * 4 + [True] * 4


def test_skip_goes_on_and_counts(tmp_path, fresh, ones_task, config):
    optim = replace(OPTIM, nonfinite="skip")
    run = train(tmp_path, fresh(), PlantedReward(ones_task), config(optim=optim))
    steps = run.steps()
    assert steps["updates/skipped"].tolist() == [0, 1, 0, 0]
    assert steps["loss"].map(math.isfinite).all() and steps["clip_frac/token"].map(math.isfinite).all()
    assert steps["drift/old"].map(math.isfinite).all()
    assert run.updates().query("step == 2")["loss"].map(math.isfinite).tolist() == [False, True]
    assert collapse_of(run, steps).step is None
    (event,) = events(run, "nonfinite_update")
    assert event["action"] == "skip" and (tmp_path / event["file"]).exists()


def test_a_step_of_skipped_updates_only_is_no_number_and_no_collapse(tmp_path, fresh, ones_task, config):
    optim = replace(OPTIM, minibatches=1, nonfinite="skip")
    lm, task = fresh(), PlantedReward(ones_task)
    run = train(tmp_path, lm, task, config(steps=3, optim=optim))
    steps = run.steps()
    assert steps["updates/skipped"].tolist() == [0, 1, 0]
    assert steps["loss"].map(math.isfinite).tolist() == [True, False, True]
    assert collapse_of(run, steps).step is None


def test_a_skipped_update_leaves_weights_and_moments_as_if_it_had_not_been_taken(fresh, ones_task, config):
    """Updates 1 and 3 of a batch, with a non-finite update 2 between them and without."""

    def weights_after(updates, poisoned):
        lm = fresh()
        optim = replace(OPTIM, minibatches=4, nonfinite="skip")
        learner = make_learner(lm.model, get_objective("grpo"), config(optim=optim))
        groups = loop.sample_groups(learner, lm, ones_task, 1)
        plan = split(len(groups.batch), 4, None)
        old = old_policy_pass(learner, groups, plan)
        if poisoned is not None:
            groups.rewards_PG[poisoned, 0] = math.nan
        signal = learning_signal(learner, groups, old, plan)
        for number in updates:
            gradient_update(learner, groups.batch, old, signal, plan[number], number)
        moments = [v for state in learner.optimizer.state.values() for v in state.values()]
        return [p.clone() for p in lm.model.parameters()], [m.clone() for m in moments]

    with_skip = weights_after((0, 1, 2), poisoned=1)
    without = weights_after((0, 2), poisoned=1)
    taken = weights_after((0, 1, 2), poisoned=None)
    for mine, other in zip(with_skip, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(with_skip[0], taken[0], strict=True))


@pytest.mark.parametrize("action", ["stop", "skip"])
@pytest.mark.parametrize("replay", [None, "old_policy"])
def test_an_exploding_learning_rate_is_a_collapse_under_either(
    tmp_path, fresh, ones_task, config, action, replay
):
    """Update 1 has a finite loss and throws the weights away; skipping update 2 mends nothing."""
    optim = replace(OPTIM, lr=1e30, nonfinite=action)
    settings = config(optim=optim, replay=ReplayConfig(replay), checkpoint_every=1)
    with pytest.raises(CollapseError, match="collapsed: step 1, update"):
        train(tmp_path, fresh(), ones_task, settings)
    run = Run(tmp_path)
    assert not list((tmp_path / "checkpoints").glob("step-*")), "no checkpoint of a broken policy"
    collapse = collapse_of(run, run.steps())
    assert collapse.step == 1 and collapse.reason.startswith("non-finite")
    assert events(run, "nonfinite_update")[0]["file"].startswith("nonfinite/step-00000001-update-")


def test_a_policy_that_breaks_in_its_last_update_is_found_in_that_step(tmp_path, fresh, ones_task, config):
    optim = replace(OPTIM, minibatches=1, lr=1e30)
    with pytest.raises(CollapseError, match=r"step 1, update 1.*policy is NaN or infinite after it"):
        train(tmp_path, fresh(), ones_task, config(optim=optim, checkpoint_every=1))
    run = Run(tmp_path)
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    assert str(collapse_of(run, run.steps())) == "step 1 (non-finite policy)"
    (event,) = events(run, "nonfinite_update")
    assert math.isfinite(event["loss"])
    assert load_file(tmp_path / event["file"])["rewards"].isfinite().all()


def test_no_snapshot_is_kept_of_a_broken_policy(tmp_path, fresh, ones_task, config):
    optim = replace(OPTIM, minibatches=1, lr=1e30)
    with pytest.raises(CollapseError, match=r"step 1, update 1.*policy is NaN or infinite after it"):
        train(tmp_path, fresh(), ones_task, config(optim=optim, checkpoint_every=4, snapshot_every=1))
    assert not list(tmp_path.glob("snapshots/*"))


def test_a_nan_weight_is_met_when_sampling(tmp_path, fresh, ones_task, config):
    lm = fresh()
    with torch.no_grad():
        lm.model.get_output_embeddings().weight[3, 5] = math.nan
    with pytest.raises(CollapseError, match=r"collapsed: step 0, the policy's logits are NaN or infinite"):
        train(tmp_path, lm, ones_task, config())
    assert events(Run(tmp_path), "collapsed")[0]["reason"] == "non-finite policy"


def test_the_number_of_kept_batches_is_bounded(tmp_path, fresh, ones_task, config, monkeypatch):
    monkeypatch.setattr(nonfinite, "KEPT_BATCHES", 2)

    class Broken(type(ones_task)):
        def reward(self, problem, text):
            return math.inf

    optim = replace(OPTIM, nonfinite="skip")
    run = train(tmp_path, fresh(), Broken(ones_task.task), config(steps=2, optim=optim))
    assert len(list((tmp_path / "nonfinite").iterdir())) == 2
    assert [event["file"] is None for event in events(run, "nonfinite_update")] == [False] * 2 + [True] * 2
    assert run.steps()["updates/skipped"].tolist() == [2, 2]


def test_the_command_ends_with_1_and_does_not_repeat_itself(tmp_path, monkeypatch, capfd):
    def call():
        sizes = {
            "num_hidden_layers": 1,
            "hidden_size": 16,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "num_experts": 4,
            "moe_intermediate_size": 8,
        }
        overrides = [
            *(f"model.config.{name}={value}" for name, value in sizes.items()),
            "task.min_length=2",
            "task.max_length=2",
            "rollout.prompts=2",
            "rollout.responses=2",
            "rollout.max_new_tokens=2",
            "optim.minibatches=2",
            "optim.lr=1e30",
            "optim.warmup_updates=0",
            "evaluation.prompts=2",
            "cold_start.enabled=false",
            "objective.clip_low=0.5",
            f"output={tmp_path}",
        ]
        monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 1
        error = capfd.readouterr().err
        assert "Traceback" not in error
        return error

    assert "failed: collapsed: step " in call()
    (failed,) = tmp_path.glob("single/*/seed0/FAILED")
    before = (failed.parent / "steps.jsonl").read_text()
    again = call()
    assert "in an earlier try; remove" in again and "FAILED to repeat it" in again
    assert (failed.parent / "steps.jsonl").read_text() == before
    assert json.loads((failed.parent / "events.jsonl").read_text().splitlines()[-1])["event"] == "collapsed"
