"""PPO with a value model: the loss and generalised advantage estimation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from moe_rl.objectives.base import Surrogate, token_mean
from moe_rl.objectives.batch import Batch, check_mask, masked_float
from moe_rl.objectives.token_level import GRPO


@dataclass(frozen=True, kw_only=True)
class PPO(GRPO):
    """The clipped token objective (GSPO paper Eq. 1; 1707.06347 Eq. 7 and 9) and a clipped value loss.

    Advantages are [B, T], from gae(). The call takes values_BT (in training, with a gradient), old_values_BT
    (at rollout) and returns_BT. The value loss is value_coef / 2 * max((v - R)^2, (v' - R)^2) with v' within
    value_clip of the old value.
    """

    clip_high: float = 0.2
    aggregation: str = "token-mean"
    value_coef: float = 0.5
    value_clip: float = 0.5

    needs: ClassVar[tuple[str, ...]] = ("values_BT", "old_values_BT", "returns_BT")

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        values_BT, returns_BT = tensors["values_BT"], tensors["returns_BT"].detach()
        old_values_BT = tensors["old_values_BT"].detach()
        near_BT = old_values_BT + (values_BT - old_values_BT).clamp(-self.value_clip, self.value_clip)
        errors_BT, near_errors_BT = (values_BT - returns_BT).square(), (near_BT - returns_BT).square()
        value_loss_BT = 0.5 * torch.maximum(errors_BT, near_errors_BT)
        metrics = {
            "value/loss": token_mean(value_loss_BT, batch.mask),
            "value/aggregated": self._aggregate(value_loss_BT, batch),
            "value/clip_frac": token_mean((near_errors_BT > errors_BT).double(), batch.mask),
        }
        policy = super().surrogate(batch, tensors)
        penalty_BT = self.value_coef * value_loss_BT
        return replace(policy, penalty=penalty_BT, metrics=policy.metrics | metrics)


@torch.no_grad()
def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = False,
) -> tuple[Tensor, Tensor]:
    """(advantages_BT, returns_BT) by generalised advantage estimation (1506.02438 Eq. 16).

    rewards_BT, values_BT, mask_BT: [B, T]; tokens outside the mask are stepped over, so a prompt or a tool's
    text inside a response passes the next value through. Returns are advantages + values, before whitening.
    whiten scales advantages to mean 0 and sample standard deviation 1 over all response tokens; 1e-8 is added
    to the variance, as in verl. Outside the mask both are 0, and rewards there are not read: the reward of a
    response belongs on its last token inside the mask. Raises ValueError or TypeError as objectives do.
    """
    mask_BT = check_mask(mask_BT, rewards_BT.shape)
    rewards_BT = masked_float("rewards_BT", rewards_BT, mask_BT)
    values_BT = masked_float("values_BT", values_BT, mask_BT)
    next_value_B = values_BT.new_zeros(len(values_BT))
    advantage_B = torch.zeros_like(next_value_B)
    advantages_BT = torch.zeros_like(values_BT)
    for t in reversed(range(rewards_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        advantage_B = torch.where(mask_BT[:, t], delta_B + gamma * lam * advantage_B, advantage_B)
        next_value_B = torch.where(mask_BT[:, t], values_BT[:, t], next_value_B)
        advantages_BT[:, t] = advantage_B
    advantages_BT = advantages_BT.masked_fill(~mask_BT, 0)
    returns_BT = advantages_BT + values_BT
    if whiten:
        advantages_N = advantages_BT[mask_BT]
        if advantages_N.numel() < 2:
            raise ValueError(f"whitening needs two response tokens or more, got {advantages_N.numel()}")
        scaled_BT = (advantages_BT - advantages_N.mean()) * torch.rsqrt(advantages_N.var() + 1e-8)
        advantages_BT = scaled_BT.masked_fill(~mask_BT, 0)
    return advantages_BT, returns_BT
