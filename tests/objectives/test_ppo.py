import pytest
import torch

from moe_rl.objectives import gae

F64 = torch.float64
REWARDS = torch.tensor([[0.0, 0.0, 1.0, 9.0]], dtype=F64)
VALUES = torch.tensor([[0.5, 0.4, 0.8, 9.0]], dtype=F64)
MASK = torch.tensor([[1, 1, 1, 0]])


def test_monte_carlo_returns():
    advantages, returns = gae(REWARDS, VALUES, MASK)
    assert returns.flatten().tolist() == pytest.approx([1, 1, 1, 0], abs=1e-15)
    assert advantages.flatten().tolist() == pytest.approx([0.5, 0.6, 0.2, 0], abs=1e-15)


def test_lambda_zero_is_the_td_error():
    advantages, _ = gae(REWARDS, VALUES, MASK, gamma=0.9, lam=0.0)
    expected = [0.9 * 0.4 - 0.5, 0.9 * 0.8 - 0.4, 1 - 0.8, 0]
    assert advantages.flatten().tolist() == pytest.approx(expected, abs=1e-15)


def test_whitened_advantages():
    advantages, returns = gae(REWARDS, VALUES, MASK, whiten=True)
    kept = advantages[0, :3]
    assert kept.mean().item() == pytest.approx(0, abs=1e-12)
    assert kept.std().item() == pytest.approx(1, abs=1e-6)
    assert returns.flatten().tolist() == pytest.approx([1, 1, 1, 0], abs=1e-15)
    with pytest.raises(ValueError, match="two response tokens"):
        gae(REWARDS, VALUES, torch.tensor([[1, 0, 0, 0]]), whiten=True)


def test_padding_is_not_read():
    dirty = [tensor.masked_fill(MASK == 0, float("nan")) for tensor in (REWARDS, VALUES)]
    for clean, other in zip(gae(REWARDS, VALUES, MASK), gae(*dirty, MASK), strict=True):
        assert torch.equal(clean, other)


def test_value_loss_by_hand_and_mismatch_weights_leave_it_alone(value_and_gradient):
    logp = torch.zeros(1, 2, dtype=F64)
    tensors = {
        "values_BT": torch.tensor([[1.0, 0.0]], dtype=F64),
        "old_values_BT": torch.tensor([[0.0, 0.0]], dtype=F64),
        "returns_BT": torch.tensor([[2.0, 1.0]], dtype=F64),
        "weights_BT": torch.full((1, 2), 3.0, dtype=F64),
    }
    args = (logp, torch.tensor([1.0], dtype=F64), torch.ones(1, 2))
    loss, gradient, metrics = value_and_gradient("ppo", logp, *args, tensors=tensors, value_coef=0.1)
    # Token 0: max((1 - 2)², (0.5 - 2)²) = 2.25, clipped; token 1: 1. Policy: ratio 1, A = 1, weight 3.
    assert metrics["value/loss"] == pytest.approx((2.25 + 1) / 2 / 2, abs=1e-12)
    assert metrics["value/clip_frac"] == 0.5
    assert loss.item() == pytest.approx(-3 + 0.1 * (2.25 + 1) / 2 / 2, abs=1e-12)
    assert gradient.flatten().tolist() == pytest.approx([-1.5, -1.5], abs=1e-12)


def test_gae_of_no_tokens():
    empty = torch.zeros(3, 0)
    advantages, returns = gae(empty, empty, empty.bool())
    assert advantages.shape == returns.shape == (3, 0)


def test_gae_reads_no_reward_outside_the_mask():
    # The response ends at token 2: what stands on token 3 is nobody's.
    moved = torch.tensor([[0.0, 0.0, 1.0, -5.0]], dtype=F64)
    for ours, other in zip(gae(REWARDS, VALUES, MASK), gae(moved, VALUES, MASK), strict=True):
        assert torch.equal(ours, other)
