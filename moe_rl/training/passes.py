"""The passes over a rollout batch: which rows run together, π_old's record, the new policy's own routing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.routing import RoutingTrace, record_routing
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.policy import token_logp_and_entropy

Plan = list[list[slice]]  # mini-batches of micro-batches of rows


def split(sequences: int, minibatches: int, microbatch: int | None) -> Plan:
    """Rows of each mini-batch, as the micro-batches in which every pass over them runs.

    Old policy, update and drift share these slices: kernels may round differently for another batch shape,
    and neither the first ratio of a step nor the drift of an unchanged model may show it.
    """
    rows = sequences // minibatches
    size = microbatch or rows
    return [
        [slice(start, min(start + size, first + rows)) for start in range(first, first + rows, size)]
        for first in range(0, sequences, rows)
    ]


def flat(plan: Plan) -> Iterator[slice]:
    """Every micro-batch, in row order."""
    return (rows for minibatch in plan for rows in minibatch)


@dataclass(frozen=True)
class OldPolicy:
    """π_old on a rollout batch: `logp_BT` and `entropy_BT` in nats; `trace`, all rows, None if dense."""

    logp_BT: Tensor
    entropy_BT: Tensor
    trace: RoutingTrace | None


def old_policy_pass(
    policy: PreTrainedModel, batch: RolloutBatch, plan: Plan, temperature: float, moe: bool
) -> OldPolicy:
    """Log-probabilities, entropy and native routing before the updates, by the training forward."""
    logps, entropies, traces = [], [], []
    for rows in flat(plan):
        with record_routing(policy) if moe else nullcontext() as recorder:
            logp_BT, entropy_BT = token_logp_and_entropy(policy, batch[rows], temperature)
        logps.append(logp_BT)
        entropies.append(entropy_BT)
        if recorder is not None:
            traces.append(recorder.trace())
    return OldPolicy(torch.cat(logps), torch.cat(entropies), RoutingTrace.cat(traces) if moe else None)


@torch.no_grad()
def native_routing(policy: PreTrainedModel, batch: RolloutBatch, plan: Plan) -> RoutingTrace:
    """The experts that the policy chooses by itself on the batch's tokens, by the training forward."""
    traces = []
    for rows in flat(plan):
        part = batch[rows]
        with record_routing(policy) as recorder:
            policy(
                input_ids=part.input_ids_BT,
                attention_mask=part.attention_mask_BT,
                position_ids=part.position_ids_BT,
                use_cache=False,
                logits_to_keep=1,  # routing needs the layers, not the output head
            )
        traces.append(recorder.trace())
    return RoutingTrace.cat(traces)
