"""Closed forms of trainers that cannot be installed beside this project, written one token at a time.

NeMo-RL: `ClippedPGLossFn` (nemo_rl/algorithms/loss/loss_functions.py at 7ea279ab), but for the 1e-8 that it
adds to divisors. prime-rl: `default_loss_fn` (src/prime_rl/trainer/rl/loss.py at 559b4477). slime, beside the
functions that tests/golden runs: `vanilla_tis_function` and `icepop_function`
(slime/backends/megatron_utils/loss.py at 624b824a), which need Megatron.
"""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_rl.objectives import MismatchCorrection, get_mismatch_correction, get_objective, mismatch_metrics

TENSORS = load_file(Path(__file__).parents[1] / "golden" / "peer_values.safetensors")
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(params=["near", "far", "wild", "empty_row"])
def scene(request):
    prefix = f"{request.param}/"
    return {key.removeprefix(prefix): value for key, value in TENSORS.items() if key.startswith(prefix)}


@pytest.fixture
def ours(scene):
    """Function (objective, options, keyword tensors) -> loss, gradient, metrics on the scene."""

    def evaluate(name, options, **keywords):
        logp = scene["logp"].clone().requires_grad_()
        arguments = (logp, scene["old_logp"], scene["advantages"], scene["mask"])
        loss, metrics = get_objective(name, **options)(*arguments, **keywords)
        loss.backward()
        return loss.detach(), logp.grad, metrics

    return evaluate


def responses(scene, *names):
    """For each response the list of its tokens, each a tuple of 0-dim tensors: padding is gone."""
    columns = [scene[name] for name in names]
    lengths = scene["mask"].sum(1).int().tolist()
    return [[tuple(c[b, t] for c in columns) for t in range(n)] for b, n in enumerate(lengths)]


def total(values):
    return sum(values, torch.zeros((), dtype=torch.float64))


def mean(values):
    return total(values) / max(len(values), 1)


def clipped(ratio, advantage, low, high, dual_clip=None):
    held = min(max(ratio, 1 - low), 1 + high)
    value = min(ratio * advantage, held * advantage)
    return max(value, dual_clip * advantage) if dual_clip and advantage < 0 else value


def nemo_rl(scene, logp, *, low, high, dual_clip=None, form="token", product_weights=False):
    """-mean over tokens ("token", "cispo") or over responses of token means ("sequence", "mean of means")."""
    rows = []
    tokens_of = responses(scene | {"logp": logp}, "logp", "old_logp", "sampler_logp")
    for tokens, advantage in zip(tokens_of, scene["advantages"], strict=True):
        values = []
        for new, old, _ in tokens:
            ratio = mean([n - o for n, o, _ in tokens]).exp() if form == "sequence" else (new - old).exp()
            if form == "cispo":
                values.append(min(max(ratio.detach(), 1 - low), 1 + high) * advantage * new)
            else:
                values.append(clipped(ratio, advantage, low, high, dual_clip))
        if product_weights:
            weight = total([old - sampled for _, old, sampled in tokens]).exp()
            values = [weight * value for value in values]
        rows.append(values)
    if form in ("token", "cispo"):
        return -mean([value for values in rows for value in values])
    return -mean([mean(values) for values in rows])


@pytest.mark.parametrize(
    ("name", "options", "form"),
    [
        ("dapo", {"clip_high": 0.2}, {"low": 0.2, "high": 0.2}),
        ("dapo", {"clip_high": 0.28, "dual_clip": 3.0}, {"low": 0.2, "high": 0.28, "dual_clip": 3.0}),
        ("grpo", {}, {"low": 0.2, "high": 0.27, "form": "mean of means"}),
        ("gspo", {}, {"low": 3e-4, "high": 4e-4, "form": "sequence"}),
        ("cispo", {"clip_low": 0.2, "clip_high": 0.28}, {"low": 0.2, "high": 0.28, "form": "cispo"}),
    ],
)
def test_losses_of_nemo_rl(name, options, form, scene, ours):
    logp = scene["logp"].clone().requires_grad_()
    expected = nemo_rl(scene, logp, **form)
    expected.backward()
    loss, gradient, metrics = ours(name, options)
    torch.testing.assert_close(loss, expected.detach(), **EXACT)
    torch.testing.assert_close(gradient, logp.grad, **EXACT)
    ratios = [(new - old).exp().item() for row in responses(scene, "logp", "old_logp") for new, old in row]
    reported = [metrics[f"ratio/token_{what}"] for what in ("mean", "min", "max")]
    assert reported == pytest.approx([sum(ratios) / len(ratios), min(ratios), max(ratios)], abs=1e-12)


def test_gspo_of_nemo_rl_with_importance_sampling_correction(scene, ours):
    """Its sequence weight is the product of w, bounded by nothing unless a truncation is asked for."""
    logp = scene["logp"].clone().requires_grad_()
    expected = nemo_rl(scene, logp, low=3e-4, high=4e-4, form="sequence", product_weights=True)
    expected.backward()
    product = MismatchCorrection(level="sequence", high=math.inf)
    weights = product(scene["old_logp"], scene["sampler_logp"], scene["mask"]).weights
    loss, gradient, _ = ours("gspo", {}, weights_BT=weights)
    torch.testing.assert_close(loss, expected.detach(), **EXACT)
    torch.testing.assert_close(gradient, logp.grad, **EXACT)


def test_kl_of_nemo_rl(scene, ours):
    """k3 times exp(log pi - sg[log pi]): the value of k3 with the gradient of k2, k3 + (1 - e^-k1) = k1.

    Its clamps, 20 nats in and 10 out, are left out; they do nothing on these scenes but the widest.
    """
    logp = scene["logp"].clone().requires_grad_()
    rows = responses(scene | {"logp": logp}, "logp", "ref_logp")
    by_token = [
        (new - new.detach()).exp() * ((ref - new).exp() - 1 - (ref - new)) for row in rows for new, ref in row
    ]
    mean(by_token).backward()
    plain, without, _ = ours("dapo", {})
    value, _, _ = ours("dapo", {"kl_coef": 1.0}, ref_logp_BT=scene["ref_logp"])
    _, gradient, _ = ours("dapo", {"kl_coef": 1.0, "kl_estimator": "k2"}, ref_logp_BT=scene["ref_logp"])
    torch.testing.assert_close(value - plain, mean(by_token).detach(), **EXACT)
    torch.testing.assert_close(gradient - without, logp.grad, **EXACT)


@pytest.mark.parametrize(
    ("name", "low", "high", "weigh"),
    [
        ("token_tis", 0.0, 2.0, lambda w, low, high: min(max(w, low), high)),
        ("icepop", 0.5, 5.0, lambda w, low, high: w if low <= w <= high else 0.0),
    ],
)
def test_token_weights_of_nemo_rl_and_slime(name, low, high, weigh, scene):
    rows = responses(scene, "old_logp", "sampler_logp")
    ratios = [math.exp(old - sampled) for row in rows for old, sampled in row]
    expected = [weigh(ratio, low, high) for ratio in ratios]
    correction = get_mismatch_correction(name, low=low, high=high)(
        scene["old_logp"], scene["sampler_logp"], scene["mask"]
    )
    assert correction.weights[scene["mask"].bool()].tolist() == pytest.approx(expected, rel=1e-12)
    changed = sum(weight != ratio for weight, ratio in zip(expected, ratios, strict=True)) / len(ratios)
    assert 0 < changed < 1
    assert correction.metrics["mismatch/changed_frac_token"] == pytest.approx(changed, abs=1e-12)
    kl = sum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(ratios)
    reported = mismatch_metrics(scene["old_logp"], scene["sampler_logp"], scene["mask"])
    assert reported["mismatch/kl_k3"] == pytest.approx(kl, abs=1e-12)  # gen_kl_error


def test_seq_mask_tis_of_nemo_rl(scene, ours):
    """Drops responses by their geometric mean, but weighs the others' tokens by w and keeps the divisor."""
    logp = scene["logp"].clone().requires_grad_()
    rows = responses(scene | {"logp": logp}, "logp", "old_logp", "sampler_logp")
    values, dropped = [], 0
    for tokens, advantage in zip(rows, scene["advantages"], strict=True):
        kept = 0.9 <= mean([old - sampled for _, old, sampled in tokens]).exp() <= 1.2
        dropped += not kept
        for new, old, sampled in tokens:
            weight = (old - sampled).exp() if kept else 0.0
            values.append(weight * clipped((new - old).exp(), advantage, 0.2, 0.2))
    (-mean(values)).backward()
    between = (scene["old_logp"], scene["sampler_logp"], scene["mask"])
    rejection = get_mismatch_correction("geometric_rejection", low=0.9, high=1.2)(*between)
    by_token = MismatchCorrection(level="token", high=math.inf)(*between)
    loss, gradient, _ = ours("dapo", {"clip_high": 0.2}, weights_BT=by_token.weights * rejection.mask)
    torch.testing.assert_close(loss, -mean(values).detach(), **EXACT)
    torch.testing.assert_close(gradient, logp.grad, **EXACT)
    assert 0 < dropped < len(rows)
    assert rejection.metrics["mismatch/changed_frac_sequence"] == pytest.approx(dropped / len(rows))


def test_default_loss_of_prime_rl(scene):
    """DPPO-TV against the sampler without a cap on the ratio, and tau (log r)² = 2 tau k2 to the sampler.

    Its surrogate is r A where ours is sg[r] A log pi: gradients are the same, values are not.
    """
    mask_low, mask_high, kl_tau = 0.2, 0.15, 1e-3
    logp = scene["logp"].clone().requires_grad_()
    rows = responses(scene | {"logp": logp}, "logp", "sampler_logp")
    losses, masked = [], 0
    for tokens, advantage in zip(rows, scene["advantages"], strict=True):
        for new, sampled in tokens:
            moved = (new.exp() - sampled.exp()).detach()
            drop = moved > mask_high if advantage > 0 else moved < -mask_low
            masked += bool(drop) and bool(advantage != 0)
            surrogate = 0.0 if drop else advantage * (new - sampled).exp()
            losses.append(kl_tau * (new - sampled) ** 2 - surrogate)
    mean(losses).backward()
    objective = get_objective(
        "dppo_tv",
        clip_low=mask_low,
        clip_high=mask_high,
        ratio_cap=math.inf,
        kl_coef=2 * kl_tau,
        kl_estimator="k2",
    )
    leaf = scene["logp"].clone().requires_grad_()
    loss, metrics = objective(
        leaf,
        scene["sampler_logp"],
        scene["advantages"],
        scene["mask"],
        ref_logp_BT=scene["sampler_logp"],
    )
    loss.backward()
    torch.testing.assert_close(leaf.grad, logp.grad, **EXACT)
    assert masked > 0
    # is_masked_low + is_masked_high; ours is a quotient in float32.
    assert metrics["clip_frac/token"] == pytest.approx(masked / len(losses), abs=2e-7)
