"""How much routing differs between two traces, and how evenly a trace loads the experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_rl.routing.trace import RoutingError, RoutingTrace, id_dtype

_IDS_PER_CHUNK = 1 << 18  # bounds memory, and keeps a chunk in the cache


@dataclass(frozen=True, eq=False)
class ExpertChange:
    """Expert change between two traces, as counts, so that several of them combine exactly.

    changed_experts  int64 [L]: sum over tokens of K - |A ∩ B|
    changed_sets     int64 [L]: tokens whose expert set differs at all
    changed_tokens   tokens with a change in at least one layer
    num_tokens       tokens that were compared: those valid in both traces
    """

    layer_ids: tuple[int, ...]
    top_k: int
    changed_experts: Tensor
    changed_sets: Tensor
    changed_tokens: int
    num_tokens: int

    @property
    def by_layer(self) -> Tensor:
        """float64 [L]: mean over tokens of 1 - |A ∩ B| / K."""
        return self.changed_experts.double() / (self.top_k * self.num_tokens)

    @property
    def sets_by_layer(self) -> Tensor:
        """float64 [L]: share of tokens whose expert set changed at all."""
        return self.changed_sets.double() / self.num_tokens

    @property
    def experts(self) -> float:
        """Mean over tokens and layers of 1 - |A ∩ B| / K: "roughly 10%" in arXiv 2507.18071, 5.3."""
        return int(self.changed_experts.sum()) / (self.top_k * self.num_tokens * len(self.layer_ids))

    @property
    def sets(self) -> float:
        """Share of (token, layer) whose expert set changed at all."""
        return int(self.changed_sets.sum()) / (self.num_tokens * len(self.layer_ids))

    @property
    def tokens(self) -> float:
        """Share of tokens with a change in at least one layer."""
        return self.changed_tokens / self.num_tokens

    @staticmethod
    def combine(changes: Sequence[ExpertChange]) -> ExpertChange:
        """The change over the tokens of all `changes`, which must be of one model."""
        if not changes:
            raise RoutingError("combine needs at least one ExpertChange")
        if len({(change.layer_ids, change.top_k) for change in changes}) > 1:
            raise RoutingError("expert changes of different layers or K cannot be combined")
        return ExpertChange(
            changes[0].layer_ids,
            changes[0].top_k,
            torch.stack([change.changed_experts for change in changes]).sum(0),
            torch.stack([change.changed_sets for change in changes]).sum(0),
            sum(change.changed_tokens for change in changes),
            sum(change.num_tokens for change in changes),
        )


def expert_change(old: RoutingTrace, new: RoutingTrace) -> ExpertChange:
    """The share of experts that differ between two traces of the same tokens, over tokens valid in both.

    Experts are compared as sets: their order within K does not count. The measure is symmetric. Raises
    RoutingError when [B, T], layers, E or K differ, or when no token is valid in both.
    """
    old.require_same_model(new)
    if old.valid.shape != new.valid.shape:
        raise RoutingError(
            "the traces must route the same tokens, got [B, T] = "
            f"{list(old.valid.shape)} and {list(new.valid.shape)}"
        )
    both = old.valid.cpu() & new.valid.cpu()
    if not bool(both.any()):
        raise RoutingError("no token is valid in both traces, so there is nothing to compare")
    L, K = len(old.layer_ids), old.top_k
    changed_experts, changed_sets = np.zeros(L, np.int64), np.zeros(L, np.int64)
    changed_tokens = 0
    dtype = id_dtype(old.num_experts)
    for rows in _chunks(old):
        overlap_NL = _overlap(_rows(old, rows, dtype), _rows(new, rows, dtype))
        changed_NL = (K - overlap_NL)[both.flatten()[rows].numpy()]
        changed_experts += changed_NL.sum(0, dtype=np.int64)
        changed_sets += (changed_NL > 0).sum(0)
        changed_tokens += int((changed_NL > 0).any(1).sum())
    return ExpertChange(
        old.layer_ids,
        K,
        torch.from_numpy(changed_experts),
        torch.from_numpy(changed_sets),
        changed_tokens,
        int(both.sum()),
    )


def expert_load(trace: RoutingTrace) -> Tensor:
    """int64 [L, E]: how many expert slots of valid rows each expert got, on the CPU."""
    L, E = len(trace.layer_ids), trace.num_experts
    first_of_layer_L1 = (torch.arange(L) * E)[:, None]
    load = torch.zeros(L * E, dtype=torch.int64)
    for rows in _chunks(trace):
        valid_N = trace.valid.flatten()[rows].cpu()
        places_NLK = _rows(trace, rows, torch.int64)[valid_N] + first_of_layer_L1
        load += torch.bincount(places_NLK.flatten(), minlength=L * E)
    return load.view(L, E)


def max_violation(load_LE: Tensor) -> float:
    """Load imbalance: mean over layers of max_e load_e / mean_e load_e - 1; 0 is perfectly even.

    MaxVio of "Auxiliary-Loss-Free Load Balancing" (arXiv 2408.15664), on the counts of `expert_load`.
    """
    load_LE = load_LE.double()
    return float((load_LE.amax(1) * load_LE.shape[1] / load_LE.sum(1) - 1).mean())


def _chunks(trace: RoutingTrace) -> list[slice]:
    """Ranges of the rows [B·T], valid or not: picking rows before comparing them costs more than it saves."""
    step = max(1, _IDS_PER_CHUNK // (len(trace.layer_ids) * trace.top_k))
    return [slice(start, start + step) for start in range(0, trace.valid.numel(), step)]


def _rows(trace: RoutingTrace, rows: slice, dtype: torch.dtype) -> Tensor:
    """ids [N, L, K]: some rows of [B·T], on the CPU."""
    return trace.experts.flatten(0, 1)[rows].to("cpu", dtype)


def _overlap(a_NLK: Tensor, b_NLK: Tensor) -> NDArray[Any]:
    """[N, L]: |A ∩ B|. Slot by slot over narrow ids, a comparison is 16 to 64 ids in one instruction."""
    N, L, K = a_NLK.shape
    a_KM, b_KM = (np.ascontiguousarray(ids.view(N * L, K).numpy().T) for ids in (a_NLK, b_NLK))
    overlap_M = np.zeros(N * L, a_KM.dtype)
    for a_M in a_KM:
        overlap_M += np.logical_or.reduce(a_M == b_KM, axis=0)
    return overlap_M.reshape(N, L)
