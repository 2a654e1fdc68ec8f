"""What the loop logs beside the objective's own metrics; the glossary in the README gives every formula."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean as mean
from typing import Any

import torch
from torch import Tensor

from moe_rl.objectives.mismatch import mismatch_metrics
from moe_rl.routing import RoutingTrace, expert_change
from moe_rl.routing.drift import ExpertChange, expert_load, max_violation
from moe_rl.training.groups import Groups
from moe_rl.training.learner import Learner
from moe_rl.training.passes import OldPolicy
from moe_rl.training.signal import Signal
from moe_rl.training.turns import by_turn
from moe_rl.training.update import Update, drift_metrics, metrics_over


class PhaseClock:
    """Wall-clock seconds per named phase of a step, as `time/<phase>`, and `time/total`."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        total = time.perf_counter() - self._started
        return {f"time/{phase}": seconds for phase, seconds in self._seconds.items()} | {"time/total": total}


def step_metrics(
    learner: Learner,
    groups: Groups,
    old: OldPolicy,
    signal: Signal,
    updates: Sequence[Update],
    skipped: int,
) -> dict[str, Any]:
    """A step's metrics; `skipped` updates, not applied and not among `updates`, are only counted."""
    batch = groups.batch
    return {
        **reward_metrics(groups),
        **response_metrics(groups),
        "entropy": masked_mean(old.entropy_BT, batch.response_mask_BT),
        **metrics_over(learner, old, signal, updates),
        **sampler_metrics(learner, groups, old),
        **signal.metrics,
        **update_metrics(updates, skipped),
        **routing_metrics(old.trace, groups.trace, batch.routing_rows_BT),
    }


def reward_metrics(groups: Groups) -> dict[str, float]:
    """Mean over all sampled responses; of the batch, the spread and the share of groups without signal."""
    return {
        "reward/mean": groups.sampled_reward,
        "reward/std": groups.rewards_PG.std(correction=0).item(),
        "reward/zero_std_groups": 1.0 - groups.has_signal_P.float().mean().item(),
        "rollout/rounds": float(groups.rounds),
        **by_turn("reward/", groups.turn_rewards_PGN.flatten(0, 1)),
    }


def response_metrics(groups: Groups) -> dict[str, float]:
    """Mean length in tokens (stop tokens included), the same of responses rewarded above and below their
    group's mean where there are any, and the share of responses without a stop token."""
    batch, by_reward = groups.batch, {}
    lengths_PG = batch.response_lengths_B.cpu().view_as(groups.rewards_PG)
    above_PG = groups.rewards_PG - groups.rewards_PG.mean(1, keepdim=True)
    for name, part_PG in (("better", above_PG > 0), ("worse", above_PG < 0)):
        part_PG = part_PG & groups.has_signal_P[:, None]
        if part_PG.any():
            by_reward[f"response/length_{name}"] = lengths_PG[part_PG].mean().item()
    return by_reward | {
        "response/length": batch.response_lengths_B.mean().item(),
        "response/truncated": 1.0 - batch.finished_B.float().mean().item(),
    }


def sampler_metrics(learner: Learner, groups: Groups, old: OldPolicy) -> dict[str, float]:
    """How far the trainer's π_old is from the sampler, where the trainer's forward was run; under partial
    rollout also on the tokens of older weights and on the others, where there are any, and the share of the
    first."""
    batch = groups.batch
    found: dict[str, float] = {}
    if old.trainer_logp_BT is not None:
        found |= mismatch_metrics(old.trainer_logp_BT, batch.sampler_logp_BT, batch.response_mask_BT)
    if learner.config.rollout.ahead and batch.version_BT is not None:
        on_BT = batch.response_mask_BT > 0
        older_BT = on_BT & (batch.version_BT < groups.version)
        found["rollout/older_tokens"] = older_BT.sum().item() / max(on_BT.sum().item(), 1)
        for name, part_BT in (("older", older_BT), ("current", on_BT & ~older_BT)):
            if old.trainer_logp_BT is not None and part_BT.any():
                of_part = mismatch_metrics(old.trainer_logp_BT, batch.sampler_logp_BT, part_BT)
                for metric in ("mismatch/kl_k3", "mismatch/logp_abs_diff_mean"):
                    found[f"{metric}_{name}"] = of_part[metric]
    return found


def masked_mean(values_BT: Tensor, mask_BT: Tensor) -> float:
    """Mean over masked-in tokens; 0 where there are none."""
    return (torch.where(mask_BT > 0, values_BT, 0.0).sum() / mask_BT.sum().clamp_min(1)).item()


def routing_metrics(
    old: RoutingTrace | None, rollout: RoutingTrace | None, on_response: Tensor
) -> dict[str, float]:
    """Of π_old's native routing on the response rows: load imbalance, and the sampler's disagreement.

    `load/max_violation`: the busiest expert's load over the mean load, minus 1, mean of layers.
    `mismatch/experts`: share of experts that differ between the sampler's decoding and the trainer's forward.
    """
    if old is None:
        return {}
    old = old.where(on_response)
    found = {"load/max_violation": max_violation(expert_load(old))}
    if rollout is not None:
        found["mismatch/experts"] = expert_change(rollout.where(on_response), old).experts
    return found


def update_metrics(updates: Sequence[Update], skipped: int) -> dict[str, Any]:
    """A step's updates in one record; `skipped` ones were left out of it and not applied.

    `loss`, `aux_loss` and `grad_norm` are means over updates, `grad_norm_max` the largest norm before
    clipping, NaN where all were skipped, `lr` the last. `drift/first` is the experts changed after the first
    update, `drift/old` after the last (both against π_old), `drift/step` against the policy just before each
    update, over all updates.
    """
    found: dict[str, Any] = {
        "loss": mean(u.loss for u in updates) if updates else math.nan,
        "grad_norm": mean(u.grad_norm for u in updates) if updates else math.nan,
        "grad_norm_max": max((u.grad_norm for u in updates), default=math.nan),
        "updates/skipped": skipped,
    }
    if updates:
        found["lr"] = updates[-1].lr
    balanced = [u.aux_loss for u in updates if u.aux_loss is not None]
    if balanced:
        found["aux_loss"] = mean(balanced)
    since_old = [u.since_old for u in updates if u.since_old is not None]
    since_last = [u.since_last for u in updates if u.since_last is not None]
    overridden = [u.overridden for u in updates if u.overridden is not None]
    followed = [u.followed for u in updates if u.followed is not None]
    if since_old and since_last:
        found["drift/first"] = since_old[0].experts
        found |= drift_metrics("drift/old", since_old[-1])
        found |= drift_metrics("drift/step", ExpertChange.combine(since_last))
    if overridden and followed:
        found["replay/overridden"] = ExpertChange.combine(overridden).experts
        found["replay/replaced"] = ExpertChange.combine(followed).experts
    return found
