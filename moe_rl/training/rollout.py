"""Sampling responses from a policy, with the log-probability of every token that was drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList

from moe_rl.models import LanguageModel
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.nonfinite import require_finite
from moe_rl.training.prefix import read_once

# Prompt tokens of a batch below which one more call of the model costs more than it saves.
WORTH_READING_ONCE = 1024


def left_pad(
    sequences: Sequence[Sequence[int]], pad_id: int, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both int64 [B, S], padded on the left to the longest, or to `length`."""
    width = max(*map(len, sequences), length or 0)
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.tensor(sequence)
        mask[row, width - len(sequence) :] = 1
    return ids, mask


class _DrawnLogp(LogitsProcessor):
    """Keeps the log-probability of every drawn token, and of the distributions only the latest.

    `output_scores` of `generate` would keep [B, V] for every step. transformers applies the temperature after
    its callers' processors, so it is applied here to the same scores.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._logp_BV: Tensor | None = None
        self._drawn: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._read(input_ids)
        self._logp_BV = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        require_finite(self._logp_BV)
        return scores

    def finish(self, ids_BT: Tensor) -> Tensor:
        """Log-probabilities [B, N] of the N tokens drawn."""
        self._read(ids_BT)
        return torch.stack(self._drawn, dim=-1)

    def _read(self, ids_BT: Tensor) -> None:
        if self._logp_BV is not None:
            self._drawn.append(self._logp_BV.gather(-1, ids_BT[:, -1:]).squeeze(-1))


@torch.no_grad()
def sample_responses(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    prompt_length: int | None = None,
    share_prompts: bool = False,
) -> RolloutBatch:
    """One response to each prompt, from torch's current random state.

    temperature 0 decodes greedily. Everything that would change the sampled distribution (top-k, top-p,
    penalties, a checkpoint's own generation defaults) is off: `sampler_logp_BT` is the log-softmax of
    logits / temperature, exactly what was sampled from (of the logits for greedy decoding). `prompt_length`
    pads the prompts further than to the longest; with `share_prompts` rows that share their neighbour's
    prompt read it once. Raises ValueError for a prompt that does not fit the model.
    """
    require_fit(lm, prompts, max_new_tokens)
    device = lm.model.device
    prompt_ids, prompt_mask = (t.to(device) for t in left_pad(prompts, lm.pad_id, prompt_length))
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    drawn = _DrawnLogp(temperature or 1.0)
    cache: dict[str, DynamicCache] = {}
    if share_prompts and prompt_ids.shape[1] > 1 and prompt_ids.numel() >= WORTH_READING_ONCE:
        # all but the last token, which `generate` runs itself
        cache = read_once(lm.model, prompt_ids[:, :-1], prompt_mask[:, :-1])
    ids_BT = lm.model.generate(  # type: ignore[operator]  # a mixin that torch's stubs take for a tensor
        input_ids=prompt_ids,
        attention_mask=prompt_mask,
        logits_processor=LogitsProcessorList([drawn]),
        **cache,
        generation_config=GenerationConfig(
            **(sampling if temperature > 0 else {"do_sample": False}),
            max_new_tokens=max_new_tokens,
            eos_token_id=list(lm.stop_ids),
            pad_token_id=lm.pad_id,
        ),
    )
    width = prompt_ids.shape[1]
    response_BN = ids_BT[:, width:]

    is_stop_BN = torch.isin(response_BN, torch.tensor(list(lm.stop_ids), device=device))
    stops_before_BN = is_stop_BN.long().cumsum(-1) - is_stop_BN.long()
    mask_BN = (stops_before_BN == 0).float()

    no_prompt = torch.zeros(prompt_ids.shape, device=device)
    return RolloutBatch(
        input_ids_BT=ids_BT,
        attention_mask_BT=torch.cat([prompt_mask, mask_BN.long()], dim=-1),
        response_mask_BT=torch.cat([no_prompt, mask_BN], dim=-1),
        sampler_logp_BT=torch.cat([no_prompt, torch.where(mask_BN > 0, drawn.finish(ids_BT), 0.0)], dim=-1),
        finished_B=is_stop_BN.any(-1),
        prompt_length=width,
    )


def require_fit(lm: LanguageModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raise ValueError where a prompt and its response would pass the positions the model has."""
    limit = getattr(lm.model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    if limit is not None and len(prompts[longest]) + max_new_tokens > limit:
        raise ValueError(
            f"prompt {longest} of a batch has {len(prompts[longest])} tokens, with rollout.max_new_tokens="
            f"{max_new_tokens} more than the model's max_position_embeddings={limit}: drop long prompts from "
            "the task, or lower max_new_tokens"
        )
