"""Every metric of change on traces, weights and scores worked by hand, and what tables reduce to."""

import math

import pytest
import torch

from moe_rl.laboratory.change import DriftTable, measure_change
from moe_rl.laboratory.observe import RoutedPass
from moe_rl.routing import RoutingError, RoutingTrace, expert_change

# One response of three rows, two layers, 4 experts, K = 2; row 0 is the prompt's.
OLD = [[[0, 1], [0, 1]], [[0, 1], [2, 3]], [[2, 0], [1, 3]]]
NEW = [[[2, 3], [2, 3]], [[1, 0], [0, 1]], [[2, 1], [1, 3]]]
ROWS = torch.tensor([[False, True, True]])


def trace(experts, E=4) -> RoutingTrace:
    experts_BTLK = torch.tensor([experts])
    return RoutingTrace(
        experts_BTLK,
        torch.ones(experts_BTLK.shape[:2], dtype=torch.bool),
        tuple(range(experts_BTLK.shape[2])),
        E,
    )


def passes():
    """Weights and router log-probs beside the traces: row 1 keeps layer 0's set but swaps its weights."""
    old_weights = [[[0.5, 0.5]] * 2, [[0.7, 0.3], [0.6, 0.4]], [[0.8, 0.2], [0.5, 1.5]]]
    new_weights = [[[0.5, 0.5]] * 2, [[0.6, 0.4], [0.9, 0.1]], [[0.8, 0.2], [0.25, 0.75]]]
    old_logp = torch.zeros(1, 3, 2, 4)
    new_logp = torch.zeros(1, 3, 2, 4)
    new_logp[0, 1, 0] = torch.tensor([0.1, -0.3, 9, 9])  # old experts 0, 1: mean |Δ| = 0.2
    new_logp[0, 1, 1] = torch.tensor([9, 9, 0.0, 0.8])  # old experts 2, 3: 0.4
    return (
        RoutedPass(trace(OLD), torch.zeros(1, 3), torch.tensor([old_weights]), None, old_logp),
        RoutedPass(trace(NEW), torch.zeros(1, 3), torch.tensor([new_weights]), None, new_logp),
    )


def test_metrics_by_hand():
    table = measure_change(*passes(), ROWS)
    assert table.metrics == ("experts", "sets", "tokens", "top1", "gate_mass", "router_shift")
    # layer 0: row 1 no change, row 2 one of two experts; layer 1: row 1 both, row 2 none
    assert table.by_layer("experts").tolist() == [0.25, 0.5]
    assert table.by_position("experts").tolist() == [0.5, 0.25]
    assert table.value("experts") == 3 / 8
    assert (table.value("sets"), table.by_layer("sets").tolist()) == (0.5, [0.5, 0.5])
    assert (table.value("tokens"), table.by_layer("tokens").tolist()) == (1.0, [0.5, 0.5])
    # top-1: row 1 layer 0 from expert 0 to 1; layer 1 from 2 to 0; row 2: 2 stays, 3 stays
    assert (table.value("top1"), table.by_layer("top1").tolist()) == (0.5, [0.5, 0.5])
    # row 1 layer 0: ½(|.7-.4| + |.3-.6|) = .3; layer 1 all; row 2: ½(.2 + .2) = .2, and (.25, .75) twice: 0
    torch.testing.assert_close(table.by_layer("gate_mass"), torch.tensor([0.25, 0.5]).double())
    assert table.value("gate_mass") == pytest.approx(0.375)
    # row 1: γ = exp(-(.2 + .4) / 2), row 2: 1
    assert table.value("router_shift") == pytest.approx((math.exp(-0.3) + 1) / 2)
    expected = [(math.exp(-0.2) + 1) / 2, (math.exp(-0.4) + 1) / 2]
    assert table.by_layer("router_shift").tolist() == pytest.approx(expected)


def test_prompt_rows_are_another_table():
    table = measure_change(*passes(), ~ROWS)
    assert table.value("experts") == 1.0 and table.rows_BP.tolist() == [[1.0]]


def test_a_metric_whose_inputs_are_missing_is_absent():
    old, new = passes()
    table = measure_change(old.trace, new, ROWS)
    assert table.metrics == ("experts", "sets", "tokens")
    with pytest.raises(RoutingError, match="has no 'top1': it has experts, sets, tokens"):
        table.value("top1")


def random_trace(seed, B=6, T=9, L=3, E=16, K=4) -> RoutingTrace:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(B, T, L, E, generator=generator).argsort(-1)[..., :K]
    valid = torch.rand(B, T, generator=generator) > 0.2
    return RoutingTrace(experts, valid, tuple(range(L)), E)


def test_agrees_with_expert_change_and_with_its_own_parts():
    old, new = random_trace(0), random_trace(1)
    rows = torch.ones(6, 9, dtype=torch.bool)
    rows[:, :3] = False
    table, whole = measure_change(old, new, rows), expert_change(old.where(rows), new.where(rows))
    assert table.value("experts") == whole.experts
    assert table.value("sets") == whole.sets and table.value("tokens") == whole.tokens
    assert torch.equal(table.by_layer("experts"), whole.by_layer)
    assert torch.equal(table.by_layer("sets"), whole.sets_by_layer)
    parts = [measure_change(old[rows_B], new[rows_B], rows[rows_B]) for rows_B in (slice(0, 2), slice(2, 6))]
    joined = DriftTable.cat(parts)
    for metric in table.metrics:
        assert torch.equal(joined.whole(metric).sums_BC, table.whole(metric).sums_BC)
        assert joined.interval(metric) == table.interval(metric)


def test_positions_count_from_the_first_row_asked_for():
    old, new = random_trace(0, B=2, T=5, K=1), random_trace(0, B=2, T=5, K=1)
    new.experts[0, 2] = (new.experts[0, 2] + 1) % 16  # changed in every layer
    valid = torch.ones(2, 5, dtype=torch.bool)
    old, new = (RoutingTrace(t.experts, valid, t.layer_ids, 16) for t in (old, new))
    rows = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 0, 1, 1]])
    table = measure_change(old, new, rows)
    assert table.by_position("experts").tolist() == [0.0, 0.5, 0.0]  # both, both, the first response alone
    assert table.rows_BP.tolist() == [[1, 1, 1], [1, 1, 0]]


def one_row_each(changed):
    """Two traces with one row a response, and the rows: the expert changed where it says 1."""
    old = torch.zeros(len(changed), 1, 1, 1, dtype=torch.long)
    valid = torch.ones(len(changed), 1, dtype=torch.bool)
    new = torch.tensor(changed).view(-1, 1, 1, 1)
    return RoutingTrace(old, valid, (0,), 2), RoutingTrace(new, valid, (0,), 2), valid


def test_bootstrap_of_a_share_is_near_its_normal_interval():
    old, new, rows = one_row_each([1] * 100 + [0] * 300)
    found = measure_change(old, new, rows).interval("experts", resamples=4000)
    half = 1.96 * math.sqrt(0.25 * 0.75 / 400)
    assert (found.value, found.n, found.unit, found.level) == (0.25, 400, "responses", 0.95)
    assert found.low == pytest.approx(0.25 - half, abs=0.005)
    assert found.high == pytest.approx(0.25 + half, abs=0.005)


def test_cluster_bootstrap_is_wider_where_a_prompt_changes_as_one():
    changed = ([1] * 8 + [0] * 24) * 10
    old, new, rows = one_row_each(changed)
    prompts = torch.arange(len(changed)) // 8
    alone = measure_change(old, new, rows).interval("experts")
    clustered = measure_change(old, new, rows, prompts).interval("experts")
    assert (clustered.n, clustered.unit, clustered.value) == (40, "prompts", 0.25)
    # 8 responses that agree fully carry the information of one: √8 times as wide
    assert (clustered.high - clustered.low) / (alone.high - alone.low) == pytest.approx(8**0.5, rel=0.1)


def test_one_response_has_a_value_and_no_interval():
    old, new, rows = one_row_each([1])
    found = measure_change(old, new, rows).interval("experts")
    assert (found.value, found.n) == (1.0, 1) and math.isnan(found.low) and math.isnan(found.high)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda old, new, rows: (old, random_trace(1, E=8), rows), "num_experts"),
        (lambda old, new, rows: (old, new, rows[:, :4]), r"\[6, 9\], \[6, 9\] and \[6, 4\]"),
        (lambda old, new, rows: (old, new, torch.zeros_like(rows)), "nothing to compare"),
        (lambda old, new, rows: (old, new, rows, torch.zeros(5)), "one prompt id for each of 6"),
    ],
)
def test_what_cannot_be_compared(change, message):
    arguments = (random_trace(0), random_trace(1), torch.ones(6, 9))
    with pytest.raises(RoutingError, match=message):
        measure_change(*change(*arguments))
