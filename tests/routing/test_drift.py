"""Expert change and load, against values worked by hand."""

import dataclasses

import pytest
import torch

from moe_rl.routing import ExpertChange, RoutingError, RoutingTrace, expert_change, expert_load, max_violation


def trace(experts, valid=None, layer_ids=(1, 3), num_experts=8) -> RoutingTrace:
    experts = torch.tensor(experts)
    valid = torch.ones(experts.shape[:2], dtype=torch.bool) if valid is None else torch.tensor(valid)
    return RoutingTrace(experts, valid, layer_ids, num_experts)


# [B, T, L, K] = [1, 3, 2, 2]
OLD = trace([[[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 2], [1, 3]]]])
# token 0: one of two experts changed in layer 3; token 1: order only; token 2: both layers, 1 and 2 experts
NEW = trace([[[[0, 1], [2, 4]], [[5, 4], [7, 6]], [[0, 3], [5, 6]]]])


def test_hand_worked():
    change = expert_change(OLD, NEW)
    assert change.experts == pytest.approx((0 + 0.5 + 0 + 0 + 0.5 + 1) / 6)
    assert change.sets == pytest.approx(3 / 6)
    assert change.tokens == pytest.approx(2 / 3)
    assert change.by_layer.tolist() == pytest.approx([0.5 / 3, 1.5 / 3])
    assert change.by_layer.dtype == torch.float64
    assert change.sets_by_layer.tolist() == pytest.approx([1 / 3, 2 / 3])
    assert change.num_tokens == 3


def test_one_of_two_experts_in_one_of_two_layers():
    change = expert_change(trace([[[[0, 1], [2, 3]]]]), trace([[[[0, 1], [3, 5]]]]))
    assert (change.experts, change.sets, change.tokens) == (0.25, 0.5, 1.0)


def test_no_change_and_symmetry():
    assert expert_change(OLD, OLD).experts == 0.0
    assert expert_change(OLD, OLD).tokens == 0.0
    swapped = dataclasses.replace(OLD, experts=OLD.experts.flip(-1))
    assert expert_change(OLD, swapped).sets == 0.0
    assert expert_change(OLD, NEW).experts == expert_change(NEW, OLD).experts


def test_tokens_valid_in_both_only():
    old = OLD.where(torch.tensor([[True, True, False]]))
    new = NEW.where(torch.tensor([[True, False, True]]))
    change = expert_change(old, new)
    assert (change.num_tokens, change.experts, change.sets, change.tokens) == (1, 0.25, 0.5, 1.0)
    with pytest.raises(RoutingError, match="no token is valid in both"):
        expert_change(old, OLD.where(torch.tensor([[False, False, True]])))


def test_combine_is_the_change_over_all_tokens():
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.rand(5, 7, 2, 8, generator=generator).argsort(-1)[..., :2]  # noqa: E731
    valid = torch.rand(5, 7, generator=generator) > 0.3
    old, new = RoutingTrace(draw(), valid, (1, 3), 8), RoutingTrace(draw(), valid, (1, 3), 8)
    whole = expert_change(old, new)
    parts = ExpertChange.combine([expert_change(old[rows], new[rows]) for rows in ([0], [1, 2, 3], [4])])
    for name in ("experts", "sets", "tokens", "num_tokens"):
        assert getattr(parts, name) == getattr(whole, name)
    assert torch.equal(parts.by_layer, whole.by_layer)
    # two random sets of 2 of 8 share 2 * 2 / 8 experts on average
    assert whole.experts == pytest.approx(0.75, abs=0.1)
    other = expert_change(trace([[[[0]]]], layer_ids=(0,)), trace([[[[0]]]], layer_ids=(0,)))
    with pytest.raises(RoutingError, match="cannot be combined"):
        ExpertChange.combine([whole, other])


def test_chunks_do_not_change_the_counts(monkeypatch):
    whole = expert_change(OLD, NEW)
    load = expert_load(NEW)
    monkeypatch.setattr("moe_rl.routing.drift._IDS_PER_CHUNK", 8)  # two tokens
    assert expert_change(OLD, NEW).experts == whole.experts
    assert expert_change(OLD, NEW).changed_tokens == whole.changed_tokens
    assert torch.equal(expert_load(NEW), load)


@pytest.mark.parametrize("num_experts", [12, 300])
def test_counts_are_those_of_sets(num_experts, monkeypatch):
    monkeypatch.setattr("moe_rl.routing.drift._IDS_PER_CHUNK", 50)
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.rand(3, 9, 2, num_experts, generator=generator).argsort(-1)[..., :5]  # noqa: E731
    valid = torch.rand(3, 9, generator=generator) > 0.3
    old, new = (
        RoutingTrace(draw(), valid, (1, 3), num_experts),
        RoutingTrace(draw(), valid, (1, 3), num_experts),
    )
    lost_NL = [
        [len(set(a) - set(b)) for a, b in zip(*layers, strict=True)]
        for layers in zip(old.experts[valid].tolist(), new.experts[valid].tolist(), strict=True)
    ]
    change = expert_change(old, new)
    assert change.changed_experts.tolist() == [sum(lost_L[layer] for lost_L in lost_NL) for layer in (0, 1)]
    assert change.changed_sets.tolist() == [sum(lost_L[layer] > 0 for lost_L in lost_NL) for layer in (0, 1)]
    assert change.changed_tokens == sum(any(lost_L) for lost_L in lost_NL)
    ids = old.experts[valid]
    assert expert_load(old).tolist() == [
        ids[:, n].flatten().bincount(minlength=num_experts).tolist() for n in (0, 1)
    ]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (trace([[[[0, 1], [2, 3]]]]), r"\[B, T\] = \[1, 3\] and \[1, 1\]"),
        (dataclasses.replace(OLD, layer_ids=(1, 2)), "layer_ids is"),
        (dataclasses.replace(OLD, num_experts=16), "num_experts is 8 in one, 16"),
        (dataclasses.replace(OLD, experts=OLD.experts[..., :1]), "top_k is 2 in one, 1"),
    ],
)
def test_traces_that_cannot_be_compared(other, reason):
    with pytest.raises(RoutingError, match=reason):
        expert_change(OLD, other)


def test_dtypes_may_differ():
    compact = dataclasses.replace(NEW, experts=NEW.experts.to(torch.uint8))
    assert expert_change(OLD, compact).experts == expert_change(OLD, NEW).experts


def test_expert_load_and_max_violation():
    load = expert_load(NEW.where(torch.tensor([[True, True, False]])))
    assert load.tolist() == [[1, 1, 0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 1, 0, 1, 1]]
    assert load.dtype == torch.int64
    assert max_violation(torch.tensor([[5, 5], [2, 2]])) == 0.0
    # layer 0: max 3 of mean 2; layer 1: max 4 of mean 2
    assert max_violation(torch.tensor([[3, 1], [4, 0]])) == pytest.approx((0.5 + 1.0) / 2)
