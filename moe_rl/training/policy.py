"""The teacher-forced forward: the one path of old and new log-probabilities and of measured routing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_rl.models import ValueHead
from moe_rl.routing import RoutingTrace
from moe_rl.training.batch import RolloutBatch


@dataclass(frozen=True)
class Scores:
    """What one forward says of the sampled tokens: [B, T], column t about token t, 0 in the prompt columns.

    logp_BT         log π(y_t | x, y_<t), nats
    entropy_BT      of the whole next-token distribution, nats
    values_BT       the value head's estimate before token t
    router_logits   the routers' scores as the model returns them, a tensor [B·T, E] per MoE layer
    """

    logp_BT: Tensor
    entropy_BT: Tensor | None = None
    values_BT: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None


def score(
    model: PreTrainedModel,
    batch: RolloutBatch,
    temperature: float,
    *,
    entropy: bool = False,
    value_head: ValueHead | None = None,
    router_logits: bool = False,
) -> Scores:
    """One forward of `model` on a batch: log-probabilities at `temperature`, and what else is asked for.

    Only the rows that score a response column pass through the output head; log-softmax is in float32 or
    wider.
    """
    first = batch.prompt_length
    columns = batch.input_ids_BT.shape[1] - first
    output = model(
        input_ids=batch.input_ids_BT,
        attention_mask=batch.attention_mask_BT,
        position_ids=batch.position_ids_BT,
        use_cache=False,
        logits_to_keep=columns + 1,
        output_hidden_states=value_head is not None,
        # not passed as False: some families do not know it
        **({"output_router_logits": True} if router_logits else {}),
    )
    logits = output.logits[:, :-1]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logp_BNV = torch.log_softmax(wide / temperature, dim=-1)
    tokens_BN = batch.input_ids_BT[:, first:]

    def in_columns(values_BN: Tensor) -> Tensor:
        return nn.functional.pad(values_BN, (first, 0))

    return Scores(
        logp_BT=in_columns(logp_BNV.gather(-1, tokens_BN[..., None]).squeeze(-1)),
        entropy_BT=in_columns(-(logp_BNV.exp() * logp_BNV).sum(-1)) if entropy else None,
        values_BT=in_columns(value_head(output.hidden_states[-1][:, first - 1 : -1])) if value_head else None,
        router_logits=output.router_logits if router_logits else None,
    )


def router_logp(router_logits: tuple[Tensor, ...], trace: RoutingTrace) -> Tensor:
    """log softmax of each router's scores at the trace's experts, [B, T, L, K]; column t is row t - 1.

    Raises `ValueError` when the model does not return one tensor of scores a MoE layer.
    """
    B, T, L, _ = trace.experts.shape
    if len(router_logits) != L:
        raise ValueError(
            f"the model returns the scores of {len(router_logits)} routers and the trace has {L} layers: "
            "router shift (RSPO) cannot be measured on this family"
        )
    logp_BTLE = torch.stack(
        [scores.float().log_softmax(-1).view(B, T, -1) for scores in router_logits], dim=2
    )
    at_experts_BTLK = logp_BTLE.gather(-1, trace.experts.long())
    return nn.functional.pad(at_experts_BTLK[:, :-1], (0, 0, 0, 0, 1, 0))
