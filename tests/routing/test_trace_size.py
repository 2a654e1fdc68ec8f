"""Computed sizes of traces are the measured ones, to the byte."""

import numpy as np
import pytest
import torch

from moe_rl.routing import RoutingTrace
from moe_rl.routing.trace_size import TraceSize


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize(
    ("layers", "num_experts", "top_k"), [(2, 8, 2), (3, 128, 8), (1, 16, 1), (2, 384, 8), (5, 100, 6)]
)
def test_computed_is_measured(tmp_path, layers, num_experts, top_k, hashed):
    lengths, T = [11, 0, 17, 5], 17
    rng = np.random.default_rng(0)
    experts = rng.random((4, T, layers, num_experts)).argsort(-1)[..., :top_k]
    valid = torch.arange(T) < torch.tensor(lengths)[:, None]
    trace = RoutingTrace(torch.from_numpy(experts.copy()), valid, tuple(range(layers)), num_experts).compact()
    if hashed:
        trace = trace.for_tokens(torch.zeros(4, T, dtype=torch.int64))
    extra = 8 * 4 * hashed
    size = TraceSize(layers, num_experts, top_k)
    assert size.bytes_per_token * 4 * T + extra == trace.nbytes
    for ordered in (True, False):
        path = tmp_path / "trace.safetensors"
        trace.save(path, ordered=ordered)
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert size.file_bytes(lengths, T, ordered) + extra == path.stat().st_size - header
        assert header < 1024


def test_bytes_per_token_are_the_limit_of_long_files():
    size = TraceSize(48, 128, 8)
    assert size.bytes_per_token == 385  # 48 x 8 ids of a byte, and validity
    assert size.file_bytes_per_token() == (48 * 8 * 7 + 1) / 8
    assert size.file_bytes_per_token(ordered=False) == (48 * 41 + 1) / 8  # C(128, 8) is below 2^41
    assert size.file_bytes([10_000], 10_000) == 48 * 7 * 10_000 + 1250 + 4
