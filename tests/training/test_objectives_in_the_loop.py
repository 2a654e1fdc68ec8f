"""Every objective trains in the loop, and the tensors that the loop hands to it are the right ones."""

import math
from dataclasses import replace

import pytest
import torch

from moe_rl.objectives import OBJECTIVES, get_objective, router_shift
from moe_rl.routing import record_routing
from moe_rl.store import RunStore
from moe_rl.training.border import check_together
from moe_rl.training.config import MismatchConfig, OptimConfig, ReplayConfig, RolloutConfig
from moe_rl.training.learner import make_learner, needed_tensors
from moe_rl.training.policy import router_logp, score
from moe_rl.training.rollout import sample_responses
from moe_rl.training.seeds import random_stream
from moe_rl.training.signal import at_last_token

OPTIONS = {"dr_grpo": {"length_divisor": 6.0}, "contrastive": {"group_size": 4}}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains(tmp_path, lm, name, run, config):
    before = {key: tensor.clone() for key, tensor in lm.model.state_dict().items()}
    result = run(tmp_path, lm, config(steps=2), name, **OPTIONS.get(name, {}))
    assert len(result.steps()) == 2
    assert result.steps()["loss"].notna().all()
    assert result.updates()["grad_norm"].gt(0).all()
    routers = [key for key in before if key.endswith("mlp.gate.weight")]
    assert routers and all(not torch.equal(before[key], lm.model.state_dict()[key]) for key in routers)


def test_the_reference_is_the_policy_before_any_update(tmp_path, lm, run, config):
    updates = run(tmp_path, lm, config(), "grpo", kl_coef=0.1).updates()
    assert updates["kl/reference_k3"][0] == 0.0
    assert (updates["kl/reference_k3"][1:] > 0).all()
    # in the second step π_old is not the reference any more: its first ratio is 1, its KL is not 0
    assert updates["kl/k3"][2] == 0.0


def test_a_resumed_run_keeps_its_reference(tmp_path, lm, run, config):
    start = {key: tensor.clone() for key, tensor in lm.model.state_dict().items()}
    whole = run(tmp_path / "whole", lm, config(steps=4), "grpo", kl_coef=0.1)
    lm.model.load_state_dict(start)
    run(tmp_path / "cut", lm, config(steps=2, checkpoint_every=2), "grpo", kl_coef=0.1)
    lm.model.load_state_dict(start)
    cut = run(tmp_path / "cut", lm, config(steps=4), "grpo", kl_coef=0.1)
    assert cut.updates()["kl/reference_k3"].tolist() == whole.updates()["kl/reference_k3"].tolist()


def test_rspo_starts_as_gmpo_and_then_feels_the_router(tmp_path, lm, run, config):
    start = {key: tensor.clone() for key, tensor in lm.model.state_dict().items()}
    rspo = run(tmp_path / "rspo", lm, config(steps=1), "rspo").updates()
    lm.model.load_state_dict(start)
    gmpo = run(tmp_path / "gmpo", lm, config(steps=1), "gmpo").updates()
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
            scores.append(score(lm.model, batch, 1.0, router_logits=True).passed.router_logits)
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
        (scores[1][layer][0, t - 1].log_softmax(-1)[e] - scores[0][layer][0, t - 1].log_softmax(-1)[e])
        .abs()
        .item()
        for layer in range(2)
        for e in old.experts[0, t - 1, layer].tolist()
    ]
    assert len(moved) == 4
    assert gamma_BT[0, t].item() == pytest.approx(torch.tensor(-sum(moved) / 4).exp().item(), rel=1e-5)
    assert 0 < gamma_BT[0, t] < 1


def test_the_value_head_learns_the_reward_and_is_checkpointed(tmp_path, lm, run, config):
    result = run(tmp_path / "ppo", lm, config(steps=12), "ppo")
    first, last = result.steps()["value/loss"].iloc[[0, -1]]
    assert last < first
    store = RunStore.open(tmp_path / "ppo", {"seed": 0})
    checkpoint = store.latest_checkpoint()
    store.close()
    assert {"value_head.linear.weight", "value_head.linear.bias"} <= checkpoint.model().keys()


def test_rewards_sit_on_the_last_response_token():
    mask_BT = torch.tensor([[0.0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]])
    rewards_BT = at_last_token(torch.tensor([1.0, 2.0, 3.0]), mask_BT)
    assert rewards_BT.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, 0]]


def test_needs_follow_the_options(lm, config):
    assert needed_tensors(get_objective("grpo")) == frozenset()
    assert needed_tensors(get_objective("grpo", kl_coef=0.1, entropy_coef=0.1)) == {
        "ref_logp_BT",
        "entropy_BT",
    }
    assert make_learner(lm.model, get_objective("grpo"), config()).reference is None


@pytest.mark.parametrize("correction", ["token_tis", "icepop", "sequence_rejection"])
def test_a_mismatch_correction_is_next_to_nothing_for_the_same_weights(tmp_path, lm, correction, run, config):
    start = {key: tensor.clone() for key, tensor in lm.model.state_dict().items()}
    plain = run(tmp_path / "plain", lm, config(steps=1), "grpo").updates()
    lm.model.load_state_dict(start)
    corrected = run(tmp_path / "it", lm, config(steps=1, mismatch=MismatchConfig(correction)), "grpo")
    assert corrected.updates()["loss"][0] == pytest.approx(plain["loss"][0], abs=1e-5)
    assert corrected.steps()["mismatch/weight_mean"][0] == pytest.approx(1.0, abs=1e-4)


def test_entropy_bonus_raises_entropy(tmp_path, lm, run, config):
    start = {key: tensor.clone() for key, tensor in lm.model.state_dict().items()}
    without = run(tmp_path / "without", lm, config(steps=8), "grpo").steps()
    lm.model.load_state_dict(start)
    with_bonus = run(tmp_path / "with", lm, config(steps=8), "grpo", entropy_coef=1.0).steps()
    assert with_bonus["entropy"].iloc[-1] > without["entropy"].iloc[-1]


# What the loop does to an objective's inputs, each checked by a number that would be another without it.


def test_a_rejecting_correction_takes_tokens_out_of_the_loss(tmp_path, fresh, run, config, monkeypatch):
    from moe_rl.training import sampler

    sample = sampler.sample_responses

    def other_engine(*args, **kwargs):
        """As if the sampler had found every token of the first half of the batch far more likely."""
        batch = sample(*args, **kwargs)
        logp = batch.sampler_logp_BT.clone()
        logp[: len(batch) // 2] += 2.0 * batch.response_mask_BT[: len(batch) // 2]
        return replace(batch, sampler_logp_BT=logp)

    monkeypatch.setattr(sampler, "sample_responses", other_engine)
    plain = run(tmp_path / "plain", fresh(), config(steps=1)).updates()
    rejected = run(
        tmp_path / "rejected", fresh(), config(steps=1, mismatch=MismatchConfig("sequence_rejection"))
    )
    updates = rejected.updates()
    assert updates["grad_norm"][0] == 0.0, "the first mini-batch is rejected whole"
    assert updates["grad_norm"][1] > 0.0
    assert plain["grad_norm"].gt(0).all()
    assert rejected.steps()["mismatch/changed_frac_sequence"][0] == 0.5


def test_truncated_weights_scale_the_gradient(tmp_path, fresh, run, config, monkeypatch):
    from moe_rl.training import sampler

    sample = sampler.sample_responses

    def other_engine(*args, **kwargs):
        batch = sample(*args, **kwargs)
        return replace(batch, sampler_logp_BT=batch.sampler_logp_BT + 5.0 * batch.response_mask_BT)

    monkeypatch.setattr(sampler, "sample_responses", other_engine)
    plain = run(tmp_path / "plain", fresh(), config(steps=1)).updates()
    weighted = run(
        tmp_path / "weighted", fresh(), config(steps=1, mismatch=MismatchConfig("token_tis"))
    ).updates()
    assert weighted["grad_norm"][0] == pytest.approx(plain["grad_norm"][0] * math.exp(-5.0), rel=1e-3)


def test_the_overlong_penalty_reaches_the_advantages(tmp_path, fresh, run, config):
    rollout = config().rollout
    plain = run(tmp_path / "plain", fresh(), config(steps=1))
    shaped = run(tmp_path / "shaped", fresh(), config(steps=1, rollout=replace(rollout, overlong_cache=6)))
    assert shaped.steps()["reward/overlong_penalty"][0] < 0
    assert shaped.steps()["reward/mean"][0] == plain.steps()["reward/mean"][0], (
        "the task's own reward is logged"
    )
    assert shaped.updates()["grad_norm"][0] != plain.updates()["grad_norm"][0]


@pytest.mark.parametrize("name", ["dapo", "cispo", "grpo"])
def test_microbatches_share_the_minibatchs_divisor(tmp_path, fresh, run, config, name):
    """Lengths differ between micro-batches, so a divisor per micro-batch would give another gradient."""
    whole = run(tmp_path / "whole", fresh(), config(steps=1), name).updates()
    optim = replace(config().optim, microbatch=3)
    parts = run(tmp_path / "parts", fresh(), config(steps=1, optim=optim), name).updates()
    assert parts["grad_norm"][0] == pytest.approx(whole["grad_norm"][0], rel=1e-5)
    assert parts["loss"][0] == pytest.approx(whole["loss"][0], abs=1e-6)


def test_the_reference_is_scored_at_the_rollout_temperature(tmp_path, fresh, run, config):
    rollout = replace(config().rollout, temperature=0.7)
    updates = run(tmp_path / "run", fresh(), config(steps=1, rollout=rollout), "grpo", kl_coef=0.1).updates()
    assert updates["kl/reference_k3"][0] == 0.0


def test_values_are_read_on_the_row_before_the_token(lm, task):
    from moe_rl.models import ValueHead
    from moe_rl.tasks.encode import prompt_ids

    with random_stream("test"):
        batch = sample_responses(
            lm, [prompt_ids(lm.tokenizer, task.train(0))], max_new_tokens=4, temperature=1.0
        )
    head = ValueHead(lm.model)
    torch.nn.init.normal_(head.linear.weight)
    values_BT = score(lm.model, batch, 1.0, value_head=head).values_BT
    hidden = lm.model(input_ids=batch.input_ids_BT, output_hidden_states=True).hidden_states[-1]
    expected_BT = hidden @ head.linear.weight[0] + head.linear.bias
    first = batch.prompt_length
    assert torch.allclose(values_BT[:, first:], expected_BT[:, first - 1 : -1], atol=1e-5)
    assert values_BT[:, :first].abs().sum() == 0


def test_step_metrics_are_over_all_updates_of_the_step(tmp_path, fresh, run, config):
    result = run(tmp_path / "run", fresh(), config(steps=1))
    first, second = result.updates()["kl/k1"]
    assert first == 0.0 and second != 0.0
    # equal numbers of responses, unequal numbers of tokens: between the two, neither of them
    assert 0 < abs(result.steps()["kl/k1"][0]) < abs(second)


def test_values_and_router_scores_of_r3_are_on_the_samplers_experts(
    tmp_path, fresh, run, config, monkeypatch
):
    """γ at a first update is 1 whatever the sampler routed: old and new scores see the same experts."""
    from moe_rl.training import groups, update

    sample, shift, gammas = groups.sample_and_grade, update.router_shift, []

    def sampled(*args, **kwargs):
        found = sample(*args, **kwargs)
        experts = (found.trace.experts + 1) % found.trace.num_experts
        return replace(found, trace=replace(found.trace, experts=experts))

    def shifted(*args):
        gammas.append(shift(*args))
        return gammas[-1]

    monkeypatch.setattr(groups, "sample_and_grade", sampled)
    monkeypatch.setattr(update, "router_shift", shifted)
    run(tmp_path / "run", fresh(), config(steps=1, replay=ReplayConfig("rollout")), "rspo")
    assert gammas[0].min().item() == 1.0
    assert gammas[1].min().item() < 1.0


@pytest.mark.parametrize(
    ("name", "options", "changes", "message"),
    [
        ("dpo", {}, {"rollout": RolloutConfig(responses=3)}, "must be even"),
        ("dpo", {}, {"optim": OptimConfig(microbatch=3)}, "multiple of them"),
        ("contrastive", {"group_size": 2}, {"rollout": RolloutConfig(responses=4)}, "they must be equal"),
        ("minirl", {}, {"mismatch": MismatchConfig("token_tis")}, "count the mismatch twice"),
    ],
)
def test_objectives_and_options_that_do_not_go_together(config, name, options, changes, message):
    with pytest.raises(ValueError, match=message):
        check_together(get_objective(name, **options), config(**changes))


def test_the_off_policy_mask_drops_drifted_responses_of_negative_advantage(
    tmp_path, fresh, run, config, monkeypatch
):
    from moe_rl.training import sampler

    sample = sampler.sample_responses

    def other_engine(*args, **kwargs):
        batch = sample(*args, **kwargs)
        return replace(batch, sampler_logp_BT=batch.sampler_logp_BT + 1.0 * batch.response_mask_BT)

    monkeypatch.setattr(sampler, "sample_responses", other_engine)

    def gradient(name, **mismatch):
        return run(tmp_path / name, fresh(), config(steps=1, mismatch=MismatchConfig(**mismatch))).updates()[
            "grad_norm"
        ][0]

    plain = gradient("plain")
    assert gradient("far", off_policy_threshold=1.5) == plain  # log μ - log π is 1.0 everywhere
    near = gradient("near", off_policy_threshold=0.5)
    assert 0 < near != plain  # only responses of positive advantage are left
    both = gradient("both", off_policy_threshold=0.5, correction="token_tis")
    assert both == pytest.approx(near * math.exp(-1.0), rel=1e-3)
