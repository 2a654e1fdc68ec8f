"""The teacher-forced forward: the one path of old and new log-probabilities and of measured routing."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.training.batch import RolloutBatch


def _response_logp_BNV(model: PreTrainedModel, batch: RolloutBatch, temperature: float) -> Tensor:
    """Log-softmax of logits / temperature at the N rows that score the response columns, in float32 or wider.

    Only these rows pass through the output head; the whole sequence passes through the layers.
    """
    columns = batch.input_ids_BT.shape[1] - batch.prompt_length
    logits = model(
        input_ids=batch.input_ids_BT,
        attention_mask=batch.attention_mask_BT,
        position_ids=batch.position_ids_BT,
        use_cache=False,
        logits_to_keep=columns + 1,
    ).logits[:, :-1]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide / temperature, dim=-1)


def _in_columns(values_BN: Tensor, batch: RolloutBatch) -> Tensor:
    """Values of the response columns at their place in [B, T], zero in the prompt."""
    return torch.nn.functional.pad(values_BN, (batch.prompt_length, 0))


def token_logp(model: PreTrainedModel, batch: RolloutBatch, temperature: float) -> Tensor:
    """log π(y_t | x, y_<t) in nats, [B, T]; column t scores token t, 0 in the prompt columns."""
    logp_BNV = _response_logp_BNV(model, batch, temperature)
    tokens_BN = batch.input_ids_BT[:, batch.prompt_length :]
    return _in_columns(logp_BNV.gather(-1, tokens_BN[..., None]).squeeze(-1), batch)


@torch.no_grad()
def token_logp_and_entropy(
    model: PreTrainedModel, batch: RolloutBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """`token_logp`, and the entropy (nats) of the whole next-token distribution at each column, [B, T]."""
    logp_BNV = _response_logp_BNV(model, batch, temperature)
    tokens_BN = batch.input_ids_BT[:, batch.prompt_length :]
    logp_BN = logp_BNV.gather(-1, tokens_BN[..., None]).squeeze(-1)
    entropy_BN = -(logp_BNV.exp() * logp_BNV).sum(-1)
    return _in_columns(logp_BN, batch), _in_columns(entropy_BN, batch)
