"""A routed pass is the training forward's, bit for bit, and the same for an unchanged model."""

import pytest
import torch

from moe_rl.laboratory.change import measure_change
from moe_rl.laboratory.observe import RoutedPass, observe
from moe_rl.routing import RoutingError
from moe_rl.training.passes import native_routing, split
from moe_rl.training.policy import score


def test_fields(build, batch):
    model, plan = build(), split(4, 2, None)
    seen = observe(model, batch, plan, 1.0)
    B, T = batch.input_ids_BT.shape
    native = native_routing(model, batch, plan)
    assert torch.equal(seen.trace.experts, native.experts) and torch.equal(seen.trace.valid, native.valid)
    logp = torch.cat([score(model, batch[rows], 1.0).logp_BT for (rows,) in plan])
    assert torch.equal(seen.logp_BT, logp.detach())
    assert seen.weights_BTLK.shape == (B, T, 3, 2) and seen.scores_BTLE.shape == (B, T, 3, 8)
    valid = seen.trace.valid
    # qwen3_moe ranks the softmax itself, and its gate weights are that softmax normalised over the chosen
    torch.testing.assert_close(seen.router_logp_BTLE[valid], seen.scores_BTLE[valid].log())
    chosen = seen.scores_BTLE.gather(-1, seen.trace.experts.long())[valid]
    torch.testing.assert_close(seen.weights_BTLK[valid], chosen / chosen.sum(-1, keepdim=True))


def test_an_unchanged_model_has_changed_nothing(build, batch):
    model, plan = build("deepseek_v3"), split(4, 2, 1)
    first, second = (observe(model, batch, plan, 0.7) for _ in range(2))
    table = measure_change(first, second, batch.routing_rows_BT)
    values = {metric: table.value(metric) for metric in table.metrics}
    assert values == dict(experts=0, sets=0, tokens=0, top1=0, gate_mass=0, router_shift=1)
    assert torch.equal(first.logp_BT, second.logp_BT)


def test_slices_join_to_the_whole(build, batch):
    seen = observe(build("mixtral"), batch, split(4, 1, None), 1.0)
    joined = RoutedPass.cat([seen[0:1], seen[1:4]])
    assert torch.equal(joined.scores_BTLE, seen.scores_BTLE)
    assert torch.equal(joined.trace.experts, seen.trace.experts)


def test_a_family_without_scores_is_observed_without_them(build, batch):
    model, plan = build("phimoe"), split(4, 1, None)
    with pytest.raises(RoutingError, match="no selection scores"):
        observe(model, batch, plan, 1.0)
    seen = observe(model, batch, plan, 1.0, scores=False)
    assert seen.scores_BTLE is None and seen.weights_BTLK is None and seen.router_logp_BTLE is None
    assert measure_change(seen, seen, batch.routing_rows_BT).metrics == ("experts", "sets", "tokens")
