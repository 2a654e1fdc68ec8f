import math

import pytest
import torch

from moe_rl.objectives.policy_gradient import binary_kl

F64 = torch.float64


def one_row(*values):
    return torch.tensor([values], dtype=F64)


def test_cispo_caps_weights_and_keeps_every_gradient(value_and_gradient):
    args = (
        one_row(-1.0, -1.0, -1.0),
        one_row(-4.0, -1.2, -0.5),
        torch.tensor([2.0], dtype=F64),
        torch.ones(1, 3),
    )
    _, gradient, metrics = value_and_gradient("cispo", *args, clip_low=0.2, clip_high=0.5)
    # Ratios e^3, e^0.2 and e^-0.5, held within [0.8, 1.5].
    expected = [-2 * 1.5 / 3, -2 * math.exp(0.2) / 3, -2 * 0.8 / 3]
    assert gradient.flatten().tolist() == pytest.approx(expected, abs=1e-14)
    assert metrics["clip_frac/token"] == pytest.approx(1 / 3)
    assert metrics["clip_frac/token_signblind"] == pytest.approx(2 / 3)
    _, gradient, _ = value_and_gradient("cispo", *args)
    assert gradient[0, 2].item() == pytest.approx(-2 * math.exp(-0.5) / 3, abs=1e-14)  # no lower bound
    assert gradient[0, 0].item() == pytest.approx(-2 * 5 / 3, abs=1e-14)


@pytest.mark.parametrize(("advantage", "dropped"), [(1.0, 0), (-1.0, 1)])
def test_dppo_tv_drops_by_probability_not_by_ratio(advantage, dropped, value_and_gradient):
    # Probabilities 0.5 -> 0.7, 0.7 -> 0.5 and 0.001 -> 0.02: a ratio of 20 that hardly moves any mass.
    old, logp = one_row(0.5, 0.7, 0.001).log(), one_row(0.7, 0.5, 0.02).log()
    args = (logp, old, torch.tensor([advantage], dtype=F64), torch.ones(1, 3))
    _, gradient, metrics = value_and_gradient("dppo_tv", *args, ratio_cap=5)
    weights = [1.4, 5 / 7, 5.0]
    weights[dropped] = 0
    assert gradient.flatten().tolist() == pytest.approx([-advantage * w / 3 for w in weights], abs=1e-12)
    assert metrics["clip_frac/token"] == pytest.approx(1 / 3)
    assert metrics["clip_frac/token_signblind"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("advantage", "dropped"), [(1.0, 0), (-1.0, 1)])
def test_dppo_kl_drops_by_divergence(advantage, dropped, value_and_gradient):
    # Binary KL of 0.5 -> 0.7: 0.5 log(0.5/0.7) + 0.5 log(0.5/0.3) = 0.0872; of 0.7 -> 0.5: 0.0823.
    old, logp = one_row(0.5, 0.7, 0.5).log(), one_row(0.7, 0.5, 0.55).log()
    args = (logp, old, torch.tensor([advantage], dtype=F64), torch.ones(1, 3))
    _, gradient, metrics = value_and_gradient("dppo_kl", *args, clip_low=0.08, clip_high=0.087)
    weights = [1.4, 5 / 7, 1.1]
    weights[dropped] = 0
    assert gradient.flatten().tolist() == pytest.approx([-advantage * w / 3 for w in weights], abs=1e-12)
    assert metrics["clip_frac/token_signblind"] == pytest.approx(2 / 3)


def test_binary_kl_by_hand_and_at_certainty():
    kl = binary_kl(one_row(0.5, 0.7).log(), one_row(0.7, 0.5).log()).flatten().tolist()
    expected = [
        0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3),
        0.7 * math.log(0.7 / 0.5) + 0.3 * math.log(0.3 / 0.5),
    ]
    assert kl == pytest.approx(expected, abs=1e-7)
    assert binary_kl(torch.zeros(1), torch.zeros(1)).item() == 0


@pytest.mark.parametrize(
    ("advantage", "weights"),
    [(1.0, [math.exp(0.2), 5.0]), (-1.0, [math.exp(0.2), 0.0])],  # pi / pi_old = e^-0.5 < 0.8 under A < 0
)
def test_minirl_by_hand(advantage, weights, value_and_gradient):
    # pi / mu = e^0.2 and e^2 = 7.4, capped at 5; pi / pi_old = e^0.1 and e^-0.5.
    args = (one_row(-1.0, -2.0), one_row(-1.1, -1.5), torch.tensor([advantage], dtype=F64), torch.ones(1, 2))
    loss, gradient, metrics = value_and_gradient(
        "minirl", *args, tensors={"sampler_logp_BT": one_row(-1.2, -4.0)}
    )
    assert gradient.flatten().tolist() == pytest.approx([-advantage * w for w in weights], abs=1e-12)
    assert loss.item() == pytest.approx(advantage * (weights[0] + 2 * weights[1]), abs=1e-12)
    assert metrics["clip_frac/token"] == (0 if advantage > 0 else 0.5)


def test_binary_kl_of_a_log_probability_rounded_above_zero():
    above = torch.tensor([1e-6], dtype=F64)
    zero = torch.zeros(1, dtype=F64)
    half = torch.tensor([math.log(0.5)], dtype=F64)
    assert torch.equal(binary_kl(half, above), binary_kl(half, zero))
    assert torch.equal(binary_kl(above, half), binary_kl(zero, half))
    assert binary_kl(zero, half).item() == pytest.approx(math.log(2), abs=1e-6)
