"""Lengths by reward, and advantages without group normalisation."""

import pytest
import torch

from moe_rl.training.batch import RolloutBatch
from moe_rl.training.groups import Groups
from moe_rl.training.measure import response_metrics
from moe_rl.training.signal import advantages_of


def groups(lengths, rewards):
    rewards_PG = torch.tensor(rewards)
    mask = (torch.arange(8) < torch.tensor(lengths).reshape(-1, 1)).float()
    ids = torch.ones_like(mask).long()
    batch = RolloutBatch(ids, ids, mask, mask, torch.ones(len(mask)).bool(), 0)
    return Groups(batch, rewards_PG, 0.0, rewards_PG[..., None])


def test_lengths_by_reward_by_hand():
    # group means 0.5, 1/3, and a group of equal rewards that teaches nothing
    found = response_metrics(
        groups([[2, 4, 6], [8, 1, 3], [7, 7, 7]], [[1.0, 0.0, 0.5], [0.0, 0.0, 1.0], [0.3, 0.3, 0.3]])
    )
    assert found["response/length_better"] == pytest.approx((2 + 3) / 2)
    assert found["response/length_worse"] == pytest.approx((4 + 8 + 1) / 3)
    assert found["response/length"] == pytest.approx(45 / 9)
    none = response_metrics(groups([[2, 4]], [[0.1, 0.1]]))
    assert set(none) == {"response/length", "response/truncated"}


def test_without_normalisation_an_advantage_is_the_reward():
    rewards_PG = torch.tensor([[1.0, 0.0], [1.0, 1.0], [torch.inf, 0.5]])
    found = advantages_of(rewards_PG, "none")
    assert found[:2].tolist() == [[1.0, 0.0], [1.0, 1.0]], "a group of equal rewards is pushed as well"
    assert found[2].isnan().tolist() == [True, False]
    assert advantages_of(rewards_PG, "mean")[:2].tolist() == [[0.5, -0.5], [0.0, 0.0]]


def test_the_loop_pushes_up_what_is_rewarded_alone(tmp_path, fresh, run, config):
    """GSPO's first update: the gradient of Σ r log π, so with all rewards 0 there is none."""
    options = config(steps=1, advantages="none", drift_every=0)
    updates = run(tmp_path / "none", fresh(), options, "gspo").updates()
    assert updates["loss"][0] < 0, "at ratios of 1 the loss is minus the mean reward"
    centred = run(tmp_path / "paper", fresh(), config(steps=1, drift_every=0), "gspo").updates()
    assert centred["loss"][0] == pytest.approx(0, abs=1e-6)


def test_conventions_are_named_when_refused(config):
    with pytest.raises(ValueError, match=r"advantages=.std.: expected one of paper, .* or none"):
        config(advantages="std").check()
    with pytest.raises(ValueError, match="not with advantages_by=turn"):
        config(advantages="none", advantages_by="turn").check()
