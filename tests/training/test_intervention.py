import math

import pytest
import torch

from moe_rl.objectives import get_objective
from moe_rl.routing import RoutingTrace, expert_change
from moe_rl.training.border import check_together
from moe_rl.training.config import InterventionConfig, OptimConfig, ReplayConfig
from moe_rl.training.intervention import swap_experts

STILL = OptimConfig(lr=0.0, minibatches=2)


def trace_of(experts, num_experts):
    experts = torch.tensor(experts)
    return RoutingTrace(experts, torch.ones(experts.shape[:2], dtype=torch.bool), (0,), num_experts)


def test_swaps_by_hand():
    trace = trace_of([[[[4, 1]], [[0, 2]]]], num_experts=6)
    scores = torch.tensor([0.0, 0.1, 0.9, 0.8, 0.7, 0.6]).expand(1, 2, 1, 6)
    assert swap_experts(trace, 0.0, scores).experts.tolist() == trace.experts.tolist()
    # the best that token 0 has not are 2 and 3, of token 1 they are 3 and 4
    assert swap_experts(trace, 1.0, scores).experts.tolist() == [[[[2, 3]], [[3, 4]]]]


def test_groups_that_a_router_rules_out_are_taken_last_and_never_twice():
    trace = trace_of([[[[0, 1]]]], num_experts=4)
    scores = torch.tensor([0.9, 0.8, -math.inf, 0.1]).expand(1, 1, 1, 4)
    assert swap_experts(trace, 1.0, scores).experts.tolist() == [[[[3, 2]]]]


def test_the_share_is_the_expert_change():
    torch.manual_seed(0)
    trace = RoutingTrace(
        torch.rand(64, 32, 4, 16).argsort(-1)[..., :2], torch.ones(64, 32, dtype=torch.bool), (0, 1, 2, 3), 16
    )
    swapped = swap_experts(trace, 0.2, torch.rand(64, 32, 4, 16)).validate()
    share = (swapped.experts != trace.experts).double().mean().item()
    assert expert_change(trace, swapped).experts == pytest.approx(share)
    assert share == pytest.approx(0.2, abs=0.012)  # four standard deviations of 16,384 draws


def test_too_few_others_to_swap_for():
    with pytest.raises(ValueError, match="2 of 3 experts are chosen"):
        swap_experts(trace_of([[[[0, 1]]]], 3), 0.1, torch.rand(1, 1, 1, 3))


def untimed(run):
    frames = (run.steps(), run.updates(), run.evals())
    return [frame[[c for c in frame if not c.startswith(("time/", "intervention/"))]] for frame in frames]


def test_no_swaps_are_routing_replay(tmp_path, fresh, run, config):
    replayed = run(tmp_path / "replay", fresh(), config(replay=ReplayConfig("old_policy")))
    swapped = run(tmp_path / "swap", fresh(), config(intervention=InterventionConfig(expert_changes=0.0)))
    for one, other in zip(untimed(replayed), untimed(swapped), strict=True):
        assert one.equals(other)
    assert swapped.steps()["intervention/experts"].tolist() == [0.0] * 4


@pytest.mark.parametrize("swap", ["next_best", "random"])
def test_swaps_move_the_ratio_unless_both_sides_have_them(tmp_path, fresh, run, config, swap):
    intervention = InterventionConfig(expert_changes=0.25, swap=swap)
    alone = run(tmp_path / "alone", fresh(), config(steps=2, optim=STILL, intervention=intervention))
    both = run(
        tmp_path / "both",
        fresh(),
        config(steps=2, optim=STILL, intervention=intervention, replay=ReplayConfig("old_policy")),
    )
    for result in (alone, both):  # the same swaps, and the policy never moves
        assert result.steps()["intervention/experts"].tolist() == pytest.approx([0.25, 0.25], abs=0.06)
        assert result.steps()["drift/old"].tolist() == [0.0, 0.0]
        overridden = result.steps()["replay/overridden"]
        assert (overridden > 0.15).all()
    assert (alone.steps()["ratio/token_std"] > 1e-3).all()
    assert both.steps()["ratio/token_std"].tolist() == [0.0, 0.0]
    assert both.steps()["kl/k3"].tolist() == [0.0, 0.0]


def test_noise_has_the_kl_that_its_formula_says(tmp_path, lm, run, config):
    sigma = 0.2
    steps = run(
        tmp_path, lm, config(steps=8, optim=STILL, intervention=InterventionConfig(log_ratio_noise=sigma))
    ).steps()
    # r = exp(σ z): E[(log r)²] = σ², E[r - 1 - log r] = exp(σ²/2) - 1, over about 8 x 16 x 6 tokens
    assert steps["ratio/token_log_sq"].mean() == pytest.approx(sigma**2, rel=0.2)
    assert steps["kl/k3"].mean() == pytest.approx(math.expm1(sigma**2 / 2), rel=0.2)


def test_what_does_not_go_together(config):
    with pytest.raises(ValueError, match="expert_changes=20"):
        InterventionConfig(expert_changes=20).check()
    with pytest.raises(ValueError, match="swap='best'"):
        InterventionConfig(expert_changes=0.1, swap="best").check()
    with pytest.raises(ValueError, match="null or old_policy"):
        config(replay=ReplayConfig("rollout"), intervention=InterventionConfig(expert_changes=0.1)).check()
    with pytest.raises(ValueError, match="PPO compares more"):
        check_together(get_objective("ppo"), config(intervention=InterventionConfig(expert_changes=0.1)))
