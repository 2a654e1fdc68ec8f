"""Changes planted in a router, below it, or in both are found in their layer and named by their cause."""

import pytest
import torch

from moe_rl.laboratory.attribution import attribute_change, capture_router_inputs
from moe_rl.routing import RoutingError, expert_change, find_routers
from moe_rl.training.passes import split

CAUSES = ("sets/router", "sets/hidden", "sets/either", "sets/joint")
TOP_K = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "minimax_m2", "phimoe"]


def attributed(model, batch, change, groups_B=None):
    """The attribution of what `change(model)` does, and expert_change of the same two forwards."""
    plan, rows = split(4, 2, None), batch.attention_mask_BT
    old = capture_router_inputs(model, batch, plan)
    with torch.no_grad():
        change(model)
    new = capture_router_inputs(model, batch, plan)
    return attribute_change(old, new, rows, groups_B), expert_change(old.trace, new.trace)


def shift(tensor, size=0.5):
    tensor += size * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", TOP_K)
def test_a_changed_router_is_found_in_its_layer(build, batch, family):
    found, whole = attributed(build(family), batch, lambda model: shift(find_routers(model)[1].module.weight))
    both, router, hidden = (found.by_layer(metric) for metric in ("both", "router", "hidden"))
    assert torch.equal(both, whole.by_layer) and both[0] == 0 and both[1] > 0.1
    # In its own layer the hidden states are the old ones; later layers have the old routers.
    assert hidden[:2].tolist() == [0, 0] and router.tolist() == [0, both[1], 0]
    assert hidden[2] == both[2] and found.by_layer("interaction").tolist() == [0, 0, 0]
    assert found.by_layer("sets/router")[1] == whole.sets_by_layer[1]


@pytest.mark.parametrize("family", TOP_K)
def test_a_changed_attention_weight_acts_through_the_hidden_states(build, batch, family):
    def change(model):
        shift(model.model.layers[1].self_attn.o_proj.weight)

    found, whole = attributed(build(family), batch, change)
    both = found.by_layer("both")
    assert torch.equal(both, whole.by_layer) and both[0] == 0 and bool((both[1:] > 0.05).all())
    assert found.by_layer("router").tolist() == [0, 0, 0]
    assert torch.equal(found.by_layer("hidden"), both)
    assert torch.equal(found.by_layer("sets/hidden"), whole.sets_by_layer)


def test_causes_sum_to_the_sets_that_changed(build, batch):
    def change(model):
        for parameter in model.parameters():
            shift(parameter, 0.02)
        for router in find_routers(model):
            shift(router.module.weight, 0.2)

    found, whole = attributed(build(), batch, change, groups_B=torch.tensor([0, 0, 1, 1]))
    parts = {cause: found.layers(cause).sums for cause in CAUSES}
    assert torch.equal(sum(parts.values()), whole.changed_sets.double())
    assert all(parts[cause].sum() > 0 for cause in CAUSES)
    interaction = found.by_layer("both") - found.by_layer("router") - found.by_layer("hidden")
    torch.testing.assert_close(found.by_layer("interaction"), interaction)
    assert found.value("both") == pytest.approx(whole.experts)
    interval = found.interval("router")
    assert (interval.n, interval.unit) == (2, "prompts") and interval.low <= interval.value <= interval.high


@pytest.mark.parametrize(
    ("family", "bias"),
    [("deepseek_v3", "mlp.gate.e_score_correction_bias"), ("minimax_m2", "mlp.e_score_correction_bias")],
)
def test_a_selection_bias_belongs_to_the_router(build, batch, family, bias):
    def change(model):
        model.model.layers[0].get_buffer(bias)[3] += 0.5

    found, whole = attributed(build(family), batch, change)
    assert found.by_layer("router")[0] == whole.by_layer[0] > 0.1
    assert found.by_layer("hidden")[0] == 0


def test_an_unchanged_model_changed_nothing(build, batch):
    found, _ = attributed(build(), batch, lambda model: None)
    assert {found.value(metric) for metric in found.metrics} == {0.0}


def test_captures_outlive_updates_of_the_model(build, batch):
    model = build()
    old = capture_router_inputs(model, batch, split(4, 1, None))
    kept = [call.hidden.clone() for call in old.parts[0]]
    weight = old.routers[0].module.weight.clone()
    with torch.no_grad():
        shift(find_routers(model)[0].module.weight)
    capture_router_inputs(model, batch, split(4, 1, None))
    assert torch.equal(old.routers[0].module.weight, weight)
    assert all(torch.equal(call.hidden, was) for call, was in zip(old.parts[0], kept, strict=True))
    assert not any(router.module._forward_pre_hooks for router in find_routers(model))


def test_a_router_that_reads_another_layers_state_is_refused(build, batch):
    with pytest.raises(RoutingError, match="cannot be attributed"):
        capture_router_inputs(build("zaya"), batch, split(4, 1, None))


def test_noise_in_the_choice_is_refused(build, batch):
    with pytest.raises(RoutingError, match="noise in training mode"):
        capture_router_inputs(build("phimoe", router_jitter_noise=1.0).train(), batch, split(4, 1, None))


def test_captures_of_other_slices_are_refused(build, batch):
    model = build()
    old, new = (capture_router_inputs(model, batch, split(4, 1, size)) for size in (None, 1))
    with pytest.raises(RoutingError, match="same slices"):
        attribute_change(old, new, batch.routing_rows_BT)
