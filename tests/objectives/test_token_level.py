import pytest
import torch

from moe_rl.objectives import get_objective

F64 = torch.float64


def test_dual_clip_bounds_the_loss_of_bad_tokens(value_and_gradient):
    logp = torch.tensor([[2.0, 0.5]], dtype=F64)  # ratios 7.39 and 1.65
    args = (torch.zeros(1, 2, dtype=F64), torch.tensor([-2.0], dtype=F64), torch.ones(1, 2))
    loss, gradient, metrics = value_and_gradient("grpo", logp, *args, dual_clip=3.0)
    assert loss.item() == pytest.approx((2 * 3 + 2 * torch.tensor(0.5).exp().item()) / 2, abs=1e-6)
    assert gradient[0, 0] == 0
    assert gradient[0, 1].item() == pytest.approx(torch.tensor(0.5).exp().item(), abs=1e-6)
    assert metrics["clip_frac/token"] == 0.5
    with pytest.raises(ValueError, match="must exceed 1 \\+ clip_high"):
        get_objective("grpo", dual_clip=1.2)


def test_dr_grpo_divides_by_the_constant_and_needs_it(value_and_gradient):
    logp = torch.zeros(2, 3, dtype=F64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    args = (logp, torch.tensor([1.0, -1.0], dtype=F64), mask)
    loss, gradient, _ = value_and_gradient("dr_grpo", logp, *args, length_divisor=10)
    assert loss.item() == pytest.approx(-(3 - 1) / 10 / 2, abs=1e-15)
    assert gradient[0].tolist() == pytest.approx([-1 / 20] * 3, abs=1e-15)
    with pytest.raises(ValueError, match="divides by length_divisor"):
        get_objective("dr_grpo")


def test_dapo_weighs_tokens_alike(value_and_gradient):
    logp = torch.zeros(2, 3, dtype=F64)
    args = (logp, torch.tensor([1.0, -2.0], dtype=F64), torch.tensor([[1, 1, 1], [1, 0, 0]]))
    loss, gradient, _ = value_and_gradient("dapo", logp, *args)
    assert loss.item() == pytest.approx(-(3 - 2) / 4, abs=1e-15)
    assert gradient.flatten().tolist() == pytest.approx([-0.25, -0.25, -0.25, 0.5, 0, 0], abs=1e-15)


@pytest.mark.parametrize("log_ratio", [-1.0, 0.0, 1.0])
def test_sapo_gradient_weight(log_ratio, value_and_gradient):
    """d objective / d logp = 4 p (1 - p) r A with p = sigmoid(tau (r - 1)): 1 at r = 1, then falling off."""
    logp = torch.full((1, 1), log_ratio, dtype=F64)
    args = (torch.zeros(1, 1, dtype=F64), torch.tensor([-1.0], dtype=F64), torch.ones(1, 1))
    _, gradient, _ = value_and_gradient("sapo", logp, *args, tau_neg=2.0)
    r = logp.exp()
    p = torch.sigmoid(2 * (r - 1))
    torch.testing.assert_close(gradient, 4 * p * (1 - p) * r, rtol=0, atol=1e-14)
