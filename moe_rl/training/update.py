"""One gradient update on one mini-batch, native or replayed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_rl.objectives import router_shift
from moe_rl.objectives.mismatch import off_policy_sequence_mask
from moe_rl.routing import expert_change
from moe_rl.routing.drift import ExpertChange
from moe_rl.training.balance import load_balancing_loss
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.config import MismatchConfig
from moe_rl.training.forward import Forced, Native
from moe_rl.training.learner import Learner
from moe_rl.training.passes import OldPolicy
from moe_rl.training.policy import Scores, router_logp, score
from moe_rl.training.signal import Signal


@dataclass
class Update:
    """What one gradient update left behind; its tensors (detached) cover the mini-batch's rows.

    `loss` is the objective's; `aux_loss` the load-balancing loss, without its coefficient, None where off.

    The expert changes are on response rows: `overridden` is what the experts got against the router's own
    choice in the same forward, `followed` against the trace; `since_old` and `since_last` are the routing
    after the update against π_old and against the policy just before it, on the whole rollout batch.
    """

    rows: slice  # of the rollout batch
    loss: float
    grad_norm: float
    lr: float
    logp_BT: Tensor
    tensors: dict[str, Tensor]
    objective_metrics: dict[str, float]
    aux_loss: float | None = None
    overridden: ExpertChange | None = None
    followed: ExpertChange | None = None
    since_old: ExpertChange | None = None
    since_last: ExpertChange | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = {"loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr}
        found |= self.objective_metrics
        if self.aux_loss is not None:
            found["aux_loss"] = self.aux_loss
        if self.overridden is not None:
            found["replay/overridden"] = self.overridden.experts
        if self.followed is not None:
            found["replay/replaced"] = self.followed.experts
        if self.since_old is not None and self.since_last is not None:
            found |= drift_metrics("drift/old", self.since_old) | drift_metrics("drift/step", self.since_last)
        return found


def drift_metrics(name: str, change: ExpertChange) -> dict[str, float | list[float]]:
    """One expert change under the four names the run store keeps."""
    return {
        name: change.experts,
        f"{name}_sets": change.sets,
        f"{name}_tokens": change.tokens,
        f"{name}_by_layer": change.by_layer.tolist(),
    }


def routing_of(old: OldPolicy, rows: slice) -> Native | Forced:
    """Native routing, or replay of the old experts for these rows."""
    return Native() if old.forced is None else old.forced[rows]


def gradient_update(
    learner: Learner,
    batch: RolloutBatch,
    old: OldPolicy,
    signal: Signal,
    minibatch: list[slice],
    updates_before: int,
) -> Update:
    """One AdamW update, accumulated over the mini-batch's micro-batches; not applied if it is not finite."""
    objective, config = learner.objective, learner.config
    whole = slice(minibatch[0].start, minibatch[-1].stop)
    target = signal[whole]
    sequences, tokens = len(target.mask_BT), int(target.mask_BT.sum())
    loss_sum, aux_sum, logps, overridden, followed = 0.0, 0.0, [], [], []
    forward_tensors: dict[str, list[Tensor]] = {}
    learner.optimizer.zero_grad()
    for rows in minibatch:
        part, target_part = batch[rows], signal[rows]
        scores = score(
            learner.policy,
            part,
            config.rollout.temperature,
            routing=routing_of(old, rows),
            entropy="entropy_BT" in learner.needs,
            value_head=learner.value_head,
            router_logits="router_shift_BT" in learner.needs or bool(learner.top_k),
            share_prompts=learner.share_prompts,
        )
        extra = tensors_of_forward(scores, old, rows)
        extra |= off_policy_weights(config.mismatch, scores.logp_BT, part, target_part)
        keywords: dict[str, Any] = target_part.tensors | extra
        loss, metrics = objective(
            scores.logp_BT,
            old.logp_BT[rows],
            target_part.advantages,
            target_part.mask_BT,
            sequences=sequences,
            tokens=max(tokens, 1),
            **keywords,
        )
        loss_sum += loss.item()
        if learner.top_k:
            # over the micro-batch's tokens, its part by its share of the responses
            scored = scores.passed.router_logits or ()
            aux = load_balancing_loss(scored, learner.top_k, part.attention_mask_BT)
            aux_sum += aux.item() * len(part) / sequences
            loss = loss + config.optim.aux_loss_coef * aux * len(part) / sequences
        loss.backward()
        logps.append(scores.logp_BT.detach())
        for name, tensor in extra.items():
            forward_tensors.setdefault(name, []).append(tensor.detach())
        used, native = scores.passed.used, scores.passed.native
        if old.forced is not None and used is not None and native is not None:
            on, forced = part.routing_rows_BT, old.forced.trace[rows]
            overridden.append(expert_change(used.where(on), native.where(on)))
            followed.append(expert_change(forced.where(on), used.where(on)))

    grad_norm = torch.nn.utils.clip_grad_norm_(
        learner.trained.parameters(), config.optim.max_grad_norm
    ).item()
    lr = config.optim.lr * min(1.0, (updates_before + 1) / max(1, config.optim.warmup_updates))
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    if math.isfinite(loss_sum) and math.isfinite(grad_norm):
        learner.optimizer.step()
    else:
        learner.optimizer.zero_grad()  # no NaN is left for anyone to read

    logp_BT = torch.cat(logps)
    tensors = {name: torch.cat(parts) for name, parts in forward_tensors.items()}
    if len(minibatch) > 1:
        metrics = objective_metrics(learner, old, signal, whole, logp_BT, tensors)
    update = Update(whole, loss_sum, grad_norm, lr, logp_BT, tensors, metrics)
    if learner.top_k:
        update.aux_loss = aux_sum
    if overridden:
        update.overridden, update.followed = ExpertChange.combine(overridden), ExpertChange.combine(followed)
    return update


def tensors_of_forward(scores: Scores, old: OldPolicy, rows: slice) -> dict[str, Tensor]:
    """The keyword tensors that the update's own forward on these rows was asked for."""
    found: dict[str, Tensor] = {}
    if scores.entropy_BT is not None:
        found["entropy_BT"] = scores.entropy_BT
    if scores.values_BT is not None:
        found["values_BT"] = scores.values_BT
    router_logits = scores.passed.router_logits
    if router_logits is not None and old.trace is not None and old.router_logp_BTLK is not None:
        new_BTLK = router_logp(router_logits, old.trace[rows])
        found["router_shift_BT"] = router_shift(old.router_logp_BTLK[rows], new_BTLK)
    return found


@torch.no_grad()
def off_policy_weights(
    config: MismatchConfig, logp_BT: Tensor, batch: RolloutBatch, signal: Signal
) -> dict[str, Tensor]:
    """The weights_BT without the responses that the off-policy sequence mask drops, where it is on."""
    if config.off_policy_threshold is None:
        return {}
    kept = off_policy_sequence_mask(
        logp_BT,
        batch.sampler_logp_BT,
        signal.advantages,
        signal.mask_BT,
        threshold=config.off_policy_threshold,
    )
    weights_BT = signal.tensors.get("weights_BT")
    return {"weights_BT": kept.weights if weights_BT is None else kept.weights * weights_BT}


def metrics_over(
    learner: Learner, old: OldPolicy, signal: Signal, updates: Sequence[Update]
) -> dict[str, float]:
    """The objective's metrics over all of these updates' rows; none without an update."""
    if not updates:
        return {}
    rows = torch.cat([torch.arange(u.rows.start, u.rows.stop) for u in updates])
    logp_BT = torch.cat([u.logp_BT for u in updates])
    tensors = {name: torch.cat([u.tensors[name] for u in updates]) for name in updates[0].tensors}
    return objective_metrics(learner, old, signal, rows, logp_BT, tensors)


@torch.no_grad()
def objective_metrics(
    learner: Learner,
    old: OldPolicy,
    signal: Signal,
    rows: slice | Tensor,
    logp_BT: Tensor,
    tensors: dict[str, Tensor],
) -> dict[str, float]:
    """The objective's metrics over some rows in one call, so that they reduce exactly."""
    target = signal[rows]
    keywords: dict[str, Any] = target.tensors | tensors
    _, metrics = learner.objective(logp_BT, old.logp_BT[rows], target.advantages, target.mask_BT, **keywords)
    return metrics
