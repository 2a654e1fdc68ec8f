"""The parts of the log-ratio: by hand, and where replay must remove all of it or nothing."""

import math

import pytest
import torch

from moe_rl.laboratory.change import measure_change
from moe_rl.laboratory.observe import RoutedPass, observe
from moe_rl.laboratory.ratio_variance import compare_ratios, ratio_variance
from moe_rl.routing import RoutingError, RoutingTrace, find_routers
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.passes import split

PLAN = split(4, 2, None)


def test_by_hand():
    """Two responses of two tokens after a prompt of one; the second one's last token is padding."""
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    attention = torch.tensor([[1, 1, 1], [1, 1, 0]])
    batch = RolloutBatch(attention, attention, mask, mask, torch.ones(2).bool(), 1)
    valid = attention.bool()
    # Rows 0 and 1 produce the tokens 1 and 2: row 1 of the first response changed, and its row 2, which
    # produces nothing.
    old = RoutingTrace(torch.zeros(2, 3, 1, 1).long(), valid, (0,), 2)
    new = RoutingTrace(torch.tensor([[0, 1, 1], [0, 0, 0]]).view(2, 3, 1, 1), valid, (0,), 2)
    zero = torch.zeros(2, 3)
    native = torch.tensor([[9.0, 0.5, 2.0], [9.0, -1.0, 9.0]])
    replayed = torch.tensor([[9.0, 0.5, 1.0], [9.0, -1.0, 9.0]])
    table = compare_ratios(RoutedPass(old, zero), RoutedPass(new, native), replayed, batch)
    expected = {
        "native": (0.25 + 4 + 1) / 3,
        "replayed": (0.25 + 1 + 1) / 3,
        "routing": 1 / 3,
        "native/changed": 4.0,
        "native/unchanged": 1.25 / 2,
        "native/mean": 0.5,
        "replayed/changed": 1.0,
        "replayed/unchanged": 1.25 / 2,
        "replayed/mean": 0.5 / 3,
        "tokens_changed": 1 / 3,
        "share_changed": 4 / 5.25,
        "share_removed": 3 / 5.25,
    }
    assert {metric: table.value(metric) for metric in table.metrics} == pytest.approx(expected)
    assert table.variance("native") == pytest.approx(1.75 - 0.25)
    assert table.tokens.tolist() == [2, 1] and table.changed_tokens.tolist() == [1, 0]
    interval = table.interval("share_changed")
    assert (interval.n, interval.low, interval.high) == (2, 0.0, pytest.approx(4 / 4.25))
    with pytest.raises(RoutingError, match="has no 'experts'"):
        table.value("experts")


def shift(model, name, size):
    with torch.no_grad():
        parameter = model.get_parameter(name)
        parameter += size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))


def test_an_update_that_changes_no_expert_is_replayed_bit_for_bit(build, batch):
    model = build()
    old = observe(model, batch, PLAN, 0.8)
    shift(model, "lm_head.weight", 0.01)
    new = observe(model, batch, PLAN, 0.8)
    table = ratio_variance(model, old, new, batch, PLAN, 0.8)
    assert table.value("native") > 0 and table.value("native") == table.value("replayed")
    assert table.value("routing") == table.value("tokens_changed") == table.value("share_removed") == 0
    assert math.isnan(table.value("native/changed"))


def test_a_router_turned_round_is_undone_by_replay(build, batch):
    """Permuted experts in one router: gate weights of the old experts aside, replay gives the old policy."""
    model = build(norm_topk_prob=True, num_experts_per_tok=1)  # the one gate weight is 1
    old = observe(model, batch, PLAN, 1.0)
    with torch.no_grad():
        weight = find_routers(model)[1].module.weight
        weight.copy_(weight.roll(1, dims=0))
    new = observe(model, batch, PLAN, 1.0)
    prompts = torch.tensor([0, 0, 1, 1])
    table = ratio_variance(model, old, new, batch, PLAN, 1.0, prompts)
    assert table.value("native") > 1e-4 and table.value("replayed") == 0
    assert table.value("share_removed") == 1 and table.value("routing") == table.value("native")
    drift = measure_change(old, new, batch.routing_rows_BT)
    assert table.value("tokens_changed") == drift.value("tokens") > 0.9
    assert table.interval("native").unit == "prompts"
