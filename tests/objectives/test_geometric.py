import math

import pytest
import torch

from moe_rl.objectives import get_objective, router_shift

F64 = torch.float64
LOGP = torch.tensor([[0.3, -0.1]], dtype=F64)
OLD = torch.zeros(1, 2, dtype=F64)
MASK = torch.ones(1, 2)
GAMMA = torch.tensor([[0.9, 0.5]], dtype=F64)


@pytest.mark.parametrize(
    ("advantage", "mean", "clipped"),
    [(2.0, (0.2 - 0.1) / 2, (True, False)), (-2.0, (0.3 - 0.05) / 2, (False, True))],
)
def test_gmpo_by_hand(advantage, mean, clipped, value_and_gradient):
    args = (LOGP, OLD, torch.tensor([advantage], dtype=F64), MASK)
    loss, gradient, metrics = value_and_gradient("gmpo", *args, clip_low=0.05, clip_high=0.2)
    assert loss.item() == pytest.approx(-advantage * math.exp(mean), abs=1e-14)
    expected = [0 if flag else -advantage * math.exp(mean) / 2 for flag in clipped]
    assert gradient.flatten().tolist() == pytest.approx(expected, abs=1e-14)
    assert metrics["clip_frac/token"] == 0.5
    assert metrics["clip_frac/token_signblind"] == 1


def test_gmpo_without_clipping_is_gspo_without_clipping(make_batch, value_and_gradient):
    batch = make_batch(scale=1.0)
    gmpo = value_and_gradient("gmpo", *batch, clip_low=50, clip_high=50)
    gspo = value_and_gradient("gspo", *batch, clip_low=1, clip_high=1e9)
    torch.testing.assert_close(gmpo[:2], gspo[:2], rtol=0, atol=1e-14)


def test_rspo_with_floor_one_is_gmpo(make_batch, value_and_gradient):
    logp, *rest = make_batch(scale=1.0)
    gamma = torch.rand(logp.shape, dtype=F64).clamp(min=0.01)
    rspo = value_and_gradient("rspo", logp, *rest, tensors={"router_shift_BT": gamma}, gamma_min=1.0)
    gmpo = value_and_gradient("gmpo", logp, *rest)
    torch.testing.assert_close(rspo[:2], gmpo[:2], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("apply", "mean"),
    [
        # Scaled first: 0.3 + log 0.9 = 0.195 is clipped to 0.1; -0.1 + log 0.8 (the floor) is not.
        ("pre_clip", (0.1 + -0.1 + math.log(0.8)) / 2),
        # Clipped first: min(0.3, 0.1) and -0.1, then both scaled.
        ("post_clip", (0.1 + math.log(0.9) + -0.1 + math.log(0.8)) / 2),
    ],
)
def test_rspo_by_hand(apply, mean, value_and_gradient):
    args = (LOGP, OLD, torch.tensor([2.0], dtype=F64), MASK)
    loss, gradient, metrics = value_and_gradient(
        "rspo", *args, tensors={"router_shift_BT": GAMMA}, apply=apply, clip_high=0.1
    )
    assert loss.item() == pytest.approx(-2 * math.exp(mean), abs=1e-14)
    assert gradient.flatten().tolist() == pytest.approx([0, -math.exp(mean)], abs=1e-14)
    assert metrics["router_shift/gamma_mean"] == pytest.approx(0.7)
    assert metrics["router_shift/floored_frac"] == 0.5


def test_rspo_refuses_a_shift_in_place_of_the_ratio():
    args = (LOGP, OLD, torch.ones(1, dtype=F64), MASK)
    with pytest.raises(ValueError, match=r"pass torch.exp\(-shift\)"):
        get_objective("rspo")(*args, router_shift_BT=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="unknown apply"):
        get_objective("rspo", apply="after")
    with pytest.raises(ValueError, match="gamma_min must be in"):
        get_objective("rspo", gamma_min=0.0)


def test_router_shift_by_hand():
    """One token, two layers of two experts: |changes| 0.1, 0.3, 0.2 and 0.6, mean 0.3; then none."""
    change = torch.tensor([[[[0.1, -0.3], [0.2, -0.6]], [[0.0, 0.0], [0.0, 0.0]]]], dtype=F64)
    old = torch.full((1, 2, 2, 2), -1.5, dtype=F64, requires_grad=True)
    gamma = router_shift(old, old + change)
    assert gamma.flatten().tolist() == pytest.approx([math.exp(-0.3), 1.0], abs=1e-12)
    assert not gamma.requires_grad
    with pytest.raises(ValueError, match=r"must both be \[B, T, L, K\], got \(1, 2, 2, 2\) and \(1, 2, 2\)"):
        router_shift(old, change[..., 0])
