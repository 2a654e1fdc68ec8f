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


class _Drawn(LogitsProcessor):
    """Keeps log-probability and entropy of every drawn token, and of the distributions only the latest.

    `output_scores` of `generate` would keep [B, V] for every step. transformers applies the temperature after
    its callers' processors, so it is applied here to the same scores.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._logp_BV: Tensor | None = None
        self._logps: list[Tensor] = []
        self._entropies: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._read(input_ids)
        self._logp_BV = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        require_finite(self._logp_BV)
        self._entropies.append(torch.special.entr(self._logp_BV.exp()).sum(-1))
        return scores

    def finish(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, N] of the N tokens drawn."""
        self._read(ids_BT)
        return torch.stack(self._logps, dim=-1), torch.stack(self._entropies, dim=-1)

    def _read(self, ids_BT: Tensor) -> None:
        if self._logp_BV is not None:
            self._logps.append(self._logp_BV.gather(-1, ids_BT[:, -1:]).squeeze(-1))


@torch.no_grad()
def sample_responses(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    prompt_length: int | None = None,
    share_prompts: bool = False,
    version: int = 0,
) -> RolloutBatch:
    """One response to each prompt, from torch's current random state.

    temperature 0 decodes greedily. Everything that would change the sampled distribution (top-k, top-p,
    penalties, a checkpoint's own generation defaults) is off: `sampler_logp_BT` is the log-softmax of
    logits / temperature, exactly what was sampled from (of the logits for greedy decoding). `prompt_length`
    pads the prompts further than to the longest; with `share_prompts` rows that share their neighbour's
    prompt read it once; `version` names the weights. Raises ValueError for a prompt that does not fit the
    model.
    """
    require_fit(lm, prompts, max_new_tokens)
    ids, mask = (t.to(lm.model.device) for t in left_pad(prompts, lm.pad_id, prompt_length))
    nothing = torch.zeros(ids.shape, device=ids.device)
    batch = RolloutBatch(
        input_ids_BT=ids,
        attention_mask_BT=mask,
        response_mask_BT=nothing,
        sampler_logp_BT=nothing,
        finished_B=torch.zeros(len(ids), dtype=torch.bool, device=ids.device),
        prompt_length=ids.shape[1],
        sampler_entropy_BT=nothing,
        version_BT=torch.full_like(ids, -1),
        turn_BT=torch.full_like(ids, -1),
    )
    return continue_responses(
        lm,
        batch,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        share_prompts=share_prompts,
        version=version,
    )


@torch.no_grad()
def continue_responses(
    lm: LanguageModel,
    batch: RolloutBatch,
    *,
    max_new_tokens: int,
    temperature: float,
    share_prompts: bool = False,
    version: int = 0,
    turn: int = 0,
) -> RolloutBatch:
    """The batch with up to `max_new_tokens` more columns, in which the rows not finished go on.

    The weights read what is there anew, as an engine does whose weights were replaced; what was drawn before
    keeps its log-probability and version. `turn` is that of the new tokens, the other options are as in
    `sample_responses`.
    """
    rows = (~batch.finished_B).nonzero().flatten()
    if len(rows) == 0:
        return batch
    part = batch[rows]
    prompt_ids, prompt_mask = part.prompts()
    cache: dict[str, DynamicCache] = {}
    if share_prompts and prompt_ids.shape[1] > 1 and prompt_ids.numel() >= WORTH_READING_ONCE:
        # all but the last token: `generate` must have one to run itself
        cache = read_once(lm.model, prompt_ids[:, :-1], prompt_mask[:, :-1])
    drawn = _Drawn(temperature or 1.0)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    ids_bT = lm.model.generate(  # type: ignore[operator]  # a mixin that torch's stubs take for a tensor
        input_ids=part.input_ids_BT,
        attention_mask=part.attention_mask_BT,
        logits_processor=LogitsProcessorList([drawn]),
        **cache,
        generation_config=GenerationConfig(
            **(sampling if temperature > 0 else {"do_sample": False}),
            max_new_tokens=max_new_tokens,
            eos_token_id=list(lm.stop_ids),
            pad_token_id=lm.pad_id,
        ),
    )
    new_bN = ids_bT[:, part.input_ids_BT.shape[1] :]
    is_stop_bN = torch.isin(new_bN, torch.tensor(list(lm.stop_ids), device=new_bN.device))
    stops_before_bN = is_stop_bN.long().cumsum(-1) - is_stop_bN.long()
    on_bN = stops_before_bN == 0
    logp_bN, entropy_bN = drawn.finish(ids_bT)

    def of_all(values_bN: Tensor, outside: int) -> Tensor:
        values_BN = values_bN.new_full((len(batch), values_bN.shape[1]), outside)
        values_BN[rows] = values_bN.masked_fill(~on_bN, outside)
        return values_BN

    longer = batch.longer(
        {
            "input_ids_BT": of_all(new_bN, lm.pad_id),
            "attention_mask_BT": of_all(on_bN.long(), 0),
            "response_mask_BT": of_all(on_bN.float(), 0),
            "sampler_logp_BT": of_all(logp_bN, 0),
            "sampler_entropy_BT": of_all(entropy_bN, 0),
            "version_BT": of_all(torch.full_like(new_bN, version), -1),
            "turn_BT": of_all(torch.full_like(new_bN, turn), -1),
        },
        lm.pad_id,
    )
    return longer.ended(rows[is_stop_bN.any(-1)])


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
