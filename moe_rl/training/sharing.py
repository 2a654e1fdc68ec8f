"""Whether a model gives the same when a prompt that several rows share is read once."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from moe_rl.training.batch import RolloutBatch
from moe_rl.training.forward import Native, Wanted, forward
from moe_rl.training.prefix import cache_of, read_once

TOLERANCE = 1e-3  # of what another prompt changes; rounding in float32 leaves less than a tenth of it
BY_LENGTH = {"dynamic", "longrope"}  # rotary embeddings that change with the length of the whole sequence


@torch.no_grad()
def can_share_prompts(model: PreTrainedModel) -> bool:
    """Whether prompts may be read once, packed in training and cached in sampling; tried on a few tokens.

    Every log-probability must be that of separate rows to within `TOLERANCE` of the largest change that
    another first token of the prompt makes: so that a model hardly initialised, whose logits all but ignore
    what it reads, is held to as much as a trained one.

    False for layers that keep no cache of every row or attend by more than a mask (sliding windows, recurrent
    states, attention kernels without a mask), for position embeddings that depend on the length, and for
    experts of limited capacity, whose rows depend on the others of the batch.
    """
    config = model.config.get_text_config()
    if config._attn_implementation not in ("sdpa", "eager") or _rope_types(config) & BY_LENGTH:
        return False
    ids_BT = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 0], [0, 1, 3, 2]], device=model.device)
    ids_BT %= model.get_input_embeddings().get_parameter("weight").shape[0]
    mask_BT = torch.ones_like(ids_BT)
    keep_all = model(input_ids=ids_BT[:1, :2], attention_mask=mask_BT[:1, :2], use_cache=True)
    cache = cache_of(keep_all)
    # a subclass keeps more than the layers say: MiniMax its recurrent states
    if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return False

    other_BT = ids_BT.clone()
    other_BT[:, 0] = ids_BT[0, 2]
    plain, other = (model(input_ids=ids, attention_mask=mask_BT).logits for ids in (ids_BT, other_BT))
    limit = TOLERANCE * _difference(plain[:, 1:], other[:, 1:])
    response_BT = torch.tensor([0.0, 0.0, 1.0, 1.0], device=model.device).expand(3, 4)
    batch = RolloutBatch(
        ids_BT, mask_BT, response_BT, torch.zeros_like(response_BT), mask_BT[:, 0].bool(), prompt_length=2
    )
    try:
        packed = forward(model, batch, Native(), Wanted(), share_prompts=True).logits_BNV
    except (ValueError, RuntimeError, IndexError, TypeError):
        return False  # Bloom computes positions from the mask, and expects it to be [B, T]
    continued = model(
        input_ids=ids_BT[:, 2:],
        attention_mask=mask_BT,
        position_ids=torch.tensor([[2, 3]], device=model.device).expand(3, 2),
        use_cache=True,
        **read_once(model, ids_BT[:, :2], mask_BT[:, :2]),
    ).logits
    assert packed is not None
    differences = _difference(packed, plain[:, 1:3]), _difference(continued, plain[:, 2:])
    return all(difference < limit for difference in differences)


def _rope_types(config: object) -> set[object]:
    """The kinds of rotary embeddings of all layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return {part.get("rope_type") for part in parts}


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of a log-probability, nats."""
    return (one.double().log_softmax(-1) - other.double().log_softmax(-1)).abs().max().item()
