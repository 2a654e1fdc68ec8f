import math

import pytest
import torch

from moe_rl.objectives import get_objective

F64 = torch.float64
# Mean log-ratios 0.2 and -0.1 in the first pair, 0.4 and nothing in the second.
LOGP = torch.tensor([[0.1, 0.3], [-0.1, 9.0], [0.4, 9.0], [9.0, 9.0]], dtype=F64)
MASK = torch.tensor([[1, 1], [1, 0], [1, 0], [0, 0]])
ZERO = torch.zeros(4, 2, dtype=F64)
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, 1.0], dtype=F64)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_contrastive_by_hand(value_and_gradient):
    loss, gradient, metrics = value_and_gradient(
        "contrastive", LOGP, ZERO, ADVANTAGES, MASK, group_size=2, beta=2.0
    )
    # Group 0: centre 0.05, so both terms are sigmoid(2 * 0.15). Group 1: alone, so sigmoid(0).
    assert loss.item() == pytest.approx(-(2 * sigmoid(0.3) + 0.5) / 2, abs=1e-14)
    # d Lambda_0 moves both centred scores by a half: 2 (beta / 2) s (1 - s), over 2 tokens and 2 groups.
    slope = sigmoid(0.3) * (1 - sigmoid(0.3))
    assert gradient.flatten().tolist() == pytest.approx([-slope / 2] * 2 + [slope] + [0] * 5, abs=1e-14)
    assert metrics["clip_frac/token"] == 0


def test_dpo_by_hand(value_and_gradient):
    reference = {"ref_logp_BT": torch.full((4, 2), -0.5, dtype=F64)}
    loss, gradient, metrics = value_and_gradient(
        "dpo", LOGP, ZERO, ADVANTAGES, MASK, tensors=reference, beta=0.5
    )
    # Pair 0: rewards 0.4 + 1 and -0.1 + 0.5, margin 0.5 * 1.0. Pair 1 lacks a response: no loss, but counted.
    assert loss.item() == pytest.approx(-math.log(sigmoid(0.5)) / 2, abs=1e-14)
    slope = 0.5 * (1 - sigmoid(0.5)) / 2
    assert gradient.flatten().tolist() == pytest.approx([-slope, -slope, slope, 0, 0, 0, 0, 0], abs=1e-14)
    assert metrics["preference/accuracy"] == 1
    assert metrics["preference/margin"] == pytest.approx(0.5, abs=1e-12)


def test_dpo_does_not_depend_on_which_row_of_a_pair_is_preferred(value_and_gradient):
    swapped = torch.tensor([1, 0, 3, 2])
    rows = {"ref_logp_BT": ZERO}
    one = value_and_gradient("dpo", LOGP, ZERO, ADVANTAGES, MASK, tensors=rows)
    two = value_and_gradient("dpo", LOGP[swapped], ZERO, ADVANTAGES[swapped], MASK[swapped], tensors=rows)
    assert one[0].item() == two[0].item()
    assert torch.equal(one[1], two[1][swapped])


def test_dpo_pairs_of_equal_advantage_have_no_loss(value_and_gradient):
    loss, gradient, _ = value_and_gradient(
        "dpo", LOGP, ZERO, torch.ones(4, dtype=F64), MASK, tensors={"ref_logp_BT": ZERO}
    )
    assert loss.item() == 0
    assert (gradient == 0).all()


def test_groups_must_be_whole_and_aggregation_is_fixed():
    with pytest.raises(ValueError, match="whole groups of 3, got 4 rows"):
        get_objective("contrastive", group_size=3)(LOGP, ZERO, ADVANTAGES, MASK)
    with pytest.raises(ValueError, match="requires group_size"):
        get_objective("contrastive")
    with pytest.raises(ValueError, match="group_size must be 2 or more"):
        get_objective("contrastive", group_size=1)
    with pytest.raises(ValueError, match="one value per response"):
        get_objective("dpo", aggregation="token-mean")
