"""A hash of the tokens that a trace routes, so that it is not replayed on others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def hash_tokens(ids_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    """int64 [B] on the CPU: a hash of every sequence's token ids and their positions.

    Positions where `mask_BT` (bool or 0/1) is false do not count, so that padding on the right changes
    nothing and a shift does. A sum modulo 2^64 of (position, id) pairs mixed by SplitMix64 (Steele, Lea and
    Flood, OOPSLA 2014): it finds mistakes and is no defence against forgery.
    """
    ids = ids_BT.detach().cpu().numpy().astype(np.uint64)
    position = np.arange(ids.shape[1], dtype=np.uint64)
    mixed = (position << np.uint64(32)) + ids + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    if mask_BT is not None:
        mixed[~mask_BT.cpu().bool().numpy()] = 0
    return torch.from_numpy(mixed.sum(1, dtype=np.uint64).view(np.int64))
