"""Margins by hand, and drift by margin on tokens whose margins are known."""

import pytest
import torch

from moe_rl.laboratory.change import measure_change
from moe_rl.laboratory.margins import drift_by_margin, router_margins
from moe_rl.laboratory.observe import RoutedPass
from moe_rl.routing import RoutingError, RoutingTrace


def test_margin_by_hand():
    scores = torch.tensor([[0.5, 0.1, 0.25, 0.15], [0.25, -torch.inf, 0.75, -torch.inf]])
    assert router_margins(scores, 2).tolist() == pytest.approx([0.1, torch.inf])
    assert router_margins(scores, 1).tolist() == pytest.approx([0.25, 0.5])
    with pytest.raises(RoutingError, match="no margin"):
        router_margins(scores, 4)


def passes(margins_BTL, changed_BTL) -> tuple[RoutedPass, RoutingTrace]:
    """K = 1 of 3 experts: expert 0 leads expert 1 by the margin, and loses to it where changed."""
    margins, changed = torch.tensor(margins_BTL), torch.tensor(changed_BTL)
    scores = torch.stack([0.5 + margins, torch.full_like(margins, 0.5), torch.zeros_like(margins)], -1)
    valid = torch.ones(margins.shape[:2], dtype=torch.bool)
    layer_ids = tuple(range(margins.shape[2]))
    old = RoutingTrace(torch.zeros_like(changed)[..., None], valid, layer_ids, 3)
    return RoutedPass(old, torch.zeros(valid.shape), None, scores), RoutingTrace(
        changed[..., None], valid, layer_ids, 3
    )


def test_drift_by_quantile_of_the_margin():
    # Layer 1 has 100 times the margins of layer 0: quantiles are within a layer.
    margins = [[[0.1, 40.0], [0.4, 10.0]], [[0.2, 20.0], [0.3, 30.0]]]
    changed = [[[1, 0], [0, 1]], [[1, 0], [0, 0]]]
    old, new = passes(margins, changed)
    table = drift_by_margin(old, new, torch.ones(2, 2), quantiles=2, groups_B=torch.tensor([4, 7]))
    # lower halves: (0, 0) and (1, 0) of layer 0, (0, 1) and (1, 0) of layer 1: three of four changed
    assert table.experts.values.tolist() == table.sets.values.tolist() == [0.75, 0.0]
    assert table.experts.sums_BC.tolist() == [[2, 0], [1, 0]]
    assert table.experts.counts_BC.tolist() == [[2, 2], [2, 2]]
    torch.testing.assert_close(
        table.margins_LQ, torch.tensor([[0.1, 0.3], [10.0, 30.0]]).double(), atol=1e-5, rtol=0
    )
    assert table.sets.intervals()[0].unit == "prompts"


def test_quantiles_add_up_to_the_drift():
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(5, 7, 3, 8, generator=generator)
    valid = torch.rand(5, 7, generator=generator) > 0.2
    old_ids, new_ids = (s.topk(2, dim=-1).indices for s in (scores, scores + 0.3 * torch.rand(scores.shape)))
    old = RoutedPass(RoutingTrace(old_ids, valid, (0, 1, 2), 8), torch.zeros(5, 7), None, scores)
    new = RoutingTrace(new_ids, valid, (0, 1, 2), 8)
    rows = torch.ones(5, 7)
    table, drift = drift_by_margin(old, new, rows, quantiles=4), measure_change(old, new, rows)
    for by_margin, metric in ((table.experts, "experts"), (table.sets, "sets")):
        assert by_margin.sums.sum() == drift.whole(metric).sums
        assert by_margin.counts.sum() == drift.whole(metric).counts
    assert bool((table.margins_LQ.diff(dim=1) > 0).all())


def test_what_has_no_margins():
    old, new = passes([[[0.1]]], [[[1]]])
    with pytest.raises(RoutingError, match="1 rows cannot be split into 10"):
        drift_by_margin(old, new, torch.ones(1, 1))
    with pytest.raises(RoutingError, match="no selection scores"):
        drift_by_margin(RoutedPass(old.trace, old.logp_BT), new, torch.ones(1, 1))
