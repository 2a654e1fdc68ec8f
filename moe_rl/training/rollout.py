"""Sampling responses from a policy, with the log-probability of every token that was drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig

from moe_rl.models import LanguageModel
from moe_rl.training.batch import RolloutBatch


def left_pad(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both int64 [B, S], of sequences padded on the left."""
    width = max(map(len, sequences))
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.tensor(sequence)
        mask[row, width - len(sequence) :] = 1
    return ids, mask


@torch.no_grad()
def sample_responses(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
) -> RolloutBatch:
    """One response to each prompt, from torch's current random state.

    temperature 0 decodes greedily. Everything that would change the sampled distribution (top-k, top-p,
    penalties, a checkpoint's own generation defaults) is off: `sampler_logp_BT` is the log-softmax of
    logits / temperature, exactly what was sampled from.
    """
    device = lm.model.device
    prompt_ids, prompt_mask = (t.to(device) for t in left_pad(prompts, lm.pad_id))
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    output = lm.model.generate(  # type: ignore[operator]  # a mixin that torch's stubs take for a tensor
        input_ids=prompt_ids,
        attention_mask=prompt_mask,
        generation_config=GenerationConfig(
            **(sampling if temperature > 0 else {"do_sample": False}),
            max_new_tokens=max_new_tokens,
            eos_token_id=list(lm.stop_ids),
            pad_token_id=lm.pad_id,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    ids_BT = output.sequences
    prompt_length = prompt_ids.shape[1]
    response_BN = ids_BT[:, prompt_length:]

    is_stop_BN = torch.isin(response_BN, torch.tensor(list(lm.stop_ids), device=device))
    stops_before_BN = is_stop_BN.long().cumsum(-1) - is_stop_BN.long()
    mask_BN = (stops_before_BN == 0).float()

    logp_BN = torch.stack(
        [
            torch.log_softmax(scores_BV.float(), dim=-1).gather(-1, token_B[:, None]).squeeze(-1)
            for scores_BV, token_B in zip(output.scores, response_BN.unbind(-1), strict=True)
        ],
        dim=-1,
    )
    no_prompt = torch.zeros(prompt_ids.shape, device=device)
    return RolloutBatch(
        input_ids_BT=ids_BT,
        attention_mask_BT=torch.cat([prompt_mask, mask_BN.long()], dim=-1),
        response_mask_BT=torch.cat([no_prompt, mask_BN], dim=-1),
        sampler_logp_BT=torch.cat([no_prompt, torch.where(mask_BN > 0, logp_BN, 0.0)], dim=-1),
        finished_B=is_stop_BN.any(-1),
        prompt_length=prompt_length,
    )
