"""The weights version of every row: what keeps it, its file, and files without it."""

import zlib
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from moe_rl.routing import RoutingError, RoutingTrace


@pytest.fixture
def trace():
    experts = torch.rand(3, 4, 2, 8, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :2]
    valid = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    versions = torch.arange(12, dtype=torch.int32).view(3, 4).masked_fill(~valid, -1)
    return RoutingTrace(experts, valid, (1, 2), 8, row_versions=versions)


def test_slices_and_joins_keep_them(trace):
    assert trace[1:].row_versions.tolist() == [[4, 5, 6, 7], [8, 9, 10, -1]]
    assert trace[[2, 0]].row_versions[:, 1].tolist() == [9, 1]
    assert trace.columns(1, 3).row_versions.tolist() == [[1, 2], [5, 6], [9, 10]]
    assert trace.fit(5).row_versions[1].tolist() == [4, 5, 6, 7, -1]
    assert trace.fit(2).row_versions[1].tolist() == [4, 5]
    assert trace.gather(torch.tensor([[5, 2]])).row_versions.tolist() == [[5, 2]]
    assert torch.equal(RoutingTrace.cat([trace[:1], trace[1:]]).row_versions, trace.row_versions)
    columns = RoutingTrace.cat([trace.columns(0, 1), trace.columns(1)], dim=1)
    assert torch.equal(columns.row_versions, trace.row_versions)
    assert RoutingTrace.cat([trace, replace(trace, row_versions=None)]).row_versions is None
    assert torch.equal(trace.compact().to("cpu").row_versions, trace.row_versions)
    assert trace.nbytes - replace(trace, row_versions=None).nbytes == 4 * 12


def test_others_than_one_int32_a_row_are_refused(trace):
    for wrong in (trace.row_versions.long(), trace.row_versions[:, 1:]):
        with pytest.raises(RoutingError, match=r"row_versions must be an int32 tensor \[B, T\] = \[3, 4\]"):
            replace(trace, row_versions=wrong)


def test_a_file_keeps_and_guards_them(trace, tmp_path):
    trace.save(tmp_path / "trace")
    assert torch.equal(RoutingTrace.load(tmp_path / "trace").row_versions, trace.row_versions)
    assert RoutingTrace.open(tmp_path / "trace")[2].row_versions.tolist() == [[8, 9, 10, -1]]
    tensors = load_file(tmp_path / "trace")
    with safe_open(tmp_path / "trace", framework="np") as file:
        metadata = file.metadata()
    tensors["row_versions"][1, 2] += 1
    save_file(tensors, tmp_path / "altered", metadata=metadata)
    assert RoutingTrace.open(tmp_path / "altered")[0].row_versions[0, 1] == 1
    with pytest.raises(RoutingError, match="checksum of sequence 1"):
        RoutingTrace.load(tmp_path / "altered")


def test_a_trace_without_them_has_the_file_it_always_had(trace, tmp_path):
    replace(trace, row_versions=None, weights_version=3).save(tmp_path / "trace")
    tensors = load_file(tmp_path / "trace")
    assert set(tensors) == {"experts", "valid", "checksum"}
    with safe_open(tmp_path / "trace", framework="np") as file:
        header = file.metadata()["moe_rl.routing_trace"]
    # header, validity and experts of sequence 0 (3 rows x 2 layers x 2 ids of 3 bits), as before the field
    parts = header.encode() + tensors["valid"][0].tobytes() + tensors["experts"][:5].tobytes()
    assert tensors["checksum"][0] == zlib.crc32(parts)
    assert RoutingTrace.load(tmp_path / "trace").row_versions is None
