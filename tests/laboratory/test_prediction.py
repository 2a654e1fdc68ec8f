"""The derivative of the router scores against two others, and what it predicts of the changes."""

import pytest
import torch
from torch.func import functional_call, jvp

from moe_rl.laboratory.attribution import capture_router_inputs
from moe_rl.laboratory.observe import RoutedPass, observe
from moe_rl.laboratory.prediction import first_order_change, measure_prediction
from moe_rl.laboratory.weights import along, at_weights, relative_update, snapshot
from moe_rl.routing import RoutingError, RoutingTrace, find_routers, record_routing
from moe_rl.training.passes import split

PLAN = split(4, 2, None)


def moved(model, size, only=""):
    """The weights before, and `model` moved by `size` times a fixed direction."""
    old, generator = snapshot(model), torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter += size * torch.randn(parameter.shape, generator=generator)
    return old


def test_prediction_by_hand():
    # K = 1 of 2; margins 1, 2, 3, 4; the last response is one row shorter
    scores = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[..., None, None] * torch.tensor([1.0, 0.0])
    valid = torch.tensor([[True, True], [True, False]])
    old = RoutedPass(
        RoutingTrace(torch.zeros(2, 2, 1, 1).long(), valid, (0,), 2), torch.zeros(2, 2), None, scores
    )
    new = RoutingTrace(torch.tensor([[0, 1], [1, 0]])[..., None, None], valid, (0,), 2)
    change = torch.zeros(2, 2, 1, 2)
    change[0, 1, 0, 1], change[1, 0, 0, 1] = 2.5, 2.9  # of margins 2 and 3: the second is not enough
    table = measure_prediction(old, new, change, torch.ones(2, 2))
    assert table.changed.tolist() == [[1], [1]]
    assert table.predicted["first_order"].tolist() == [[1], [0]]
    assert table.predicted["margin_only"].tolist() == [[1], [0]]  # the one smallest margin, which stayed
    values = {metric: table.value(metric) for metric in table.metrics}
    assert values == {
        "first_order/precision": 1.0,
        "first_order/recall": 0.5,
        "margin_only/precision": 0.0,
        "margin_only/recall": 0.0,
    }
    with pytest.raises(RoutingError, match="has no 'sets'"):
        table.value("sets")
    with pytest.raises(RoutingError, match=r"\[2, 2, 1, 2\], got \[2, 2, 1\]"):
        measure_prediction(old, new, change[..., 0], torch.ones(2, 2))


def test_derivative_of_one_router_by_its_formula(build, batch):
    model = build("mixtral")
    router = find_routers(model)[2]
    inputs = capture_router_inputs(model, batch, PLAN)
    old = observe(model, batch, PLAN, 1.0)
    before = moved(model, 0.01, only=f"{router.name}.weight")
    change = first_order_change(model, before, old, batch, PLAN)
    hidden_BTD = torch.cat([part[2].hidden.view(2, -1, 32) for part in inputs.parts])
    logits = hidden_BTD @ (router.module.weight.detach() - before[f"{router.name}.weight"]).T
    p = old.scores_BTLE[:, :, 2]
    expected = p * (logits - (p * logits).sum(-1, keepdim=True))
    valid = old.trace.valid
    torch.testing.assert_close(
        change[:, :, 2][valid], expected[valid], atol=2e-3 * float(expected.abs().max()), rtol=0
    )
    assert float(change[:, :, :2].abs().max()) < 1e-4 * float(expected.abs().max())


def test_derivative_of_all_weights_against_forward_mode(build, batch):
    """Forward mode, in float64 with the kernels that have it, on the scores of qwen3_moe: the softmax."""
    model, batch, plan = build(), batch[0:2], split(2, 1, None)  # forward mode gives nan with left padding
    old = observe(model, batch, plan, 1.0)
    before = moved(model, 1e-3)
    change = first_order_change(model, before, old, batch, plan)
    valid = old.trace.valid

    exact = build(attn_implementation="eager", experts_implementation="eager").double()
    direction = {name: (p.detach() - before[name]).double() for name, p in model.named_parameters()}

    def probabilities(parameters):
        output = functional_call(
            exact,
            parameters,
            (),
            dict(
                input_ids=batch.input_ids_BT,
                attention_mask=batch.attention_mask_BT,
                position_ids=batch.position_ids_BT,
                use_cache=False,
                output_router_logits=True,
            ),
        )
        return torch.stack([logits.view(*valid.shape, 8).softmax(-1) for logits in output.router_logits], 2)

    at = {name: tensor.double() for name, tensor in before.items()}
    _, expected = jvp(probabilities, (at,), (direction,))
    error = (change[valid] - expected[valid]).abs().max() / expected[valid].abs().max()
    assert float(error) < 5e-3


def test_a_small_update_is_predicted_better_than_from_margins(build, batch_of):
    batch, plan = batch_of(B=16, N=24), split(16, 1, None)
    model = build()
    old = observe(model, batch, plan, 1.0)
    before = moved(model, 3e-3)
    change = first_order_change(model, before, old, batch, plan)
    new = observe(model, batch, plan, 1.0)
    table = measure_prediction(old, new, change, batch.attention_mask_BT)
    assert int(table.changed.sum()) > 20
    assert table.value("first_order/precision") > 0.75 and table.value("first_order/recall") > 0.75
    assert table.value("margin_only/precision") < 0.6
    assert table.predicted["margin_only"].sum(0).tolist() == table.predicted["first_order"].sum(0).tolist()


def test_the_model_is_left_as_it_was(build, batch):
    model = build("deepseek_v3")
    old = observe(model, batch, PLAN, 1.0)
    before = moved(model, 1e-2)
    after = snapshot(model)
    change = first_order_change(model, before, old, batch, PLAN)
    assert all(torch.equal(tensor, after[name]) for name, tensor in model.state_dict().items())
    # experts outside the chosen groups have no score, and no predicted change
    assert bool(change.isfinite().all()) and bool((change[old.scores_BTLE == -torch.inf] == 0).all())
    unmoved = first_order_change(model, after, old, batch, PLAN)
    assert float(unmoved.abs().max()) == 0
    with pytest.raises(RuntimeError), at_weights(model, before):
        raise RuntimeError
    assert all(torch.equal(tensor, after[name]) for name, tensor in model.state_dict().items())


def test_points_on_the_line(build):
    model = build()
    before = moved(model, 0.1)
    after = snapshot(model)
    middle = along(before, after, 0.5)
    name = "model.layers.0.mlp.gate.weight"
    torch.testing.assert_close(middle[name], (before[name] + after[name]) / 2)
    difference = sum(
        float((after[n] - before[n]).double().square().sum()) for n, _ in model.named_parameters()
    )
    norm = sum(float(before[n].double().square().sum()) for n, _ in model.named_parameters())
    assert relative_update(before, model) == pytest.approx((difference / norm) ** 0.5)
    with at_weights(model, before), record_routing(model) as recorder, torch.no_grad():
        model(torch.ones(1, 2, dtype=torch.long))
    assert recorder.trace().experts.shape == (1, 2, 3, 2)
