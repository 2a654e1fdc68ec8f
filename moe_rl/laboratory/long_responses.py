"""Responses of thousands of tokens: sampled past every stop token, scored in chunks on a key-value cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.models import LanguageModel
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.prefix import cache_of
from moe_rl.training.rollout import sample_responses

NEVER = -1  # no token has this id
CHUNK = 512  # tokens a forward: attention then needs rows x heads x CHUNK x length numbers at most


def sample_long(
    lm: LanguageModel, prompts: Sequence[Sequence[int]], length: int, temperature: float
) -> RolloutBatch:
    """Exactly `length` tokens after each prompt: a stop token is a token like any other.

    Drawn from the policy itself, so that its log-ratios to another policy are those of on-policy text,
    however little sense text of this length makes. Raises ValueError where the model has not the positions.
    """
    return sample_responses(
        replace(lm, stop_ids=(NEVER,)), prompts, max_new_tokens=length, temperature=temperature
    )


@torch.no_grad()
def chunked_logp(
    model: PreTrainedModel, batch: RolloutBatch, temperature: float, chunk: int = CHUNK
) -> Tensor:
    """log π of every response token, [B, N] in nats on the CPU, as `score` gives it up to rounding.

    Memory is bounded by the cache and one chunk of one response: rows run one after the other.
    """
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    return torch.cat(
        [_row_logp(model, batch[row : row + 1], temperature, chunk, name) for row in range(len(batch))]
    )


def _row_logp(
    model: PreTrainedModel, batch: RolloutBatch, temperature: float, chunk: int, name: str
) -> Tensor:
    first, T = batch.prompt_length, batch.input_ids_BT.shape[1]
    held: dict[str, Any] = {}
    parts = []
    for start in range(0, T - 1, chunk):
        stop = min(start + chunk, T - 1)
        output = model(
            input_ids=batch.input_ids_BT[:, start:stop],
            attention_mask=batch.attention_mask_BT[:, :stop],
            position_ids=batch.position_ids_BT[:, start:stop],
            use_cache=True,
            **held,
        )
        held = {name: cache_of(output)}
        logp_BnV = torch.log_softmax(output.logits.float() / temperature, dim=-1)
        next_Bn = batch.input_ids_BT[:, start + 1 : stop + 1]
        parts.append(logp_BnV.gather(-1, next_Bn[..., None]).squeeze(-1))
    return torch.cat(parts, dim=1)[:, first - 1 :].cpu()
