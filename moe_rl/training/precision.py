"""The precision in which a model computes, its weights staying in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

PRECISIONS = (None, "bfloat16")


def compute_in(precision: str | None, device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in `precision` (autocast); None changes nothing."""
    if precision is None:
        return nullcontext()
    # The cache of cast weights would outlive the updates that change them.
    return torch.autocast(device.type, dtype=getattr(torch, precision), cache_enabled=False)
