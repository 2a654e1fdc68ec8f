"""Prompts that neighbouring rows share: which they are, and whether a model may read them once."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class Prompts:
    """The distinct prompts of a batch: `first_P`, the first row of each; `of_row_B`, which one a row has."""

    first_P: Tensor
    of_row_B: Tensor

    @property
    def shared(self) -> bool:
        """Whether any row has the prompt of its neighbour."""
        return len(self.first_P) < len(self.of_row_B)

    def repeat(self, of_prompt: Tensor) -> Tensor:
        """[P, ...] to [B, ...]: each row gets what its prompt has."""
        return of_prompt.index_select(0, self.of_row_B)

    def repeat_cache(self, cache: DynamicCache) -> DynamicCache:
        """A new cache of B rows; the old one stays as it is."""
        repeated = DynamicCache()
        layers: list[Any] = cache.layers
        for index, layer in enumerate(layers):
            repeated.update(self.repeat(layer.keys), self.repeat(layer.values), index)
        return repeated


def distinct_prompts(ids_BS: Tensor, mask_BS: Tensor) -> Prompts:
    """Neighbouring rows with the same tokens and padding have one prompt."""
    _, of_row_B, counts_P = torch.stack([ids_BS, mask_BS], dim=-1).unique_consecutive(
        dim=0, return_inverse=True, return_counts=True
    )
    return Prompts(counts_P.cumsum(0) - counts_P, of_row_B)


@torch.no_grad()
def read_once(model: PreTrainedModel, ids_BS: Tensor, mask_BS: Tensor) -> dict[str, DynamicCache]:
    """A cache of B rows that holds their prompts, as keyword argument of `model` and its `generate`.

    Empty where no rows share a prompt.
    """
    prompts = distinct_prompts(ids_BS, mask_BS)
    if not prompts.shared:
        return {}
    ids, mask = ids_BS[prompts.first_P], mask_BS[prompts.first_P]
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp_min(0),
        use_cache=True,
        logits_to_keep=1,
    )
    new = "cache" in inspect.signature(type(model).forward).parameters
    return {"cache" if new else "past_key_values": prompts.repeat_cache(cache_of(output))}


def cache_of(output: Any) -> Any:
    """The cache in a model's output, which transformers is renaming, as it is its argument."""
    return output.cache if "cache" in output else output.get("past_key_values")
