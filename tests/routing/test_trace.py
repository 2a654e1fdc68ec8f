"""RoutingTrace: structure, content, slicing, header fields."""

import dataclasses

import pytest
import torch

from moe_rl.routing import RoutingError, RoutingTrace


def make(B=4, T=6, L=3, K=2, E=8, dtype=torch.int64, seed=0) -> RoutingTrace:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(B, T, L, E, generator=generator).argsort(-1)[..., :K].to(dtype)
    valid = torch.ones(B, T, dtype=torch.bool)
    valid[0, :2] = False
    return RoutingTrace(experts, valid, tuple(range(1, L + 1)), E)


def test_slicing():
    trace = make()
    assert trace[1].experts.shape == (1, 6, 3, 2)
    assert torch.equal(trace[-1].experts, trace.experts[3:])
    assert torch.equal(trace[1:3].valid, trace.valid[1:3])
    assert torch.equal(trace[[2, 0]].experts, trace.experts[[2, 0]])
    assert torch.equal(trace[torch.tensor([3, 3])].experts[0], trace.experts[3])
    mask = torch.tensor([True, False, False, True])
    assert torch.equal(trace[mask].experts, trace.experts[mask])
    assert torch.equal(trace[torch.tensor(2)].experts, trace.experts[2:3])
    assert torch.equal(trace[range(1, 3)].experts, trace.experts[1:3])
    assert trace[[]].valid.shape == (0, 6)
    assert trace[1].layer_ids == trace.layer_ids
    with pytest.raises(RoutingError, match=r"sequences \[4\]"):
        trace[4]


def test_where_fit_and_cat():
    trace = make()
    mask = torch.zeros(4, 6, dtype=torch.int64)
    mask[:, 1:4] = 1
    masked = trace.where(mask)
    assert masked.valid.sum() == 3 * 3 + 2
    assert torch.equal(masked.experts[masked.valid], trace.experts[masked.valid])
    assert (masked.experts[~masked.valid] == 0).all()
    longer = trace.fit(8)
    assert longer.valid.shape == (4, 8) and not longer.valid[:, 6:].any()
    assert torch.equal(longer.fit(6).experts, trace.experts)
    assert torch.equal(RoutingTrace.cat([trace[:1], trace[1:]]).experts, trace.experts)
    with pytest.raises(RoutingError, match="T = 6 and 8"):
        RoutingTrace.cat([trace, longer])
    with pytest.raises(RoutingError, match="num_experts is 8 in one, 9"):
        RoutingTrace.cat([trace, dataclasses.replace(trace, num_experts=9)])
    with pytest.raises(RoutingError, match=r"\[4, 6\], got \[4, 5\]"):
        trace.where(mask[:, :5])


def test_replace_is_checked_again_and_slices_are_not():
    trace = make().validate()
    assert trace[1:]._validated and trace.where(trace.valid)._validated
    assert not dataclasses.replace(trace, experts=trace.experts + 1)._validated
    with pytest.raises(RoutingError, match=r"\[0, 8\)"):
        dataclasses.replace(trace, experts=trace.experts + 1).validate()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(experts=torch.zeros(4, 6, 3)), "integer tensor"),
        (dict(experts=torch.zeros(4, 6, 3, 2)), "integer tensor"),
        (dict(valid=torch.ones(4, 6)), "bool tensor"),
        (dict(valid=torch.ones(4, 5, dtype=torch.bool)), r"\[4, 6\], got torch.bool \[4, 5\]"),
        (dict(layer_ids=(0, 1)), "the 3 layers"),
        (dict(layer_ids=(), experts=torch.zeros(4, 6, 0, 2, dtype=torch.int64)), "at least one layer"),
        (dict(num_experts=1), "K = 2"),
    ],
)
def test_structure(changes, reason):
    with pytest.raises(RoutingError, match=reason):
        dataclasses.replace(make(), **changes)


def test_content_of_valid_rows():
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64):
        make(dtype=dtype).validate()
    trace = make()
    for value, reason in ((8, "holds 0 to 8"), (-1, "holds -1 to 6")):
        experts = trace.experts.clone()
        experts[2, 3, 1, 0] = value
        with pytest.raises(RoutingError, match=f"layer 2 {reason}"):
            dataclasses.replace(trace, experts=experts).validate()
        experts = trace.experts.clone()
        experts[0, 0, 1, 0] = value  # a row that is not valid
        dataclasses.replace(trace, experts=experts).validate()
    experts = trace.experts.clone()
    experts[2, 3, 1] = 4
    with pytest.raises(RoutingError, match="same expert twice in layer 2"):
        dataclasses.replace(trace, experts=experts).validate()
    experts = trace.experts.clone()
    experts[:, :, 2] = 0
    with pytest.raises(RoutingError, match="layer 3 holds expert 0"):
        dataclasses.replace(trace, experts=experts).validate()
    trace.where(torch.zeros_like(trace.valid)).validate()
    trace[[]].validate()
    # with K = 1 the same may be true routing
    dataclasses.replace(trace, experts=torch.zeros(4, 6, 3, 1, dtype=torch.int64)).validate()


def test_the_smallest_dtype_that_torch_supports():
    for num_experts, dtype in ((256, torch.uint8), (257, torch.int16), (32_769, torch.int32)):
        trace = dataclasses.replace(make(), num_experts=num_experts)
        compact = trace.compact()
        assert compact.experts.dtype == dtype
        assert torch.equal(compact.experts.long(), trace.experts)
        assert compact.nbytes == 4 * 6 * (3 * 2 * dtype.itemsize + 1)
    with pytest.raises(RoutingError, match="holds 0 to 300"):  # which uint8 would wrap to an id in range
        dataclasses.replace(
            trace, experts=trace.experts.where(trace.experts != 7, 300), num_experts=8
        ).compact()


def test_header_fields_follow_their_sequences():
    ids = torch.arange(24).view(4, 6)
    trace = dataclasses.replace(make(), source="engine", weights_version=3).for_tokens(ids)
    for rows in ([2, 0], slice(1, 3), torch.tensor([True, False, False, True]), -1):
        part = trace[rows]
        assert (part.source, part.weights_version) == ("engine", 3)
        part.require_tokens(ids[rows].view(-1, 6))
    assert torch.equal(RoutingTrace.cat([trace[2:], trace[:2]]).token_hash, trace.token_hash[[2, 3, 0, 1]])
    assert torch.equal(trace.where(torch.zeros(4, 6)).fit(9).token_hash, trace.token_hash)
    assert trace.fit(5).token_hash is None  # the hash is of 6 tokens
    plain = make()
    mixed = RoutingTrace.cat([trace, plain])
    assert (mixed.source, mixed.weights_version, mixed.token_hash) == (None, None, None)
    newer = dataclasses.replace(trace, weights_version=4)
    assert RoutingTrace.cat([trace, newer]).source == "engine"
    assert RoutingTrace.cat([trace, newer]).weights_version is None
    with pytest.raises(RoutingError, match=r"int64 tensor \[B\] = \[4\]"):
        dataclasses.replace(plain, token_hash=trace.token_hash[:3])


def test_other_tokens_are_told():
    ids = torch.arange(24).view(4, 6)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1, :2] = False
    trace = make().for_tokens(ids, mask)
    trace.require_tokens(ids, mask)
    trace.fit(8).require_tokens(torch.nn.functional.pad(ids, (0, 2)), torch.nn.functional.pad(mask, (0, 2)))
    with pytest.raises(RoutingError, match=r"sequences \[1\]"):
        trace.require_tokens(ids)
    with pytest.raises(RoutingError, match=r"sequences \[0, 3\]"):
        trace.require_tokens(ids[[3, 1, 2, 0]], mask)
    with pytest.raises(RoutingError, match=r"ids must be \[B, T\] = \[4, 6\], got \[4, 5\]"):
        trace.require_tokens(ids[:, :5])
    make().require_tokens(ids[:, :5])  # no hash, no check


def test_rows_are_joined_along_tokens():
    trace = make()
    parts = [trace.fit(2), dataclasses.replace(trace, experts=trace.experts[:, 2:], valid=trace.valid[:, 2:])]
    joined = RoutingTrace.cat(parts, dim=1)
    assert torch.equal(joined.experts, trace.experts) and torch.equal(joined.valid, trace.valid)
    assert RoutingTrace.cat([trace.for_tokens(torch.zeros(4, 6))] * 2, dim=1).token_hash is None
    with pytest.raises(RoutingError, match="B = 4 and 3 cannot be joined along T"):
        RoutingTrace.cat([trace, trace[:3]], dim=1)


def test_what_was_changed_in_place_is_checked_again():
    experts = torch.tensor([[[[0, 1]], [[5, 5]]]])  # the second row is not valid and may hold anything
    trace = RoutingTrace(experts, torch.tensor([[True, False]]), (0,), 4).validate()
    part = trace[:]
    trace.experts[0, 0] = torch.tensor([3, 3])
    for changed in (trace, part, trace[:]):
        with pytest.raises(RoutingError, match="same expert twice in layer 0"):
            changed.validate()
    trace.experts[0, 0] = torch.tensor([3, 0])
    trace.validate().valid.fill_(True)
    with pytest.raises(RoutingError, match="layer 0 holds 0 to 5"):
        trace.validate()
