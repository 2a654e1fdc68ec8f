"""Objectives that weight every token by its own ratio."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_rl.objectives.base import Objective, Surrogate, clipped_objective
from moe_rl.objectives.batch import Batch


@dataclass(frozen=True, kw_only=True)
class GRPO(Objective):
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with a ratio r per token (GSPO paper Eq. 2).

    Widths default to the GSPO paper's tuned baseline, 0.2 and 0.27 (§5.1).
    """

    clip_low: float = 0.2
    clip_high: float = 0.27

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        return Surrogate(
            *clipped_objective(batch.log_ratio, batch.advantages, 1 - self.clip_low, 1 + self.clip_high)
        )
