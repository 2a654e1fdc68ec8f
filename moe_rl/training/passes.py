"""The passes over a rollout batch: which rows run together, π_old's record, the new policy's own routing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.routing import RoutingTrace, Threshold
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.config import ReplayConfig
from moe_rl.training.forward import Forced, Native, Wanted, forward
from moe_rl.training.groups import Groups
from moe_rl.training.learner import Learner
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

    `trace` is its native routing, None for a dense model; `forced` what replay forces, None without replay;
    `values_BT` and `router_logp_BTLK` are there where the objective asks for them; `trainer_logp_BT` is what
    the training forward gave for `logp_BT`, None where it was not run.
    """

    logp_BT: Tensor
    entropy_BT: Tensor
    trace: RoutingTrace | None
    forced: Forced | None = None
    values_BT: Tensor | None = None
    router_logp_BTLK: Tensor | None = None
    trainer_logp_BT: Tensor | None = None


def old_policy(learner: Learner, groups: Groups, plan: Plan, step: int) -> OldPolicy:
    """π_old before the updates: by its pass, or with `rollout.recompute=false` by the sampler (GSPO §5.4).

    Then log-probabilities and entropy are the sampler's, and the pass is run only where it is needed for
    something else; under R3 the sampler's own experts are forced, as with the pass.
    """
    if learner.config.rollout.recompute:
        return old_policy_pass(learner, groups, plan)
    batch = groups.batch
    assert batch.sampler_entropy_BT is not None
    if learner.needs_old_policy_pass(step):
        passed = old_policy_pass(learner, groups, plan)
        return replace(passed, logp_BT=batch.sampler_logp_BT, entropy_BT=batch.sampler_entropy_BT)
    forced = None
    if groups.trace is not None:
        forced = what_is_forced(learner.config.replay, groups.trace, batch)
    return OldPolicy(batch.sampler_logp_BT, batch.sampler_entropy_BT, None, forced)


@torch.no_grad()
def old_policy_pass(learner: Learner, groups: Groups, plan: Plan) -> OldPolicy:
    """π_old before the updates, by the training forward: what it scores, and its native routing.

    Under R3 log-probabilities, values and router scores are on the sampler's experts, as those of the updates
    will be; `trace` and entropy stay native.
    """
    batch, replay = groups.batch, learner.config.replay
    recorded = Native(record=learner.records_routing, weights=replay.variant == "old_weights")
    forced = None
    if replay.source == "rollout" and groups.trace is not None:
        forced = what_is_forced(replay, groups.trace, batch)
    scores_of = partial(
        score,
        learner.policy,
        temperature=learner.config.rollout.temperature,
        value_head=learner.value_head,
        router_logits="router_shift_BT" in learner.needs,
        share_prompts=learner.share_prompts,
    )
    logps, entropies, values, traces, gate_weights, router_logps = [], [], [], [], [], []
    for rows in flat(plan):
        part = scores_of(batch[rows], routing=recorded, entropy=True)
        entropies.append(part.entropy_BT)
        if part.passed.native is not None:
            traces.append(part.passed.native)
            gate_weights.append(part.passed.gate_weights_BTLK)
        if forced is not None:
            part = scores_of(batch[rows], routing=forced[rows])
        if part.passed.router_logits is not None:
            router_logps.append(router_logp(part.passed.router_logits, traces[-1]))
        logps.append(part.logp_BT)
        values.append(part.values_BT)
    trace = RoutingTrace.cat(traces) if traces else None
    if replay.source == "old_policy" and trace is not None:
        forced = what_is_forced(replay, trace, batch, joined(gate_weights))
    logp_BT, entropy_BT = joined(logps), joined(entropies)
    assert logp_BT is not None and entropy_BT is not None
    return OldPolicy(
        logp_BT,
        entropy_BT,
        trace,
        forced,
        values_BT=joined(values),
        router_logp_BTLK=joined(router_logps),
        trainer_logp_BT=logp_BT,
    )


def what_is_forced(
    config: ReplayConfig, trace: RoutingTrace, batch: RolloutBatch, weights_BTLK: Tensor | None = None
) -> Forced:
    """The trace that the updates replay, by the variant that the options ask for."""
    if config.variant == "response":
        trace = trace.where(batch.routing_rows_BT)
    threshold = None
    if config.variant == "threshold" and config.min_ratio is not None:
        threshold = Threshold(config.min_ratio)
    return Forced(trace, threshold, weights_BTLK)


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The parts along B; None where a pass was not asked for them."""
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


@torch.no_grad()
def reference_logp(
    reference: PreTrainedModel, batch: RolloutBatch, plan: Plan, temperature: float, share_prompts: bool
) -> Tensor:
    """log π_ref of the sampled tokens, [B, T], nats."""
    parts = [score(reference, batch[rows], temperature, share_prompts=share_prompts) for rows in flat(plan)]
    return torch.cat([part.logp_BT for part in parts])


@torch.no_grad()
def native_routing(
    policy: PreTrainedModel, batch: RolloutBatch, plan: Plan, share_prompts: bool = False
) -> RoutingTrace:
    """The experts that the policy chooses by itself on the batch's tokens, by the training forward."""
    recorded, nothing = Native(record=True), Wanted(logits=False)  # the layers, not the output head
    passes = [
        forward(policy, batch[rows], recorded, nothing, share_prompts=share_prompts) for rows in flat(plan)
    ]
    return RoutingTrace.cat([passed.native for passed in passes if passed.native is not None])
