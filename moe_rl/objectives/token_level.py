"""Objectives that weight every token by its own ratio r, the gradient flowing through r."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.objectives.base import (
    Objective,
    Surrogate,
    beyond_dual_clip,
    clipped_objective,
    never,
    token_mean,
)
from moe_rl.objectives.batch import Batch


@dataclass(frozen=True, kw_only=True)
class GRPO(Objective):
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with a ratio r per token (GSPO paper Eq. 2).

    Widths default to the GSPO paper's tuned baseline, 0.2 and 0.27 (§5.1). dual_clip = c > 1 bounds the
    objective of tokens with A < 0 at c A (1912.09729; verl always does so, with c = 3).
    """

    clip_low: float = 0.2
    clip_high: float = 0.27
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip bounds the ratio and must exceed 1 + clip_high, got {self.dual_clip}"
            )

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        low, high = 1 - self.clip_low, 1 + self.clip_high
        clipped = clipped_objective(batch.log_ratio, batch.advantages, low, high, self.dual_clip)
        if self.dual_clip is None:
            return Surrogate(*clipped)
        capped_BT = beyond_dual_clip(batch.log_ratio.detach().exp(), batch.advantages, self.dual_clip)
        metrics = {"clip_frac/token_dual": token_mean(capped_BT.double(), batch.mask)}
        return Surrogate(*clipped, metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """GRPO with a higher right bound and every token of the mini-batch weighing the same (2503.14476).

    The method's overlong penalty and dynamic sampling belong to rewards and rollouts, not to the loss.
    """

    clip_high: float = 0.28
    aggregation: str = "token-mean"


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """GRPO divided by a constant length, so that length does not dilute a penalty (2503.20783).

    length_divisor (tokens) must be given. Its advantages are group_advantages(..., normalise="mean").
    """

    clip_high: float = 0.2
    aggregation: str = "seq-mean-token-sum-norm"


@dataclass(frozen=True, kw_only=True)
class SAPO(Objective):
    """A (4 / tau) sigmoid(tau (r - 1)): a soft gate in place of clipping (2511.20347).

    tau is tau_pos where A > 0 and tau_neg elsewhere. The gradient's weight is 1 at r = 1, whatever tau.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.tau_pos > 0 and self.tau_neg > 0):
            raise ValueError(
                f"tau_pos and tau_neg divide and must be > 0, got {self.tau_pos} and {self.tau_neg}"
            )

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        tau_BT = torch.full_like(batch.advantages, self.tau_neg).masked_fill(
            batch.advantages > 0, self.tau_pos
        )
        gate_BT = torch.sigmoid(tau_BT * (batch.log_ratio.exp() - 1)) * 4 / tau_BT
        unclipped_BT = never(gate_BT)
        return Surrogate(gate_BT * batch.advantages, unclipped_BT, unclipped_BT)
