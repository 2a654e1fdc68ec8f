import math

import pytest
import torch

F64 = torch.float64


@pytest.mark.parametrize("scale", [1e-4, 1e-3, 0.5])
def test_gspo_token_with_constant_advantages_is_gspo(scale, make_batch, value_and_gradient):
    logp, old, advantages, mask = make_batch(sequences=16, scale=scale)
    gspo = value_and_gradient("gspo", logp, old, advantages, mask)
    token = value_and_gradient("gspo_token", logp, old, advantages[:, None].expand_as(mask), mask)
    torch.testing.assert_close(token[:2], gspo[:2], rtol=0, atol=1e-14)
    assert token[2] == gspo[2]


def test_gspo_token_weighs_each_token_by_its_own_advantage(value_and_gradient):
    """Eq. 17: s / |y| times the token's own advantage; only tokens that their own sign clips drop out."""
    logp = torch.tensor([[0.1, 0.3]], dtype=F64)
    advantages = torch.tensor([[1.0, -2.0]], dtype=F64)
    args = (torch.zeros(1, 2, dtype=F64), advantages, torch.ones(1, 2))
    _, gradient, metrics = value_and_gradient("gspo_token", logp, *args, clip_low=0.5, clip_high=0.5)
    s = math.exp(0.2)
    assert gradient.flatten().tolist() == pytest.approx([-s / 2, s], abs=1e-14)
    _, gradient, metrics = value_and_gradient("gspo_token", logp, *args)
    assert gradient.flatten().tolist() == pytest.approx([0, s], abs=1e-14)
    assert metrics["clip_frac/token"] == 0.5
    assert metrics["clip_frac/token_signblind"] == 1
