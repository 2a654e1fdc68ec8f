"""Gradients with a known signal and noise give the known cosine and noise scale."""

import math

import pytest
import torch

from moe_rl.laboratory.gradient_noise import gradient_noise, inner_products


def test_by_hand():
    """(1, 0), (0, 1) and (1, 1)."""
    found = gradient_noise(inner_products(torch.tensor([[1.0, 0], [0, 1], [1, 1]])))
    assert found.n == 3 and found.norm == pytest.approx(math.sqrt(4 / 3))
    assert found.cosine_pairs == pytest.approx((0 + 2 / math.sqrt(2)) / 3)
    # the sum is (2, 2); the sums of the others are (1, 2), (2, 1), (1, 1)
    assert found.cosine_full == pytest.approx((1 / math.sqrt(2) * 2 + 1) / 3)
    assert found.cosine_rest == pytest.approx((2 * 1 / math.sqrt(5) + 1) / 3)
    # products 0, 1, 1: |G|² = 2/3; squares 1, 1, 2: tr Σ = 4/3 - 2/3
    assert (found.signal, found.noise) == (pytest.approx(2 / 3), pytest.approx(2 / 3))


@pytest.mark.parametrize("ratio", [0.25, 1.0, 4.0])
def test_a_known_signal_in_known_noise(ratio):
    """tr Σ / |G|² = ratio: pairs have cosine 1/(1 + ratio), one and the mean of the other 31
    1 / sqrt((1 + ratio)(1 + ratio/31))."""
    N, D = 32, 20_000
    generator = torch.Generator().manual_seed(0)
    signal_D = torch.randn(D, generator=generator)
    noise_ND = torch.randn(N, D, generator=generator) * math.sqrt(ratio)
    found = gradient_noise(inner_products(signal_D + noise_ND))
    assert found.cosine_pairs == pytest.approx(1 / (1 + ratio), abs=0.01)
    assert found.cosine_rest == pytest.approx(1 / math.sqrt((1 + ratio) * (1 + ratio / 31)), abs=0.01)
    assert found.cosine_full > found.cosine_rest
    assert found.noise / found.signal == pytest.approx(ratio, rel=0.05)


def test_noise_alone_has_no_shared_part_and_gradients_of_zero_are_refused():
    opposed = gradient_noise(inner_products(torch.tensor([[1.0, 0], [-1, 0.0]])))
    assert opposed.cosine_pairs == -1 and (opposed.signal, opposed.noise) == (-1, 2)
    for gradients_ND in ([[1.0, 0]], [[1.0, 0], [0, 0]]):
        with pytest.raises(ValueError, match="at least two gradients that are not 0"):
            gradient_noise(inner_products(torch.tensor(gradients_ND)))
