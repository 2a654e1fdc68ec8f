"""Every objective trains in the loop, and the tensors that the loop hands to it are the right ones."""

from dataclasses import replace

import pytest
import torch

from moe_rl.objectives import OBJECTIVES, get_objective
from moe_rl.routing import record_routing
from moe_rl.store import Run, RunStore
from moe_rl.training.config import EvaluationConfig, MismatchConfig, OptimConfig, RolloutConfig, TrainConfig
from moe_rl.training.learner import make_learner, needed_tensors, router_shift
from moe_rl.training.loop import train
from moe_rl.training.policy import router_logp, score
from moe_rl.training.rollout import sample_responses
from moe_rl.training.seeds import random_stream
from moe_rl.training.signal import at_last_token

OPTIONS = {"dr_grpo": {"length_divisor": 6.0}, "contrastive": {"group_size": 4}}


def config(**changes) -> TrainConfig:
    base = TrainConfig(
        steps=2,
        rollout=RolloutConfig(prompts=4, responses=4, max_new_tokens=6),
        optim=OptimConfig(lr=3e-3, minibatches=2, warmup_updates=1),
        evaluation=EvaluationConfig(every=2, prompts=4),
    )
    return replace(base, **changes)


class OnesReward:
    """The share of 1s in a response: an untrained model earns some, unevenly."""

    def __init__(self, task):
        self.task = task

    def __getattr__(self, name):
        return getattr(self.task, name)

    def reward(self, problem, text):
        return text.count("1") / max(1, len(text))


def run(path, lm, task, config, objective, **options):
    with RunStore.open(path, {}) as store:
        train(lm, OnesReward(task), get_objective(objective, **options), config, store)
    return Run(path)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains(tmp_path, lm, task, name):
    before = {key: tensor.clone() for key, tensor in lm.model.state_dict().items()}
    result = run(tmp_path, lm, task, config(), name, **OPTIONS.get(name, {}))
    assert len(result.steps()) == 2
    assert result.steps()["loss"].notna().all()
    assert result.updates()["grad_norm"].gt(0).all()
    routers = [key for key in before if key.endswith("mlp.gate.weight")]
    assert routers and all(not torch.equal(before[key], lm.model.state_dict()[key]) for key in routers)


def test_the_reference_is_the_policy_before_any_update(tmp_path, lm, task):
    updates = run(tmp_path, lm, task, config(), "grpo", kl_coef=0.1).updates()
    assert updates["kl/reference_k3"][0] == 0.0
    assert (updates["kl/reference_k3"][1:] > 0).all()
    # in the second step π_old is not the reference any more: its first ratio is 1, its KL is not 0
    assert updates["kl/k3"][2] == 0.0


def test_a_resumed_run_keeps_its_reference(tmp_path, lm, task):
    start = {key: tensor.clone() for key, tensor in lm.model.state_dict().items()}
    whole = run(tmp_path / "whole", lm, task, config(steps=4), "grpo", kl_coef=0.1)
    lm.model.load_state_dict(start)
    run(tmp_path / "cut", lm, task, config(steps=2, checkpoint_every=2), "grpo", kl_coef=0.1)
    lm.model.load_state_dict(start)
    cut = run(tmp_path / "cut", lm, task, config(steps=4), "grpo", kl_coef=0.1)
    assert cut.updates()["kl/reference_k3"].tolist() == whole.updates()["kl/reference_k3"].tolist()


def test_rspo_starts_as_gmpo_and_then_feels_the_router(tmp_path, lm, task):
    start = {key: tensor.clone() for key, tensor in lm.model.state_dict().items()}
    rspo = run(tmp_path / "rspo", lm, task, config(steps=1), "rspo").updates()
    lm.model.load_state_dict(start)
    gmpo = run(tmp_path / "gmpo", lm, task, config(steps=1), "gmpo").updates()
    assert rspo["loss"][0] == gmpo["loss"][0]
    assert rspo["loss"][1] != gmpo["loss"][1]


def test_router_shift_by_hand(lm, task):
    """γ from two recorded forwards, written out for one response token."""
    from moe_rl.tasks.encode import prompt_ids

    with random_stream("test"):
        batch = sample_responses(
            lm, [prompt_ids(lm.tokenizer, task.train(0))], max_new_tokens=4, temperature=1.0
        )
    scores, traces = [], []
    for _ in range(2):
        with torch.no_grad(), record_routing(lm.model) as recorder:
            scores.append(score(lm.model, batch, 1.0, router_logits=True).router_logits)
        traces.append(recorder.trace())
        with torch.no_grad():
            for parameter in lm.model.parameters():
                parameter.add_(
                    0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
                )
    old = traces[0]
    gamma_BT = router_shift(router_logp(scores[0], old), router_logp(scores[1], old))
    t = batch.prompt_length
    moved = [
        (scores[1][layer][t - 1].log_softmax(-1)[e] - scores[0][layer][t - 1].log_softmax(-1)[e]).abs().item()
        for layer in range(2)
        for e in old.experts[0, t - 1, layer].tolist()
    ]
    assert len(moved) == 4
    assert gamma_BT[0, t].item() == pytest.approx(torch.tensor(-sum(moved) / 4).exp().item(), rel=1e-5)
    assert 0 < gamma_BT[0, t] < 1


def test_the_value_head_learns_the_reward_and_is_checkpointed(tmp_path, lm, task):
    result = run(tmp_path / "ppo", lm, task, config(steps=12), "ppo")
    first, last = result.steps()["value/loss"].iloc[[0, -1]]
    assert last < first
    store = RunStore.open(tmp_path / "ppo", {})
    checkpoint = store.latest_checkpoint()
    store.close()
    assert {"value_head.linear.weight", "value_head.linear.bias"} <= checkpoint.model().keys()


def test_rewards_sit_on_the_last_response_token():
    mask_BT = torch.tensor([[0.0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]])
    rewards_BT = at_last_token(torch.tensor([1.0, 2.0, 3.0]), mask_BT)
    assert rewards_BT.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, 0]]


def test_needs_follow_the_options(lm):
    assert needed_tensors(get_objective("grpo")) == frozenset()
    assert needed_tensors(get_objective("grpo", kl_coef=0.1, entropy_coef=0.1)) == {
        "ref_logp_BT",
        "entropy_BT",
    }
    assert make_learner(lm.model, get_objective("grpo"), config()).reference is None


@pytest.mark.parametrize("correction", ["token_tis", "icepop", "sequence_rejection"])
def test_a_mismatch_correction_is_next_to_nothing_for_the_same_weights(tmp_path, lm, task, correction):
    start = {key: tensor.clone() for key, tensor in lm.model.state_dict().items()}
    plain = run(tmp_path / "plain", lm, task, config(steps=1), "grpo").updates()
    lm.model.load_state_dict(start)
    corrected = run(tmp_path / "it", lm, task, config(steps=1, mismatch=MismatchConfig(correction)), "grpo")
    assert corrected.updates()["loss"][0] == pytest.approx(plain["loss"][0], abs=1e-5)
    assert corrected.steps()["mismatch/weight_mean"][0] == pytest.approx(1.0, abs=1e-4)


def test_entropy_bonus_raises_entropy(tmp_path, lm, task):
    start = {key: tensor.clone() for key, tensor in lm.model.state_dict().items()}
    without = run(tmp_path / "without", lm, task, config(steps=8), "grpo").steps()
    lm.model.load_state_dict(start)
    with_bonus = run(tmp_path / "with", lm, task, config(steps=8), "grpo", entropy_coef=1.0).steps()
    assert with_bonus["entropy"].iloc[-1] > without["entropy"].iloc[-1]
