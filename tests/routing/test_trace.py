"""RoutingTrace: structure, content, slicing, and its file."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

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
        (dict(layer_ids=(0, 1)), "all 3 layers"),
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
    # with K = 1 the same may be true routing
    dataclasses.replace(trace, experts=torch.zeros(4, 6, 3, 1, dtype=torch.int64)).validate()


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_file_round_trip(tmp_path, num_experts, dtype):
    trace = make(E=num_experts)
    trace = trace.where(trace.valid)  # rows that are not valid are not stored
    path = tmp_path / "trace.safetensors"
    trace.save(path)
    loaded = RoutingTrace.load(path)
    assert loaded.experts.dtype == dtype
    assert torch.equal(loaded.experts.long(), trace.experts)
    assert torch.equal(loaded.valid, trace.valid)
    assert (loaded.layer_ids, loaded.num_experts) == (trace.layer_ids, trace.num_experts)
    assert loaded.nbytes == 4 * 6 * (3 * 2 * dtype.itemsize + 1)


def test_files_that_are_no_trace(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"experts": torch.zeros(1)}, path)
    with pytest.raises(RoutingError, match="not a routing trace"):
        RoutingTrace.load(path)
    path.write_bytes(b"not a safetensors file at all")
    with pytest.raises(RoutingError, match="not a routing trace"):
        RoutingTrace.load(path)
    save_file({}, path, metadata={"moe_rl.routing_trace": json.dumps({"version": 99})})
    with pytest.raises(RoutingError, match="format 99"):
        RoutingTrace.load(path)
    with pytest.raises(FileNotFoundError):
        RoutingTrace.load(tmp_path / "missing.safetensors")
    with pytest.raises(RoutingError, match="twice"):
        dataclasses.replace(make(), experts=torch.ones(4, 6, 3, 2, dtype=torch.int64)).save(path)
