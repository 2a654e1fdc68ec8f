"""Clip units: the bounds are 1, and a sampler's planted error comes out at its size."""

import math

import pytest
import torch

from moe_rl.laboratory.clip_units import RANGES, ClipRange, clip_unit_sums


def values(sums):
    return {metric: float(found.values) for metric, found in sums.items()}


def test_the_ranges_are_the_papers():
    assert RANGES["grpo"] == ClipRange(0.2, 0.27)
    assert RANGES["gspo"] == ClipRange(3e-4, 4e-4)


def test_both_bounds_are_one_unit_away():
    logs = torch.tensor([1.27, 0.8, 1.0, 1.27**2, 0.8**0.5], dtype=torch.float64).log()
    assert RANGES["grpo"].units(logs).tolist() == pytest.approx([1, 1, 0, 2, 0.5])


def test_a_planted_sampler_error_is_recovered_in_clip_units():
    """μ is off by the same factor on every token: three GSPO units up in one response, half a unit down in
    the other; in GRPO's units that is hardly anything."""
    up, down = 3 * math.log(1.0004), 0.5 * math.log(0.9997)
    trainer_BT = torch.full((2, 6), -1.7, dtype=torch.float64)
    mask_BT = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0.0]])
    sampler_BT = trainer_BT - torch.tensor([[up], [down]], dtype=torch.float64)
    sampler_BT[mask_BT == 0] = 99.0  # what padding holds is nobody's error
    found = values(clip_unit_sums(trainer_BT - sampler_BT, mask_BT))
    assert found["gspo/token"] == pytest.approx((4 * 3 + 2 * 0.5) / 6)
    assert found["gspo/token_outside"] == pytest.approx(4 / 6)
    assert found["gspo/sequence"] == pytest.approx((3 + 0.5) / 2)
    assert found["gspo/sequence_outside"] == 0.5
    assert found["grpo/token"] == pytest.approx((4 * up / math.log(1.27) + 2 * down / math.log(0.8)) / 6)
    assert found["grpo/token_outside"] == found["grpo/sequence_outside"] == 0
    assert found["token/log_sq"] == pytest.approx((4 * up**2 + 2 * down**2) / 6)
    assert found["sequence/log_sq"] == pytest.approx((up**2 + down**2) / 2)


def test_random_errors_average_out_in_a_response_and_not_in_its_tokens():
    """|N(0, σ)| has mean σ sqrt(2/π); the mean of n tokens has σ / sqrt(n)."""
    sigma, n = 0.01, 64
    noise_BT = sigma * torch.randn(4000, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = values(clip_unit_sums(noise_BT, torch.ones(4000, n)))
    halves = (1 / math.log(1.27) + 1 / -math.log(0.8)) / 2
    assert found["grpo/token"] == pytest.approx(sigma * math.sqrt(2 / math.pi) * halves, rel=0.01)
    halves = (1 / math.log(1.0004) + 1 / -math.log(0.9997)) / 2
    gspo = sigma / math.sqrt(n) * math.sqrt(2 / math.pi) * halves
    assert found["gspo/sequence"] == pytest.approx(gspo, rel=0.03)
    # P(m > log 1.0004) + P(m < log 0.9997) of m ~ N(0, σ²/n), σ/sqrt(n) = 0.00125
    assert found["gspo/sequence_outside"] == pytest.approx(0.3745 + 0.4052, abs=0.02)
    assert found["grpo/token_outside"] == 0


def test_empty_responses_count_for_nothing_and_prompts_are_resampled():
    mask_BT = torch.tensor([[1.0, 1], [0, 0], [1, 0], [1, 0]])
    log_BT = torch.full((4, 2), math.log(1.27))
    found = clip_unit_sums(log_BT, mask_BT, torch.tensor([0, 0, 1, 1]))
    assert float(found["grpo/sequence"].values) == pytest.approx(1)
    assert float(found["grpo/sequence"].counts) == 3 and float(found["grpo/token"].counts) == 4
    (interval,) = found["grpo/token"].intervals(resamples=10)
    assert (interval.n, interval.unit) == (2, "prompts")
