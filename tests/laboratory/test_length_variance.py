"""Variance against length of planted noise: independent, AR(1), and with a part common to a response."""

import math

import pytest
import torch

from moe_rl.laboratory.length_variance import length_sums

LENGTHS = [1, 4, 16, 64, 256, 1024]
B = 2000  # the variance of a variance estimate is 2/(B - 1) of its square: 3 % standard error


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def column(log_ratio_BN, metric, lengths=LENGTHS):
    return length_sums(log_ratio_BN, lengths)[metric].values.tolist()


def test_by_hand():
    """Two responses of two tokens: 0.1, 0.3 and -0.2, 0.2."""
    found = {
        metric: sums.values.tolist()
        for metric, sums in length_sums(torch.tensor([[0.1, 0.3], [-0.2, 0.2]]).double(), [1, 2]).items()
    }
    # n = 1: d 0.1, -0.2 about -0.05; n = 2: d about their mean 0.1, m 0.2 and 0, products 0.4 and 0
    assert found["token/variance"] == pytest.approx([0.0225, (0 + 0.04 + 0.09 + 0.01) / 4])
    assert found["sequence/mean"] == pytest.approx([-0.05, 0.1])
    assert found["sequence/variance"] == pytest.approx([0.045, 0.02])
    assert found["product/variance"] == pytest.approx([0.045, 0.08])
    assert found["sequence/independent"] == pytest.approx([0.0225, 0.035 / 2])
    assert found["product/independent"] == pytest.approx([0.0225, 0.07])
    assert found["inflation"] == pytest.approx([2, 0.08 / 0.07])
    assert found["product/outside"] == [0, 0.5]  # exp(0.4) alone is above 1.27
    assert found["grpo/token_outside"] == [0, 0.25]  # exp(0.3) above 1.27; exp(-0.2) = 0.819 is within
    assert found["gspo/sequence_outside"] == [1, 0.5]


def test_independent_noise_falls_as_one_over_n_and_grows_as_n():
    sigma = 0.05
    noise_BN = sigma * normal(B, LENGTHS[-1])
    falls = [sigma**2 / n for n in LENGTHS]
    grows = [sigma**2 * n for n in LENGTHS]
    assert column(noise_BN, "sequence/variance") == pytest.approx(falls, rel=0.1)
    assert column(noise_BN, "product/variance") == pytest.approx(grows, rel=0.1)
    assert column(noise_BN, "sequence/independent") == pytest.approx(falls, rel=0.05)
    assert column(noise_BN, "product/independent") == pytest.approx(grows, rel=0.05)
    assert column(noise_BN, "inflation") == pytest.approx([1] * len(LENGTHS), abs=0.1)


def test_ar1_noise_inflates_up_to_a_factor():
    """Var m = σ²/n [(1 + ρ)/(1 - ρ) - 2ρ(1 - ρ^n) / (n (1 - ρ)²)]."""
    sigma, rho = 0.05, 0.8
    fresh_NB = normal(LENGTHS[-1], B) * math.sqrt(1 - rho**2)
    noise_NB = torch.empty_like(fresh_NB)
    noise_NB[0] = fresh_NB[0] / math.sqrt(1 - rho**2)
    for t in range(1, len(noise_NB)):
        noise_NB[t] = rho * noise_NB[t - 1] + fresh_NB[t]
    expected = [(1 + rho) / (1 - rho) - 2 * rho * (1 - rho**n) / (n * (1 - rho) ** 2) for n in LENGTHS]
    assert expected[0] == pytest.approx(1) and expected[-1] == pytest.approx(9, rel=0.01)
    assert column(sigma * noise_NB.T, "inflation") == pytest.approx(expected, rel=0.1)


def test_what_a_response_shares_does_not_average_out():
    sigma, tau = 0.05, 0.01
    noise_BN = sigma * normal(B, LENGTHS[-1]) + tau * normal(B, 1, seed=1)
    found = column(noise_BN, "sequence/variance")
    assert found == pytest.approx([sigma**2 / n + tau**2 for n in LENGTHS], rel=0.1)
    assert found[-1] > 0.9 * tau**2
    products = column(noise_BN, "product/variance")
    assert products == pytest.approx([sigma**2 * n + tau**2 * n**2 for n in LENGTHS], rel=0.1)


def test_the_product_leaves_float32_and_the_mean_stays():
    drift_BN = torch.full((3, 1000), -0.1, dtype=torch.float64)  # e^-100 is below the smallest normal float32
    assert column(drift_BN, "product/not_float32", [800, 1000]) == [0, 1]
    assert column(-drift_BN, "product/not_float32", [800, 1000]) == [0, 1]
    assert column(drift_BN, "sequence/mean", [800, 1000]) == pytest.approx([-0.1, -0.1])


def test_clip_fractions_by_length_under_independent_noise():
    """GRPO's do not depend on length, GSPO's fall: P(|N(0, σ²/n)| beyond the bounds)."""
    sigma, lengths = 0.1, [64, 1024]
    noise_BN = sigma * normal(B, lengths[-1])
    found = length_sums(noise_BN, lengths)

    def beyond(high, low, spread):
        return sum(0.5 * math.erfc(bound / spread / math.sqrt(2)) for bound in (high, low))

    tokens = beyond(math.log(1.27), -math.log(0.8), sigma)
    assert found["grpo/token_outside"].values.tolist() == pytest.approx([tokens] * 2, rel=0.03)
    sequences = [beyond(math.log(1.0004), -math.log(0.9997), sigma / math.sqrt(n)) for n in lengths]
    assert found["gspo/sequence_outside"].values.tolist() == pytest.approx(sequences, abs=0.025)


@pytest.mark.parametrize("shape, lengths", [((1, 8), [4]), ((2, 8), [9]), ((2, 8), [0, 4]), ((2, 8), [])])
def test_what_cannot_be_measured_is_refused(shape, lengths):
    with pytest.raises(ValueError, match=r"at least 2 responses and lengths of 1 to 8 tokens"):
        length_sums(torch.zeros(shape), lengths)
