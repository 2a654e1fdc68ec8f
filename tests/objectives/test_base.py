"""Properties that hold for GRPO and GSPO alike: hand-worked values, gradients, padding, micro-batches."""

import math

import pytest
import torch

from moe_rl.objectives import get_objective

F64 = torch.float64


# delta, sigma, tokens out of [0.8, 1.27], s, response outside [0.9997, 1.0004], clipped for A > 0, for A < 0
TABLE = [
    (0.0, 0.4, 8, 1.0, 0, (4, 4), (0, 0)),
    (0.3, 0.1, 4, 1.3498588, 1, (4, 0), (1, 0)),
    (-0.001, 0.1, 0, 0.9990005, 1, (0, 0), (0, 1)),
    (0.0, 0.2, 0, 1.0, 0, (0, 0), (0, 0)),
]


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_eight_alternating_tokens(row, sign, value_and_gradient):
    delta, sigma, tokens_out, s, response_out, token_clipped, response_clipped = row
    which = 0 if sign > 0 else 1
    signs = torch.tensor([1.0, -1.0] * 4, dtype=F64)
    logp = (delta + sigma * signs)[None, :]
    args = (torch.zeros(1, 8, dtype=F64), torch.tensor([sign], dtype=F64), torch.ones(1, 8))
    _, _, grpo = value_and_gradient("grpo", logp, *args)
    _, _, gspo = value_and_gradient("gspo", logp, *args)
    assert grpo["clip_frac/token_signblind"] == tokens_out / 8
    assert grpo["clip_frac/token"] == grpo["clip_frac/sequence"] == token_clipped[which] / 8
    assert gspo["clip_frac/token_signblind"] == response_out
    assert gspo["clip_frac/token"] == gspo["clip_frac/sequence"] == response_clipped[which]
    for metrics in (grpo, gspo):
        assert metrics["ratio/sequence_mean"] == pytest.approx(s, abs=1e-7)
        assert metrics["ratio/token_max"] == pytest.approx(math.exp(delta + sigma), abs=1e-12)
        assert metrics["ratio/token_min"] == pytest.approx(math.exp(delta - sigma), abs=1e-12)
        assert metrics["ratio/token_log_sq"] == pytest.approx(delta**2 + sigma**2, abs=1e-12)
        assert metrics["kl/k1"] == pytest.approx(-delta, abs=1e-12)
        assert metrics["kl/k3"] == pytest.approx(math.exp(delta) * math.cosh(sigma) - 1 - delta, abs=1e-12)
        assert metrics["ratio/token_std"] == pytest.approx(math.exp(delta) * math.sinh(sigma), abs=1e-12)
        assert metrics["ratio/sequence_std"] == 0


def test_values_by_hand(value_and_gradient):
    logp = torch.tensor([[0.5, -0.1, 9.0], [-0.4, 9.0, 9.0]], dtype=F64)
    args = (
        torch.zeros(2, 3, dtype=F64),
        torch.tensor([2.0, -3.0], dtype=F64),
        torch.tensor([[1, 1, 0], [1, 0, 0]]),
    )
    loss, gradient, metrics = value_and_gradient("grpo", logp, *args)
    # Row 0, A = 2: min(1.6487, 1.27) and 0.9048. Row 1, A = -3: r = 0.6703 < 0.8, so clipped to 0.8.
    assert loss.item() == pytest.approx(-((2 * 1.27 + 2 * math.exp(-0.1)) / 2 + -3 * 0.8) / 2, abs=1e-12)
    expected = torch.tensor([[0, -2 * math.exp(-0.1) / 4, 0], [0, 0, 0]], dtype=F64)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    assert metrics["clip_frac/token"] == pytest.approx(2 / 3)
    assert metrics["clip_frac/sequence"] == pytest.approx((1 / 2 + 1) / 2)

    loss, gradient, metrics = value_and_gradient("gspo", logp, *args, clip_low=0.5, clip_high=0.3)
    # s = exp(0.2) = 1.2214 and exp(-0.4) = 0.6703, both inside [0.5, 1.3].
    assert loss.item() == pytest.approx(-(2 * math.exp(0.2) - 3 * math.exp(-0.4)) / 2, abs=1e-12)
    per_token = -2 * math.exp(0.2) / 2 / 2
    expected = torch.tensor([[per_token, per_token, 0], [3 * math.exp(-0.4) / 2, 0, 0]], dtype=F64)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    assert metrics["clip_frac/token"] == 0


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_ratio_one_is_the_policy_gradient(name, make_batch, value_and_gradient):
    _, old, advantages, mask = make_batch()
    loss, gradient, _ = value_and_gradient(name, old, old, advantages, mask)
    expected = -advantages[:, None] * mask / mask.sum(1, keepdim=True) / len(advantages)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-15)
    assert loss.item() == pytest.approx(-advantages.mean().item(), abs=1e-12)


def test_gradients_are_equations_10_and_12(make_batch, value_and_gradient):
    logp, old, advantages, mask = make_batch(scale=0.5)
    lengths = mask.sum(1, keepdim=True)
    log_ratio = (logp - old).detach()
    wide = {"clip_low": 1.0, "clip_high": 100.0}
    _, gradient, _ = value_and_gradient("gspo", logp, old, advantages, mask, **wide)
    s = ((log_ratio * mask).sum(1, keepdim=True) / lengths).exp()
    expected_10 = -(s * advantages[:, None] / lengths * mask) / len(advantages)
    torch.testing.assert_close(gradient, expected_10, rtol=0, atol=1e-14)
    _, gradient, _ = value_and_gradient("grpo", logp, old, advantages, mask, **wide)
    expected_12 = -(log_ratio.exp() * advantages[:, None] / lengths * mask) / len(advantages)
    torch.testing.assert_close(gradient, expected_12, rtol=0, atol=1e-14)


def test_single_token_responses_make_grpo_and_gspo_equal(make_batch, value_and_gradient):
    logp, old, advantages, _ = make_batch(sequences=32, tokens=1, scale=0.5)
    mask = torch.ones(32, 1)
    clip = {"clip_low": 0.2, "clip_high": 0.27}
    grpo = value_and_gradient("grpo", logp, old, advantages, mask, **clip)
    gspo = value_and_gradient("gspo", logp, old, advantages, mask, **clip)
    torch.testing.assert_close(grpo[:2], gspo[:2], rtol=0, atol=1e-15)
    assert grpo[2] == gspo[2]
    assert 0 < grpo[2]["clip_frac/token"] < 1


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_clipped_tokens_have_no_gradient_at_all(name, value_and_gradient):
    logp = torch.tensor([[0.5, 0.5], [-0.5, -0.5], [0.5, 0.5], [-0.5, -0.5]], dtype=F64)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=F64)
    _, gradient, _ = value_and_gradient(
        name, logp, torch.zeros(4, 2, dtype=F64), advantages, torch.ones(4, 2)
    )
    assert (gradient[:2] == 0).all()
    assert (gradient[2:] != 0).all()


@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_micro_batches_add_up(name, aggregation, make_batch):
    logp, old, advantages, mask = make_batch(sequences=6)
    options = {"aggregation": aggregation, "kl_coef": 0.1, "entropy_coef": 0.01}
    if aggregation.endswith("norm"):
        options["length_divisor"] = 6.0
    objective = get_objective(name, **options)
    extra = {"ref_logp_BT": old - 0.1, "entropy_BT": -2 * logp}
    whole, _ = objective(logp, old, advantages, mask, **extra)
    (whole_gradient,) = torch.autograd.grad(whole, logp, retain_graph=True)
    parts = []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = {name: tensor[rows] for name, tensor in extra.items()}
        counts = {"sequences": 6, "tokens": mask.sum().item()}
        parts.append(objective(logp[rows], old[rows], advantages[rows], mask[rows], **counts, **part)[0])
    (gradient,) = torch.autograd.grad(sum(parts), logp)
    torch.testing.assert_close(sum(parts), whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize("log_ratio", [20.0, -20.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_long_responses_and_large_ratios_stay_finite(name, log_ratio, advantage, value_and_gradient):
    logp = torch.full((1, 32_768), log_ratio)
    args = (torch.zeros(1, 32_768), torch.tensor([advantage]), torch.ones(1, 32_768))
    loss, gradient, metrics = value_and_gradient(name, logp, *args)
    assert loss.isfinite() and gradient.isfinite().all()
    assert all(math.isfinite(value) for value in metrics.values())
    width = {"grpo": (0.2, 0.27), "gspo": (3e-4, 4e-4)}[name]
    bounds = {(20.0, 1.0): 1 + width[1], (-20.0, -1.0): 1 - width[0]}
    ratio = bounds.get((log_ratio, advantage), math.exp(log_ratio))
    assert loss.item() == pytest.approx(-advantage * ratio, rel=1e-5)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_clipped_ratios_that_overflow_have_zero_gradient(name, value_and_gradient):
    logp = torch.tensor([[800.0, 0.0]], dtype=F64)
    args = (torch.zeros(1, 2, dtype=F64), torch.ones(1, dtype=F64), torch.tensor([[1, 0]]))
    loss, gradient, _ = value_and_gradient(name, logp, *args)
    assert loss.isfinite()
    assert gradient.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_fully_masked_row_counts_as_a_response_with_zero_loss(name, make_batch, value_and_gradient):
    logp, old, advantages, mask = make_batch(sequences=3)
    three = value_and_gradient(name, logp, old, advantages, mask)
    mask[1] = 0
    two = value_and_gradient(name, logp[[0, 2]], old[[0, 2]], advantages[[0, 2]], mask[[0, 2]])
    loss, gradient, metrics = value_and_gradient(name, logp, old, advantages, mask)
    assert loss.item() == pytest.approx(two[0].item() * 2 / 3, abs=1e-14)
    assert (gradient[1] == 0).all()
    torch.testing.assert_close(gradient[[0, 2]], three[1][[0, 2]], rtol=0, atol=1e-14)
    assert metrics["clip_frac/token"] == two[2]["clip_frac/token"]
    assert metrics["clip_frac/sequence"] == pytest.approx(two[2]["clip_frac/sequence"] * 2 / 3)
    assert metrics["ratio/sequence_min"] == two[2]["ratio/sequence_min"]


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_nothing_but_padding_is_zero_with_a_graph(name, make_batch, value_and_gradient):
    logp, old, advantages, mask = make_batch()
    loss, gradient, metrics = value_and_gradient(name, logp, old, advantages, torch.zeros_like(mask))
    assert loss.item() == 0
    assert (gradient == 0).all()
    assert metrics["ratio/token_mean"] == metrics["ratio/sequence_max"] == 1
    assert metrics["clip_frac/token"] == metrics["kl/k3"] == metrics["ratio/token_std"] == 0


def test_half_precision_is_computed_in_float32(make_batch, value_and_gradient):
    logp, old, advantages, mask = make_batch(dtype=torch.float32)
    logp16, old16 = logp.detach().bfloat16(), old.bfloat16()
    loss, _, _ = value_and_gradient("grpo", logp16, old16, advantages, mask)
    expected, _, _ = value_and_gradient("grpo", logp16.float(), old16.float(), advantages, mask)
    assert loss.dtype == torch.float32
    assert loss.item() == expected.item()


def test_metrics_are_floats_and_the_whole_batch_call_is_exact(make_batch):
    logp, old, advantages, mask = make_batch(sequences=5, scale=1.0)
    with torch.no_grad():
        _, metrics = get_objective("grpo")(logp, old, advantages, mask)
    assert all(type(value) is float for value in metrics.values())
    ratios = (logp - old).detach()[mask.bool()].exp()
    assert metrics["ratio/token_mean"] == pytest.approx(ratios.mean().item(), abs=1e-12)
    assert metrics["ratio/token_std"] == pytest.approx(ratios.std(correction=0).item(), abs=1e-12)


def test_reference_kl_and_entropy_are_added_to_the_loss(make_batch):
    logp, old, advantages, mask = make_batch()
    plain, _ = get_objective("gspo")(logp, old, advantages, mask)
    objective = get_objective("gspo", kl_coef=0.5, kl_estimator="k2", entropy_coef=0.25)
    loss, metrics = objective(
        logp, old, advantages, mask, ref_logp_BT=logp.detach() - 0.2, entropy_BT=torch.full_like(mask, 3.0)
    )
    assert loss.item() == pytest.approx(plain.item() + 0.5 * 0.02 - 0.25 * 3, abs=1e-12)
    assert metrics["kl/reference_k2"] == pytest.approx(0.02, abs=1e-12)
    assert metrics["entropy/token_mean"] == pytest.approx(3.0)


def test_weights_scale_each_token_and_carry_no_gradient(make_batch):
    logp, old, advantages, mask = make_batch()
    weights = torch.full_like(mask, 2.0).requires_grad_()
    loss, _ = get_objective("grpo")(logp, old, advantages, mask, weights_BT=weights)
    plain, _ = get_objective("grpo")(logp, old, advantages, mask)
    assert loss.item() == pytest.approx(2 * plain.item(), abs=1e-14)
    loss.backward()
    assert weights.grad is None


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_only_the_new_log_probabilities_get_a_gradient(name, make_batch):
    """So that passing one tensor twice, on-policy, is the policy gradient and not a constant."""
    logp, _, advantages, mask = make_batch()
    advantages.requires_grad_()
    loss, _ = get_objective(name)(logp, logp, advantages, mask)
    loss.backward()
    expected = -advantages.detach()[:, None] * mask / mask.sum(1, keepdim=True) / len(mask)
    torch.testing.assert_close(logp.grad, expected, rtol=0, atol=1e-15)
    assert advantages.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logp": torch.zeros(6)}, r"logp_BT must be \[B, T\]"),
        ({"mask": torch.ones(4, 5)}, "mask_BT must have logp_BT's shape"),
        ({"mask": torch.full((4, 6), 0.5)}, "only 0"),
        ({"advantages": torch.zeros(3)}, "advantages must be"),
        ({"advantages": torch.zeros(4, 5)}, "advantages must have"),
        ({"old": torch.zeros(4, 5)}, "old_logp_BT must have"),
    ],
)
def test_border_names_what_does_not_fit(change, message, make_batch):
    logp, old, advantages, mask = make_batch()
    tensors = {"logp": logp, "old": old, "advantages": advantages, "mask": mask} | change
    with pytest.raises(ValueError, match=message):
        get_objective("grpo")(*tensors.values())


def test_border_refuses_integers_counts_and_unknown_tensors(make_batch):
    logp, old, advantages, mask = make_batch()
    with pytest.raises(TypeError, match="advantages must be a floating tensor"):
        get_objective("grpo")(logp, old, torch.ones(4, dtype=torch.long), mask)
    with pytest.raises(ValueError, match="sequences counts the whole mini-batch"):
        get_objective("grpo")(logp, old, advantages, mask, sequences=0)
    with pytest.raises(ValueError, match="missing \\['ref_logp_BT'\\]"):
        get_objective("grpo", kl_coef=0.1)(logp, old, advantages, mask)
    with pytest.raises(ValueError, match="not taken \\['values_BT'\\]"):
        get_objective("grpo")(logp, old, advantages, mask, values_BT=old)


def test_get_objective_lists_what_it_knows():
    with pytest.raises(ValueError, match=r"unknown objective 'gpso'; known: grpo"):
        get_objective("gpso")
    with pytest.raises(ValueError, match=r"no option cliplow; known: .*clip_low"):
        get_objective("gspo", cliplow=1e-4)
    with pytest.raises(ValueError, match="clip_low must be a number >= 0"):
        get_objective("gspo", clip_low=-1e-4)
    with pytest.raises(ValueError, match="unknown kl_estimator"):
        get_objective("gspo", kl_estimator="k4")
    with pytest.raises(ValueError, match="unknown aggregation"):
        get_objective("gspo", aggregation="mean")
    with pytest.raises(ValueError, match="divides by length_divisor"):
        get_objective("gspo", aggregation="seq-mean-token-sum-norm")
