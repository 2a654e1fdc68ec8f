"""Losses, gradients and clip counts of TRL 1.16.0 and verl 0.9.1, from stored values (tests/golden)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_rl.objectives import (
    gae,
    get_mismatch_correction,
    get_objective,
    group_advantages,
    kl_estimate,
    mismatch_metrics,
    off_policy_sequence_mask,
)

GOLDEN = Path(__file__).parents[1] / "golden"
HEADER = json.loads((GOLDEN / "peer_values.json").read_text())
TENSORS = load_file(GOLDEN / "peer_values.safetensors")
# verl adds 1e-8 to its divisors and counts clipped tokens in float32; TRL does neither.
LOSS_TOLERANCE = {"trl": 1e-12, "verl": 1e-7}
COUNT_TOLERANCE = 2e-7


def scene_of(case):
    prefix = f"{case['scene']}/"
    return {key.removeprefix(prefix): value for key, value in TENSORS.items() if key.startswith(prefix)}


@pytest.mark.parametrize(
    "case", HEADER["cases"], ids=lambda case: f"{case['key']}-{case['scene']}-{case['objective']}"
)
def test_loss_gradient_and_counts(case):
    scene = scene_of(case)
    logp = scene["logp"].clone().requires_grad_()
    loss, metrics = get_objective(case["objective"], **case["options"])(
        logp,
        scene["old_logp"],
        scene[case.get("advantages", "advantages")],
        scene["mask"],
        **{ours: scene[theirs] for ours, theirs in case["extra"]},
    )
    loss.backward()
    key, scale = case["key"], case["scale"]
    peer_loss, peer_gradient = TENSORS[f"{key}/loss"].squeeze(), TENSORS[f"{key}/gradient"]
    tolerance = LOSS_TOLERANCE[case["peer"].split()[0]]
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(loss.detach(), scale * peer_loss + case["offset"], **close)
    torch.testing.assert_close(logp.grad, scale * peer_gradient, **close)
    for name, expected in case["counts"].items():
        assert metrics[name] == pytest.approx(expected, abs=COUNT_TOLERANCE), name


def test_the_cases_reach_every_branch():
    """Guards the golden file: clipping, dual clipping and no clipping all occur in it."""
    by_objective = {}
    for case in HEADER["cases"]:
        for name, value in case["counts"].items():
            if name.startswith("clip_frac"):
                by_objective.setdefault(case["objective"], []).append(value)
    for objective in ("grpo", "gspo", "gspo_token", "dapo", "dr_grpo", "cispo", "gmpo", "dppo_tv", "dppo_kl"):
        assert 0 < max(by_objective[objective]) < 1, objective


@pytest.mark.parametrize("convention", ["verl", "mean", "leave-one-out"])
def test_group_advantages(convention):
    ours = group_advantages(TENSORS["advantages/scores"], 3, normalise=convention)
    torch.testing.assert_close(ours, TENSORS[f"advantages/{convention}"], rtol=0, atol=1e-12)


def test_gae_with_a_hole_in_the_response():
    mask = TENSORS["gae/mask"]
    rewards, values = TENSORS["far/ref_logp"] * mask, TENSORS["far/token_advantages"] * mask
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8, whiten=True)
    # Outside the mask verl leaves the next token's values, which nothing reads.
    torch.testing.assert_close(advantages, TENSORS["gae/advantages"] * mask, rtol=0, atol=1e-7)
    torch.testing.assert_close(returns, TENSORS["gae/returns"] * mask, rtol=0, atol=1e-7)


def test_value_loss():
    scene = scene_of({"scene": "far"})
    predicted = TENSORS["value/predicted"].clone().requires_grad_()
    arguments = (scene["logp"], scene["old_logp"], scene["advantages"], scene["mask"])
    both, metrics = get_objective("ppo", value_coef=1.0)(
        *arguments, values_BT=predicted, old_values_BT=TENSORS["value/old"], returns_BT=scene["logp"]
    )
    both.backward()
    policy, _ = get_objective("dapo", clip_high=0.2)(*arguments)
    assert (both - policy).item() == pytest.approx(TENSORS["value/loss"].item(), abs=1e-7)
    assert metrics["value/loss"] == pytest.approx(TENSORS["value/loss"].item(), abs=1e-7)
    assert metrics["value/clip_frac"] == pytest.approx(TENSORS["value/clip_frac"].item(), abs=COUNT_TOLERANCE)
    torch.testing.assert_close(predicted.grad, TENSORS["value/gradient"], rtol=0, atol=1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators(estimator):
    mask = TENSORS["far/mask"].bool()
    ours = kl_estimate(TENSORS["far/logp"], TENSORS["far/ref_logp"], estimator)
    torch.testing.assert_close(ours[mask], TENSORS[f"kl/{estimator}"][mask], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["token_tis", "sequence_tis", "icepop"])
def test_mismatch_weights(name):
    scene = scene_of({"scene": "far"})
    correction = get_mismatch_correction(name)(scene["old_logp"], scene["sampler_logp"], scene["mask"])
    torch.testing.assert_close(correction.weights, TENSORS[f"mismatch/{name}"], rtol=0, atol=1e-12)
    ess = TENSORS[f"mismatch/{name}/ess"].item()
    assert correction.metrics["mismatch/weight_ess"] == pytest.approx(ess, abs=1e-6)
    assert 0 < correction.metrics["mismatch/changed_frac_token"] < 1


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("sequence_rejection", {}),
        # verl bounds exp(-mean log w) within [0.9, 1.1].
        ("geometric_rejection", {"low": 1 / 1.1, "high": 1 / 0.9}),
    ],
)
def test_rejection_masks(name, bounds):
    scene = scene_of({"scene": "far"})
    correction = get_mismatch_correction(name, **bounds)(
        scene["old_logp"], scene["sampler_logp"], scene["mask"]
    )
    assert torch.equal(correction.mask, TENSORS[f"mismatch/{name}"].bool())
    assert 0 < correction.metrics["mismatch/changed_frac_sequence"] < 1


def test_mismatch_metrics():
    scene = scene_of({"scene": "far"})
    ours = mismatch_metrics(scene["old_logp"], scene["sampler_logp"], scene["mask"])
    names = ("mismatch/kl_k1", "mismatch/kl_k3", "mismatch/chi2_token")
    assert [ours[name] for name in names] == pytest.approx(TENSORS["mismatch/metrics"].tolist(), abs=1e-7)


def test_off_policy_sequence_mask():
    scene = scene_of({"scene": "far"})
    correction = off_policy_sequence_mask(
        scene["logp"], scene["sampler_logp"], scene["advantages"], scene["mask"], threshold=0.1
    )
    kept = TENSORS["mismatch/off_policy_sequence_mask"]
    assert torch.equal(correction.weights, kept * scene["mask"])
    assert 0 < kept.sum() < len(kept)
