"""Which sequences an index selects, and the dtype that expert ids need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_rl.routing.errors import RoutingError

Rows = int | slice | Sequence[int] | Sequence[bool] | Tensor


def id_dtype(num_experts: int) -> torch.dtype:
    """The smallest dtype for expert ids below `num_experts` that torch fully supports (uint16 lacks ops)."""
    if num_experts <= 256:
        return torch.uint8
    return torch.int16 if num_experts <= 32_768 else torch.int32


def row_indices(rows: Rows, B: int) -> Tensor:
    """int64 [N]: the sequences of B that an index selects, from 0 on. Raises RoutingError for one outside."""
    if isinstance(rows, slice):
        return torch.arange(B)[rows]
    index = torch.as_tensor(rows).cpu().reshape(-1)
    index = index.nonzero().squeeze(1) if index.dtype == torch.bool else index.long()
    if index.numel() and not -B <= int(index.min()) <= int(index.max()) < B:
        raise RoutingError(f"sequences {index.tolist()} are not all in a trace of {B} sequences")
    return torch.where(index < 0, index + B, index)
