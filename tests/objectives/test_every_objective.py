"""What every objective must satisfy: padding, order, micro-batches, extremes, gradients, ratio one."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from moe_rl.objectives import OBJECTIVES, aggregate, get_objective

F64 = torch.float64
REQUIRED = {"dr_grpo": {"length_divisor": 6.0}, "contrastive": {"group_size": 2}}
COMPARISONS = {"contrastive", "dpo"}
# Their losses hold weights without a gradient: a numerical derivative is theirs only with those frozen.
STOP_GRADIENT = {"gspo_token", "cispo", "dppo_tv", "dppo_kl", "minirl"}
EVERY = pytest.mark.parametrize("name", OBJECTIVES)
RATIOS = pytest.mark.parametrize("name", sorted(OBJECTIVES.keys() - COMPARISONS))


def objective_of(name):
    return get_objective(name, **REQUIRED.get(name, {}))


def tensors_for(name, old):
    """The keyword tensors that an objective needs, near the old log-probabilities."""
    generator = torch.Generator().manual_seed(1)

    def noise():
        return torch.randn(old.shape, generator=generator, dtype=old.dtype)

    offered = {
        "ref_logp_BT": old + 0.2 * noise(),
        "sampler_logp_BT": old + 0.2 * noise(),
        "router_shift_BT": (-0.2 * noise().abs()).exp(),
        "values_BT": noise(),
        "old_values_BT": noise(),
        "returns_BT": noise(),
    }
    return {needed: offered[needed] for needed in OBJECTIVES[name].needs}


def run(name, logp, old, advantages, mask, tensors, **counts):
    logp = logp.detach().clone().requires_grad_()
    loss, metrics = objective_of(name)(logp, old, advantages, mask, **tensors, **counts)
    loss.backward()
    return loss.detach(), logp.grad, metrics


def random_batch(seed, pairs, width, scale=0.3):
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * pairs
    old = -3 * torch.rand(rows, width, generator=generator, dtype=F64) - 0.1
    logp = (old + scale * torch.randn(rows, width, generator=generator, dtype=F64)).clamp(max=-0.01)
    advantages = torch.randn(rows, generator=generator, dtype=F64)
    mask = torch.rand(rows, width, generator=generator) < 0.7  # holes, and now and then an empty row
    return logp, old, advantages, mask


SHAPES = {"seed": st.integers(0, 10**6), "pairs": st.integers(1, 3), "width": st.integers(1, 5)}


@EVERY
@settings(max_examples=12, deadline=None)
@given(garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]), **SHAPES)
def test_padding_changes_nothing(name, seed, pairs, width, garbage):
    logp, old, advantages, mask = random_batch(seed, pairs, width)
    tensors = tensors_for(name, old)
    clean = run(name, logp, old, advantages, mask, tensors)
    dirty = run(
        name,
        logp.masked_fill(~mask, garbage),
        old.masked_fill(~mask, -garbage),
        advantages[:, None].expand_as(logp).masked_fill(~mask, garbage),
        mask.int(),
        {key: tensor.masked_fill(~mask, garbage) for key, tensor in tensors.items()},
    )
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert clean[2] == dirty[2]
    assert (clean[1][~mask] == 0).all()


@EVERY
@settings(max_examples=12, deadline=None)
@given(**SHAPES)
def test_order_of_tokens_and_of_groups_does_not_matter(name, seed, pairs, width):
    batch = random_batch(seed, pairs, width)
    tensors = tensors_for(name, batch[1])
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randperm(pairs, generator=generator)
    rows = torch.stack([2 * groups, 2 * groups + 1], dim=1).flatten()
    columns = torch.randperm(width, generator=generator)

    def shuffled(tensor):
        return tensor[rows][:, columns] if tensor.ndim == 2 else tensor[rows]

    loss, gradient, metrics = run(name, *batch, tensors)
    other = run(name, *map(shuffled, batch), {key: shuffled(tensor) for key, tensor in tensors.items()})
    torch.testing.assert_close(other[0], loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(other[1], shuffled(gradient), rtol=1e-12, atol=1e-12)
    assert other[2] == pytest.approx(metrics, rel=1e-9, abs=1e-12)


@EVERY
def test_micro_batches_add_up(name):
    logp, old, advantages, mask = random_batch(3, 3, 5)
    tensors = tensors_for(name, old)
    loss, gradient, _ = run(name, logp, old, advantages, mask, tensors)
    counts = {"sequences": 6, "tokens": int(mask.sum())}
    total, gradients = 0, []
    for rows in (slice(0, 2), slice(2, 6)):
        part = {key: tensor[rows] for key, tensor in tensors.items()}
        part_loss, part_gradient, _ = run(
            name, logp[rows], old[rows], advantages[rows], mask[rows], part, **counts
        )
        total += part_loss
        gradients.append(part_gradient)
    torch.testing.assert_close(total, loss, rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.cat(gradients), gradient, rtol=0, atol=1e-14)


@EVERY
def test_nothing_but_padding_is_zero_with_a_graph(name):
    logp, old, advantages, mask = random_batch(0, 2, 3)
    loss, gradient, metrics = run(name, logp, old, advantages, mask & False, tensors_for(name, old))
    assert loss.item() == 0
    assert (gradient == 0).all()
    assert metrics["ratio/token_mean"] == metrics["ratio/sequence_max"] == metrics["ratio/token_ess"] == 1
    assert metrics["clip_frac/token"] == metrics["kl/k3"] == metrics["ratio/token_std"] == 0


@EVERY
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_log_ratios_of_20_over_32768_tokens_stay_finite(name, sign):
    shape = (2, 32_768)
    logp, old = torch.full(shape, -10.5 + 10 * sign), torch.full(shape, -10.5 - 10 * sign)
    advantages, mask = torch.tensor([1.0, -1.0]), torch.ones(shape, dtype=torch.bool)
    loss, gradient, metrics = run(name, logp, old, advantages, mask, tensors_for(name, old))
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", sorted(OBJECTIVES.keys() - STOP_GRADIENT))
def test_gradient_is_the_numerical_derivative(name):
    logp, old, advantages, mask = random_batch(5, 2, 4)
    tensors = tensors_for(name, old)
    objective = objective_of(name)
    assert torch.autograd.gradcheck(
        lambda x: objective(x, old, advantages, mask, **tensors)[0], logp.clone().requires_grad_()
    )


def frozen_at_first_call(function):
    """`function`, where every detach() gives what it gave in the first call: stop-gradients held constant."""
    kept, detach = [], torch.Tensor.detach

    def call(x):
        first, number = not kept, 0

        def constant(tensor):
            nonlocal number
            if first:
                kept.append(detach(tensor).clone())
            number += 1
            return kept[number - 1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "detach", constant)
            return function(x)

    return call


@pytest.mark.parametrize("name", sorted(STOP_GRADIENT))
def test_gradient_is_the_numerical_derivative_with_frozen_factors(name):
    """Flags are frozen with the weights, so that no token crosses a clip bound within the difference."""
    logp, old, _, mask = random_batch(5, 4, 4, scale=0.5)
    # Per token: with one advantage per response, gspo_token's derivative is GSPO's even unfrozen.
    advantages = torch.randn(logp.shape, generator=torch.Generator().manual_seed(2), dtype=F64)
    tensors = tensors_for(name, old)
    objective = objective_of(name)

    def loss(x):
        return objective(x, old, advantages, mask, **tensors)[0]

    x = logp.clone().requires_grad_()
    frozen = frozen_at_first_call(loss)
    (expected,) = torch.autograd.grad(loss(x), x)
    (gradient,) = torch.autograd.grad(frozen(x), x)
    assert torch.equal(gradient, expected)  # freezing leaves value and gradient alone
    assert 0 < int((gradient == 0)[mask].sum()) < int(mask.sum()) or name == "cispo"
    assert torch.autograd.gradcheck(frozen, x)
    assert not torch.autograd.gradcheck(loss, x, raise_exception=False)


@RATIOS
def test_at_ratio_one_the_gradient_is_the_policy_gradient(name):
    _, old, advantages, mask = random_batch(7, 2, 4)
    tensors = tensors_for(name, old)
    if "router_shift_BT" in tensors:
        tensors["router_shift_BT"] = torch.ones_like(old)
    if "sampler_logp_BT" in tensors:
        tensors["sampler_logp_BT"] = old
    _, gradient, metrics = run(name, old, old, advantages, mask, tensors)
    logp = old.clone().requires_grad_()
    objective = objective_of(name)
    reinforce = aggregate(
        -advantages[:, None] * logp, mask, objective.aggregation, length_divisor=objective.length_divisor
    )
    (expected,) = torch.autograd.grad(reinforce, logp)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)
    assert metrics["clip_frac/token"] == 0


@RATIOS
def test_no_gradient_where_the_advantage_is_zero(name):
    logp, old, advantages, mask = random_batch(11, 2, 4)
    _, gradient, metrics = run(name, logp, old, 0 * advantages, mask, tensors_for(name, old))
    assert (gradient == 0).all()
    assert metrics["clip_frac/token"] == 0


@EVERY
def test_a_missing_tensor_is_named(name):
    logp, old, advantages, mask = random_batch(0, 1, 2)
    for missing in OBJECTIVES[name].needs:
        tensors = tensors_for(name, old)
        del tensors[missing]
        with pytest.raises(ValueError, match=f"missing \\['{missing}'\\]"):
            objective_of(name)(logp, old, advantages, mask, **tensors)


@EVERY
def test_every_objective_has_a_config_with_its_own_defaults(name):
    """conf/objective/<name>.yaml shows values; they must be the class's, or the two drift apart."""
    shown = OmegaConf.load(Path(__file__).parents[2] / "conf" / "objective" / f"{name}.yaml")
    assert shown.pop("name") == name
    assert shown.pop("defaults") == [f"schema_{name}", "_self_"]
    values = OmegaConf.to_container(shown, resolve=False)
    interpolated = {key for key, value in values.items() if str(value).startswith("${")}
    assert interpolated == REQUIRED.get(name, {}).keys()
    objective = objective_of(name)
    assert {key: getattr(objective, key) for key in values if key not in interpolated} == {
        key: value for key, value in values.items() if key not in interpolated
    }
