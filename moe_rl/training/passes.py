"""The passes over a rollout batch: which rows run together, π_old's record, the new policy's own routing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.models import ValueHead
from moe_rl.routing import OldWeights, RoutingTrace, Threshold, record_routing, replay_routing
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.config import ReplayConfig
from moe_rl.training.policy import router_logp, score

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
    """π_old on a rollout batch, before the updates: `Scores`' fields, and its trace on all rows.

    `trace` is its native routing, None for a dense model; `forced` the trace that replay forces, None without
    replay; `gate_weights_BTLK` the weights of the experts in `trace`, `values_BT` and `router_logp_BTLK` are
    there where replay or the objective asks for them.
    """

    logp_BT: Tensor
    entropy_BT: Tensor
    trace: RoutingTrace | None
    forced: RoutingTrace | None = None
    gate_weights_BTLK: Tensor | None = None
    values_BT: Tensor | None = None
    router_logp_BTLK: Tensor | None = None


@torch.no_grad()
def old_policy_pass(
    policy: PreTrainedModel,
    batch: RolloutBatch,
    plan: Plan,
    temperature: float,
    *,
    moe: bool,
    value_head: ValueHead | None = None,
    router_scores: bool = False,
    replay: ReplayConfig,
    rollout_trace: RoutingTrace | None = None,
) -> OldPolicy:
    """π_old before the updates, by the training forward: what it scores, and its native routing.

    Under R3 log-probabilities, values and router scores are on the sampler's experts, as those of the updates
    will be; `trace` and entropy stay native.
    """
    forced = None
    if replay.source == "rollout" and rollout_trace is not None:
        forced = rollout_trace.where(batch.routing_rows_BT) if replay.variant == "response" else rollout_trace
    native, scores, traces, gate_weights, router_logps = [], [], [], [], []
    keep_weights = replay.variant == "old_weights"
    for rows in flat(plan):
        with record_routing(policy, weights=keep_weights) if moe else nullcontext() as recorder:
            part = score(
                policy,
                batch[rows],
                temperature,
                entropy=True,
                value_head=value_head,
                router_logits=router_scores,
            )
        native.append(part)
        if recorder is not None:
            traces.append(recorder.trace())
            if keep_weights:
                gate_weights.append(recorder.weights())
        if forced is not None:
            with replay_routing(policy, forced[rows], variant=variant_of(replay, None)):
                part = score(
                    policy, batch[rows], temperature, value_head=value_head, router_logits=router_scores
                )
        scores.append(part)
        if part.router_logits is not None:
            router_logps.append(router_logp(part.router_logits, traces[-1]))
    trace = RoutingTrace.cat(traces) if traces else None
    if replay.source == "old_policy" and trace is not None:
        forced = trace.where(batch.routing_rows_BT) if replay.variant == "response" else trace
    logp_BT = joined([part.logp_BT for part in scores])
    entropy_BT = joined([part.entropy_BT for part in native])
    assert logp_BT is not None and entropy_BT is not None
    return OldPolicy(
        logp_BT,
        entropy_BT,
        trace,
        forced,
        gate_weights_BTLK=joined(gate_weights),
        values_BT=joined([part.values_BT for part in scores]),
        router_logp_BTLK=joined(router_logps),
    )


def variant_of(config: ReplayConfig, gate_weights_BTLK: Tensor | None) -> Threshold | OldWeights | None:
    """The variant of `replay_routing` that the options ask for."""
    if config.variant == "threshold" and config.min_ratio is not None:
        return Threshold(config.min_ratio)
    return OldWeights(gate_weights_BTLK) if gate_weights_BTLK is not None else None


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The parts along B; None where a pass was not asked for them."""
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


@torch.no_grad()
def reference_logp(reference: PreTrainedModel, batch: RolloutBatch, plan: Plan, temperature: float) -> Tensor:
    """log π_ref of the sampled tokens, [B, T], nats."""
    return torch.cat([score(reference, batch[rows], temperature).logp_BT for rows in flat(plan)])


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
