"""The model calls of one RL step and nothing else: what any implementation of the loop must compute.

Generation by a decode loop over a key-value cache, one old-policy forward, then for every mini-batch a
forward, a backward and an optimiser step, in the shapes of the loop's own passes. No task, no rewards
(advantages are random), no metrics, no routing. With `shared` every prompt is run once for all of its
responses, in generation and, with gradient, in the training forwards; without, it is repeated for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """G responses of at most `new_tokens` to each prompt, split into `minibatches` of whole groups."""

    responses: int
    new_tokens: int
    minibatches: int


@dataclass(frozen=True)
class Rows:
    """prompt_bS with mask_bS, left-padded, one row a prompt; response_BN with mask_BN, G rows a prompt."""

    prompt_bS: Tensor
    prompt_mask_bS: Tensor
    response_BN: Tensor
    mask_BN: Tensor

    def chunks(self, count: int) -> Iterator[Rows]:
        tensors = (self.prompt_bS, self.prompt_mask_bS, self.response_BN, self.mask_BN)
        return (Rows(*parts) for parts in zip(*(tensor.chunk(count) for tensor in tensors), strict=True))


class BareStep:
    """A call is one step on the same prompts; `records` wraps the old-policy forwards in a context."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompt_bS: Tensor,
        prompt_mask_bS: Tensor,
        stop_id: int,
        shape: Shape,
        *,
        shared: bool = False,
        lr: float = 0.0,
        records: Callable[[PreTrainedModel], AbstractContextManager[Any]] = lambda _: nullcontext(),
    ) -> None:
        self.model, self.stop_id, self.shape, self.shared, self.records = (
            model,
            stop_id,
            shape,
            shared,
            records,
        )
        self.prompt_bS, self.prompt_mask_bS = prompt_bS, prompt_mask_bS
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)

    def __call__(self) -> int:
        """Response tokens sampled."""
        rows = self.sample()
        chunks = list(rows.chunks(self.shape.minibatches))
        with torch.no_grad():
            old = []
            for chunk in chunks:
                with self.records(self.model):
                    old.append(self.logp(chunk))
        for chunk, old_BN in zip(chunks, old, strict=True):
            advantages_B1 = torch.randn(len(old_BN), 1)
            self.optimizer.zero_grad()
            ratio_BN = (self.logp(chunk) - old_BN).exp()
            (-(ratio_BN * advantages_B1 * chunk.mask_BN).sum() / chunk.mask_BN.sum()).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return int(rows.mask_BN.sum())

    @torch.no_grad()
    def sample(self) -> Rows:
        """Decodes at temperature 1 until every response has its stop token."""
        mask, logits_BV, cache = self.prefill()
        positions = mask.sum(-1, keepdim=True)
        tokens, masks = [], []
        going_B = torch.ones(len(mask))
        for _ in range(self.shape.new_tokens):
            next_B1 = torch.multinomial(logits_BV.softmax(-1), 1)
            tokens.append(next_B1)
            masks.append(going_B)
            going_B = going_B * (next_B1[:, 0] != self.stop_id)
            if not going_B.any() or len(tokens) == self.shape.new_tokens:
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], -1)
            logits_BV = self.model(
                input_ids=next_B1, attention_mask=mask, position_ids=positions, past_key_values=cache
            ).logits[:, -1]
            positions = positions + 1
        return Rows(self.prompt_bS, self.prompt_mask_bS, torch.cat(tokens, -1), torch.stack(masks, -1))

    def prefill(self, rows: Rows | None = None) -> tuple[Tensor, Tensor, DynamicCache]:
        """The prompts' mask, next-token logits and cache, a row a response."""
        G = self.shape.responses
        ids = self.prompt_bS if rows is None else rows.prompt_bS
        mask = self.prompt_mask_bS if rows is None else rows.prompt_mask_bS
        if not self.shared:
            ids, mask = ids.repeat_interleave(G, 0), mask.repeat_interleave(G, 0)
        cache = DynamicCache(config=self.model.config)
        logits_BV = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions_of(mask), past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]  # fmt: skip
        if self.shared:
            cache.batch_repeat_interleave(G)
            logits_BV, mask = logits_BV.repeat_interleave(G, 0), mask.repeat_interleave(G, 0)
        return mask, logits_BV, cache

    def logp(self, rows: Rows) -> Tensor:
        """log π of the response tokens, [B, N]."""
        N = rows.response_BN.shape[1]
        if self.shared:
            mask, first_BV, cache = self.prefill(rows)
            mask = torch.cat([mask, rows.mask_BN[:, :-1].long()], -1)
            rest_BNV = self.model(
                input_ids=rows.response_BN[:, :-1], attention_mask=mask, past_key_values=cache,
                position_ids=positions_of(mask)[:, 1 - N :],
            ).logits  # fmt: skip
            logits_BNV = torch.cat([first_BV[:, None], rest_BNV], 1)
        else:
            G = self.shape.responses
            ids = torch.cat([rows.prompt_bS.repeat_interleave(G, 0), rows.response_BN], -1)
            mask = torch.cat([rows.prompt_mask_bS.repeat_interleave(G, 0), rows.mask_BN.long()], -1)
            logits_BNV = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=False,
                logits_to_keep=N + 1,
            ).logits[:, :-1]  # fmt: skip
        return logits_BNV.log_softmax(-1).gather(-1, rows.response_BN[..., None]).squeeze(-1)


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)
