"""One gradient update on one mini-batch, native or replayed."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.objectives import Objective
from moe_rl.routing import RoutingTrace, expert_change, replay_routing
from moe_rl.routing.drift import ExpertChange
from moe_rl.routing.replay import Replay
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.config import OptimConfig, TrainConfig
from moe_rl.training.measure import drift_metrics
from moe_rl.training.passes import OldPolicy
from moe_rl.training.policy import token_logp


@dataclass
class Update:
    """What one gradient update left behind; `logp_BT` (detached) covers the mini-batch's rows.

    The expert changes are on response rows: `overridden` is the replayed trace against the router's own
    choice in the same forward; `since_old` and `since_last` are the routing after the update against π_old
    and against the policy just before it, on the whole rollout batch.
    """

    loss: float
    grad_norm: float
    lr: float
    logp_BT: Tensor
    objective_metrics: dict[str, float] = field(repr=False)
    overridden: ExpertChange | None = None
    since_old: ExpertChange | None = None
    since_last: ExpertChange | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = {"loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr}
        found |= self.objective_metrics
        if self.overridden is not None:
            found["replay/overridden"] = self.overridden.experts
        if self.since_old is not None and self.since_last is not None:
            found |= drift_metrics("drift/old", self.since_old) | drift_metrics("drift/step", self.since_last)
        return found


def make_optimizer(policy: PreTrainedModel, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over all weights, routers included."""
    return torch.optim.AdamW(
        policy.parameters(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
    )


def routing_of(
    policy: PreTrainedModel, trace: RoutingTrace | None, rows: slice, source: str | None
) -> AbstractContextManager[Replay | None]:
    """Native routing, or π_old's experts forced for these rows; held open until after backward."""
    if source is None or trace is None:
        return nullcontext()
    return replay_routing(policy, trace[rows])


def gradient_update(
    policy: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    batch: RolloutBatch,
    old: OldPolicy,
    advantages_B: Tensor,
    minibatch: list[slice],
    config: TrainConfig,
    updates_before: int,
) -> Update:
    """One AdamW update, accumulated over the mini-batch's micro-batches; skipped if it is not finite."""
    whole = slice(minibatch[0].start, minibatch[-1].stop)
    mask_BT = batch[whole].response_mask_BT
    sequences, tokens = len(mask_BT), int(mask_BT.sum())
    loss_sum, logps, overridden = 0.0, [], []
    optimizer.zero_grad()
    for rows in minibatch:
        part = batch[rows]
        with routing_of(policy, old.trace, rows, config.replay.source) as replay:
            logp_BT = token_logp(policy, part, config.rollout.temperature)
            loss, _ = objective(
                logp_BT,
                old.logp_BT[rows],
                advantages_B[rows],
                part.response_mask_BT,
                sequences=sequences,
                tokens=tokens,
            )
            loss.backward()
        loss_sum += loss.item()
        logps.append(logp_BT.detach())
        if replay is not None and old.trace is not None:
            on = part.routing_rows_BT
            overridden.append(expert_change(old.trace[rows].where(on), replay.native.where(on)))

    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.optim.max_grad_norm).item()
    lr = config.optim.lr * min(1.0, (updates_before + 1) / max(1, config.optim.warmup_updates))
    for group in optimizer.param_groups:
        group["lr"] = lr
    if math.isfinite(loss_sum) and math.isfinite(grad_norm):
        optimizer.step()

    new_logp_BT = torch.cat(logps)
    with torch.no_grad():
        _, metrics = objective(new_logp_BT, old.logp_BT[whole], advantages_B[whole], mask_BT)
    combined = ExpertChange.combine(overridden) if overridden else None
    return Update(loss_sum, grad_norm, lr, new_logp_BT, metrics, overridden=combined)
