"""What the updates of one rollout batch learn from: advantages, the tokens that count, fixed tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_rl.objectives import gae, group_advantages
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.config import MismatchConfig
from moe_rl.training.groups import Groups, overlong_penalty
from moe_rl.training.learner import Learner
from moe_rl.training.passes import OldPolicy, Plan, reference_logp
from moe_rl.training.turns import finite_turn_advantages


@dataclass(frozen=True)
class Signal:
    """`advantages` [B], or [B, T] with a value model or by turn; `mask_BT` 1 on the tokens that count;
    `tensors` [B, T] are the objective's keyword tensors known before the updates; `metrics` of what changed
    them."""

    advantages: Tensor
    mask_BT: Tensor
    tensors: dict[str, Tensor]
    metrics: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, rows: slice | Tensor) -> Signal:
        """The same for some sequences."""
        tensors = {name: tensor[rows] for name, tensor in self.tensors.items()}
        return Signal(self.advantages[rows], self.mask_BT[rows], tensors)


@torch.no_grad()
def learning_signal(learner: Learner, groups: Groups, old: OldPolicy, plan: Plan) -> Signal:
    """Advantages from the groups' rewards, and the tensors the objective needs from before the updates."""
    batch, rewards_PG, rollout = groups.batch, groups.rewards_PG, learner.config.rollout
    mask_BT, tensors, metrics = batch.response_mask_BT, {}, {}
    if rollout.overlong_cache is not None:
        lengths_B = batch.response_lengths_B.cpu()
        penalty_B = overlong_penalty(lengths_B, rollout.max_new_tokens, rollout.overlong_cache)
        rewards_PG = rewards_PG + penalty_B.view_as(rewards_PG)
        metrics["reward/overlong_penalty"] = penalty_B.mean().item()
    if "sampler_logp_BT" in learner.needs:
        tensors["sampler_logp_BT"] = batch.sampler_logp_BT
    if learner.reference is not None:
        tensors["ref_logp_BT"] = reference_logp(
            learner.reference, batch, plan, rollout.temperature, learner.share_prompts
        )
    if learner.config.advantages_by == "turn":
        assert batch.turn_BT is not None
        advantages = finite_turn_advantages(
            groups.turn_rewards_PGN, batch.turn_BT, learner.config.advantages
        ).float()
    elif old.values_BT is None:
        advantages = advantages_of(rewards_PG, learner.config.advantages).reshape(-1)
    else:
        rewards_BT = at_last_token(rewards_PG.reshape(-1).to(mask_BT.device), mask_BT)
        advantages, returns_BT = gae(rewards_BT, old.values_BT, mask_BT, whiten=True)
        tensors |= {"old_values_BT": old.values_BT, "returns_BT": returns_BT}
    mask_BT, weights, mismatch = correct_mismatch(learner.config.mismatch, batch, old)
    return Signal(advantages.to(mask_BT.device), mask_BT, tensors | weights, metrics | mismatch)


def advantages_of(rewards_PG: Tensor, normalise: str) -> Tensor:
    """`group_advantages` [P, G], NaN for a group with a reward that is not finite; for "none" the rewards,
    NaN where they are not finite.

    So the update with that group is not finite, and `optim.nonfinite` decides what becomes of it.
    """
    if normalise == "none":
        return torch.where(rewards_PG.isfinite(), rewards_PG, math.nan)
    finite_P = rewards_PG.isfinite().all(-1, keepdim=True)
    advantages_PG = group_advantages(torch.where(finite_P, rewards_PG, 0.0), normalise=normalise)
    return torch.where(finite_P, advantages_PG, math.nan)


def at_last_token(rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Rewards [B, T] that sit on the last response token."""
    columns_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    last_B = (columns_T * mask_BT).argmax(-1)
    rewards_BT = torch.zeros_like(mask_BT)
    rewards_BT[torch.arange(len(rewards_B), device=mask_BT.device), last_B] = rewards_B
    return rewards_BT * mask_BT


def correct_mismatch(
    config: MismatchConfig, batch: RolloutBatch, old: OldPolicy
) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """The mask that is left, the weights as a keyword tensor, and metrics, by the configured correction."""
    correct = config.build()
    if correct is None:
        return batch.response_mask_BT, {}, {}
    correction = correct(old.logp_BT, batch.sampler_logp_BT, batch.response_mask_BT)
    mask_BT = correction.mask.to(batch.response_mask_BT.dtype)
    return mask_BT, {"weights_BT": correction.weights}, correction.metrics
