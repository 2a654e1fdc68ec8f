"""Losses, gradients and clip counts of TRL, verl and slime, from stored values (tests/golden)."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_rl.objectives import (
    gae,
    get_mismatch_correction,
    group_advantages,
    kl_estimate,
    mismatch_metrics,
    off_policy_sequence_mask,
)

GOLDEN = Path(__file__).parents[1] / "golden"
HEADERS = [json.loads((GOLDEN / f"{name}_values.json").read_text()) for name in ("peer", "slime")]
CASES = [case for header in HEADERS for case in header["cases"] + header["value_cases"]]
TENSORS = load_file(GOLDEN / "slime_values.safetensors") | load_file(GOLDEN / "peer_values.safetensors")


@pytest.fixture(scope="module")
def check_case():
    spec = importlib.util.spec_from_file_location("golden_compare", GOLDEN / "compare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.check_case


def scene_of(case):
    prefix = f"{case['scene']}/"
    return {key.removeprefix(prefix): value for key, value in TENSORS.items() if key.startswith(prefix)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['key']}-{case['scene']}-{case['objective']}")
def test_loss_gradients_and_counts(case, check_case):
    check_case(case, TENSORS)


def test_the_cases_reach_every_branch():
    """Guards the golden file: clipping, dual clipping and no clipping all occur in it."""
    by_objective = {}
    for case in CASES:
        for name, value in case["counts"].items():
            if name.startswith("clip_frac"):
                by_objective.setdefault(case["objective"], []).append(value)
    for objective in (
        "grpo",
        "gspo",
        "gspo_token",
        "dapo",
        "dr_grpo",
        "cispo",
        "gmpo",
        "dppo_tv",
        "dppo_kl",
        "ppo",
    ):
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


def test_gae_of_slime():
    mask = TENSORS["far/mask"]
    rewards, values = TENSORS["far/ref_logp"] * mask, TENSORS["far/token_advantages"] * mask
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close(advantages, TENSORS["slime/gae/advantages"], rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, TENSORS["slime/gae/returns"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators(estimator):
    mask = TENSORS["far/mask"].bool()
    ours = kl_estimate(TENSORS["far/logp"], TENSORS["far/ref_logp"], estimator)
    torch.testing.assert_close(ours[mask], TENSORS[f"kl/{estimator}"][mask], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "unit"), [("token_tis", "token"), ("sequence_tis", "sequence"), ("icepop", "token")]
)
def test_mismatch_weights(name, unit):
    scene = scene_of({"scene": "far"})
    correction = get_mismatch_correction(name)(scene["old_logp"], scene["sampler_logp"], scene["mask"])
    torch.testing.assert_close(correction.weights, TENSORS[f"mismatch/{name}"], rtol=0, atol=1e-12)
    ours = [correction.metrics[f"mismatch/{what}"] for what in ("weight_ess", f"changed_frac_{unit}")]
    assert ours == pytest.approx(TENSORS[f"mismatch/{name}/ess_and_changed"].tolist(), abs=1e-6)
    assert 0 < ours[1] < 1


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
    ours = [correction.metrics[f"mismatch/changed_frac_{unit}"] for unit in ("token", "sequence")]
    assert ours == pytest.approx(TENSORS[f"mismatch/{name}/changed"].tolist(), abs=1e-6)
    assert 0 < ours[1] < 1


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
    # slime: the same mask in its layout, and the number of responses it drops.
    assert torch.equal(correction.weights[scene["mask"].bool()], TENSORS["slime/opsm/kept"])
    dropped = correction.metrics["mismatch/changed_frac_sequence"] * len(kept)
    assert dropped == pytest.approx(TENSORS["slime/opsm/dropped"].item(), abs=1e-6)
