"""Routing as tensors of TRL's batch: batch first, so that TRL shuffles and splits it with its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_rl.routing import RoutingTrace

OLD, FORCED = "old_routing", "forced_routing"  # π_old's own choice; the sampler's, where that is replayed

# What TRL's forward takes beside tokens, where prompts hold images.
MULTIMODAL = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """What the traces of one model share and no batch has to carry: layers and the number of experts."""

    layer_ids: tuple[int, ...]
    num_experts: int

    @classmethod
    def of(cls, trace: RoutingTrace) -> Layout:
        return cls(trace.layer_ids, trace.num_experts)


def put_trace(batch: dict[str, Any], name: str, trace: RoutingTrace) -> None:
    """Add a trace of the batch's whole sequences [B, T] under `name`, with the hash of its tokens.

    Kept on the CPU: B · T · L · K bytes for up to 256 experts, and a micro-batch needs its rows alone. With
    the hash a replay on other tokens than the recorded ones is refused.
    """
    ids_BT, mask_BT = sequences(batch)
    trace = trace.to("cpu").compact().for_tokens(ids_BT, mask_BT)
    batch[f"{name}_experts"], batch[f"{name}_valid"] = trace.experts, trace.valid
    batch[f"{name}_tokens"] = trace.token_hash


def take_trace(batch: Mapping[str, Any], name: str, layout: Layout) -> RoutingTrace:
    """The trace of a batch's rows that `put_trace` added."""
    return RoutingTrace(
        batch[f"{name}_experts"],
        batch[f"{name}_valid"],
        layout.layer_ids,
        layout.num_experts,
        token_hash=batch[f"{name}_tokens"],
    )


def sequences(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [B, T] of prompt and completion, as TRL's forward gets them."""
    ids_BT = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    return ids_BT, torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


def counted_tokens(batch: Mapping[str, Any]) -> Tensor:
    """0/1 [B, C]: the completion tokens that enter the loss, without those of tools and environments."""
    mask_BC: Tensor = batch["completion_mask"]
    return mask_BC if batch.get("tool_mask") is None else mask_BC * batch["tool_mask"]


def counted_rows(batch: Mapping[str, Any]) -> Tensor:
    """bool [B, T]: the rows whose logits score `counted_tokens`, one to the left of each."""
    counted_BC = counted_tokens(batch)
    C, T = counted_BC.shape[1], batch["prompt_ids"].shape[1] + counted_BC.shape[1]
    rows_BT = torch.zeros(len(counted_BC), T, dtype=torch.bool, device=counted_BC.device)
    rows_BT[:, T - C - 1 : T - 1] = counted_BC.bool()
    return rows_BT


def images(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What of `MULTIMODAL` a batch has."""
    return {name: batch[name] for name in MULTIMODAL if batch.get(name) is not None}
