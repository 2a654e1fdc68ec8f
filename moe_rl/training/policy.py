"""What a policy says of the sampled tokens, by the teacher-forced forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_rl.models import ValueHead
from moe_rl.routing import RoutingTrace
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.forward import Forced, Native, Passed, Wanted, forward

NATIVE = Native()


@dataclass(frozen=True)
class Scores:
    """What one forward says of the sampled tokens: [B, T], column t about token t, 0 in the prompt columns.

    logp_BT         log π(y_t | x, y_<t), nats
    entropy_BT      of the whole next-token distribution, nats
    values_BT       the value head's estimate before token t
    passed          the forward's routing and routers' scores; its logits and hidden states are let go
    """

    logp_BT: Tensor
    passed: Passed
    entropy_BT: Tensor | None = None
    values_BT: Tensor | None = None


def score(
    model: PreTrainedModel,
    batch: RolloutBatch,
    temperature: float,
    *,
    routing: Native | Forced = NATIVE,
    entropy: bool = False,
    value_head: ValueHead | None = None,
    router_logits: bool = False,
    share_prompts: bool = False,
) -> Scores:
    """One forward of `model` on a batch: log-probabilities at `temperature`, and what else is asked for.

    Only the rows that score a response column pass through the output head; log-softmax is in float32 or
    wider. `share_prompts` as in `forward`.
    """
    wanted = Wanted(hidden=value_head is not None, router_logits=router_logits)
    passed = forward(model, batch, routing, wanted, share_prompts=share_prompts)
    logits = passed.logits_BNV
    assert logits is not None
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logp_BNV = torch.log_softmax(wide / temperature, dim=-1)
    first = batch.prompt_length
    tokens_BN = batch.input_ids_BT[:, first:]

    def in_columns(values_BN: Tensor) -> Tensor:
        return nn.functional.pad(values_BN, (first, 0))

    return Scores(
        logp_BT=in_columns(logp_BNV.gather(-1, tokens_BN[..., None]).squeeze(-1)),
        passed=replace(passed, logits_BNV=None, hidden_BND=None),
        entropy_BT=in_columns(-(logp_BNV.exp() * logp_BNV).sum(-1)) if entropy else None,
        values_BT=in_columns(value_head(passed.hidden_BND)) if value_head else None,
    )


def router_logp(router_logits: tuple[Tensor, ...], trace: RoutingTrace) -> Tensor:
    """log softmax of each router's scores at the trace's experts, [B, T, L, K]; column t is row t - 1.

    `router_logits` are [B, T, E] per layer. Raises `ValueError` when the model does not return one tensor of
    scores a MoE layer.
    """
    L = len(trace.layer_ids)
    if len(router_logits) != L:
        raise ValueError(
            f"the model returns the scores of {len(router_logits)} routers and the trace has {L} layers: "
            "router shift (RSPO) cannot be measured on this family"
        )
    logp_BTLE = torch.stack([scores.float().log_softmax(-1) for scores in router_logits], dim=2)
    at_experts_BTLK = logp_BTLE.gather(-1, trace.experts.long())
    return nn.functional.pad(at_experts_BTLK[:, :-1], (0, 0, 0, 0, 1, 0))
