"""What the expert ids of a trace must satisfy, whoever made it."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_rl.routing.errors import RoutingError

_IDS_PER_CHUNK = 1 << 18  # bounds memory


def check_content(
    experts_BTLK: Tensor, valid_BT: Tensor, layer_ids: tuple[int, ...], num_experts: int
) -> None:
    """Check the ids of valid rows.

    Raises RoutingError for an id outside [0, E), an expert chosen twice by one token, and a layer that is
    zero throughout with K > 1 (what a capture that never ran leaves behind).
    """
    rows = valid_BT.flatten().nonzero().squeeze(1)
    experts_NLK = experts_BTLK.flatten(0, 1)
    L, K = experts_NLK.shape[1:]
    if not rows.numel():
        return
    nonzero_L = torch.zeros(L, dtype=torch.bool, device=rows.device)
    duplicate_L = torch.zeros_like(nonzero_L)
    for chunk in rows.split(max(1, _IDS_PER_CHUNK // (L * K))):
        ids_NLK = _comparable(experts_NLK[chunk])
        _check_range(ids_NLK, num_experts, layer_ids)
        if not bool(nonzero_L.all()):
            nonzero_L |= (ids_NLK != 0).any(2).any(0)
        duplicate_L |= _has_duplicates(ids_NLK)
    if K > 1 and not bool(nonzero_L.all()):
        layer = layer_ids[int((~nonzero_L).nonzero()[0])]
        raise RoutingError(
            f"layer {layer} holds expert 0 in every slot of every valid row: nothing was captured there. "
            "Drop dense layers from the trace, or check that the recording hook ran."
        )
    if bool(duplicate_L.any()):
        layer = layer_ids[int(duplicate_L.nonzero()[0])]
        raise RoutingError(
            f"a token chose the same expert twice in layer {layer}; ids in a row must be distinct. Mark "
            "padding and unrecorded rows as not valid."
        )


def _comparable(ids: Tensor) -> Tensor:
    """torch does not compare unsigned integers beyond uint8."""
    return ids.to(torch.int64) if ids.dtype in (torch.uint16, torch.uint32, torch.uint64) else ids


def _check_range(ids_NLK: Tensor, num_experts: int, layer_ids: tuple[int, ...]) -> None:
    low, high = (int(bound) for bound in ids_NLK.aminmax())
    if low >= 0 and high < num_experts:
        return
    outside_NLK = (ids_NLK < 0) | (ids_NLK.to(torch.int64) >= num_experts)
    layer = int(outside_NLK.any(2).any(0).nonzero()[0])
    low, high = (int(bound) for bound in ids_NLK[:, layer].aminmax())
    raise RoutingError(
        f"expert ids must lie in [0, {num_experts}), layer {layer_ids[layer]} holds {low} to {high}. "
        "Mark rows without routing as not valid; a wrong num_experts has the same effect."
    )


def _has_duplicates(ids_NLK: Tensor) -> Tensor:
    """bool [L]: whether a row of a layer names an expert twice."""
    N, L, K = ids_NLK.shape
    ids_KM = ids_NLK.reshape(N * L, K).T.contiguous()
    duplicate_M = torch.zeros(N * L, dtype=torch.bool, device=ids_NLK.device)
    for k in range(1, K):
        for j in range(k):
            duplicate_M |= ids_KM[k] == ids_KM[j]
    return duplicate_M.view(N, L).any(0)
