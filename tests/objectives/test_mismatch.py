import math

import pytest
import torch

from moe_rl.objectives import (
    MISMATCH_CORRECTIONS,
    MismatchCorrection,
    get_mismatch_correction,
    get_objective,
    mismatch_metrics,
    off_policy_sequence_mask,
)

F64 = torch.float64
# Ratios w: 4, 0.25 and 1 (product 1, geometric mean 1); 2 and 3 (product 6, geometric mean sqrt 6).
WEIGHTS = torch.tensor([[4.0, 0.25, 1.0], [2.0, 3.0, 99.0]], dtype=F64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
OLD = WEIGHTS.log() - 5
SAMPLER = torch.full_like(OLD, -5.0)


@pytest.mark.parametrize(
    ("name", "bounds", "weights", "mask"),
    [
        ("token_tis", {"high": 2.5}, [[2.5, 0.25, 1], [2, 2.5, 0]], MASK),
        ("sequence_tis", {"high": 2.0}, [[1, 1, 1], [2, 2, 0]], MASK),
        ("icepop", {"low": 0.5, "high": 3.5}, [[0, 0, 1], [2, 3, 0]], MASK),
        ("sequence_mis", {}, [[1, 1, 1], [0, 0, 0]], MASK),
        ("sequence_rejection", {}, [[1, 1, 1], [0, 0, 0]], [[1, 1, 1], [0, 0, 0]]),
        ("geometric_rejection", {"high": 2.4}, [[1, 1, 1], [0, 0, 0]], [[1, 1, 1], [0, 0, 0]]),
        ("geometric_rejection", {"high": 2.5}, [[1, 1, 1], [1, 1, 0]], MASK),
    ],
)
def test_by_hand(name, bounds, weights, mask):
    correction = get_mismatch_correction(name, **bounds)(OLD, SAMPLER, MASK)
    expected = torch.tensor(weights, dtype=F64)
    torch.testing.assert_close(correction.weights, expected, rtol=0, atol=1e-13)
    assert torch.equal(correction.mask, torch.as_tensor(mask).bool())


def test_correction_metrics_by_hand():
    metrics = get_mismatch_correction("icepop", high=3.5)(OLD, SAMPLER, MASK).metrics
    assert metrics["mismatch/weight_mean"] == pytest.approx((1 + 2 + 3) / 5, abs=1e-12)
    assert metrics["mismatch/weight_ess"] == pytest.approx(36 / (5 * 14), abs=1e-12)
    assert metrics["mismatch/changed_frac_token"] == pytest.approx(2 / 5)
    assert metrics["mismatch/changed_frac_sequence"] == 0.5


@pytest.mark.parametrize("name", MISMATCH_CORRECTIONS)
@pytest.mark.parametrize("sign", [20.0, -20.0])
def test_long_responses_stay_finite_and_padding_unread(name, sign):
    old, sampler, mask = torch.zeros(1, 32_768), torch.full((1, 32_768), -sign), torch.ones(1, 32_768)
    mask[0, -1], old[0, -1] = 0, float("nan")
    correction = get_mismatch_correction(name)(old, sampler, mask)
    assert correction.weights.isfinite().all()
    assert all(math.isfinite(value) for value in correction.metrics.values())


@pytest.mark.parametrize("name", MISMATCH_CORRECTIONS)
def test_the_same_engine_needs_no_correction(name, make_batch):
    logp, old, advantages, mask = make_batch()
    correction = get_mismatch_correction(name)(old, old, mask)
    corrected, _ = get_objective("gspo")(
        logp, old, advantages, correction.mask, weights_BT=correction.weights
    )
    plain, _ = get_objective("gspo")(logp, old, advantages, mask)
    assert corrected.item() == plain.item()
    assert correction.metrics["mismatch/changed_frac_token"] == 0
    assert correction.metrics["mismatch/weight_ess"] == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("advantages", "threshold", "kept"),
    [
        # Mean of log mu - log pi is 0 in row 0 and -log(6) / 2 in row 1: only row 0 exceeds -0.5.
        ([-1.0, -1.0], -0.5, [0, 1]),
        ([1.0, -1.0], -0.5, [1, 1]),
        ([-1.0, -1.0], 0.1, [1, 1]),
    ],
)
def test_off_policy_sequence_mask_by_hand(advantages, threshold, kept):
    correction = off_policy_sequence_mask(
        OLD, SAMPLER, torch.tensor(advantages, dtype=F64), MASK, threshold=threshold
    )
    assert torch.equal(correction.weights, MASK * torch.tensor(kept, dtype=F64)[:, None])
    assert torch.equal(correction.mask, MASK.bool())


def test_metrics_by_hand():
    metrics = mismatch_metrics(OLD, SAMPLER, MASK)
    log_sum = math.log(6)
    assert metrics["mismatch/kl_k1"] == pytest.approx(-log_sum / 5, abs=1e-12)
    assert metrics["mismatch/kl_k3"] == pytest.approx((10.25 - 5 - log_sum) / 5, abs=1e-12)
    assert metrics["mismatch/logp_abs_diff_mean"] == pytest.approx(math.log(4 * 4 * 2 * 3) / 5, abs=1e-12)
    assert metrics["mismatch/logp_abs_diff_max"] == pytest.approx(math.log(4), abs=1e-12)
    assert metrics["mismatch/chi2_token"] == pytest.approx((16 + 1 / 16 + 1 + 4 + 9) / 5 - 1, abs=1e-12)


def test_errors():
    with pytest.raises(ValueError, match="unknown mismatch correction 'tis'; known: token_tis"):
        get_mismatch_correction("tis")
    with pytest.raises(ValueError, match="no option cap; known: level"):
        get_mismatch_correction("token_tis", cap=2.0)
    with pytest.raises(ValueError, match="0 <= low < high"):
        MismatchCorrection(low=3.0, high=2.0)
    with pytest.raises(ValueError, match="level must be one of token"):
        MismatchCorrection(level="batch")
    with pytest.raises(ValueError, match="sampler_logp_BT must have"):
        get_mismatch_correction("token_tis")(OLD, SAMPLER[:, :2], MASK)


def test_weights_that_overflow_are_refused():
    old, sampler, mask = torch.zeros(1, 32_768), torch.full((1, 32_768), -20.0), torch.ones(1, 32_768)
    for name in ("sequence_tis", "sequence_mis"):
        with pytest.raises(ValueError, match="overflows under high = inf: give a finite bound"):
            get_mismatch_correction(name, high=math.inf)(old, sampler, mask)
    unbounded = get_mismatch_correction("token_tis", high=math.inf)(old, sampler, mask)
    assert unbounded.metrics["mismatch/weight_mean"] == pytest.approx(math.exp(20), rel=1e-6)


def test_great_weights_have_an_effective_share():
    old = torch.tensor([[80.0, 80.0, 0.0, 0.0]])  # in float32 exp(80) is finite and its square is not
    correction = get_mismatch_correction("token_tis", high=math.inf)(old, torch.zeros(1, 4), torch.ones(1, 4))
    assert correction.metrics["mismatch/weight_ess"] == pytest.approx(0.5, abs=1e-12)
