"""Objectives that weight all tokens of a response by one ratio, s = exp(mean_t log r_t)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_rl.objectives.aggregation import masked, sequence_mean
from moe_rl.objectives.base import Objective, Surrogate, clipped_objective
from moe_rl.objectives.batch import Batch


def sequence_log_ratio(batch: Batch) -> Tensor:
    """log s_i at every response token, [B, T] in nats with 0 at padding (GSPO paper Eq. 7)."""
    log_ratio_B = sequence_mean(batch.log_ratio, batch.mask)
    return masked(log_ratio_B[:, None].expand_as(batch.log_ratio), batch.mask)


@dataclass(frozen=True, kw_only=True)
class GSPO(Objective):
    """min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s the length-normalised ratio (Eq. 5, 7 and 10).

    Widths default to the paper's 3e-4 and 4e-4 (§5.1). Advantages [B, T] that differ within a response are
    averaged over it after clipping; GSPO-token (Eq. 13) is the form that gives each token its own.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        return Surrogate(
            *clipped_objective(
                sequence_log_ratio(batch), batch.advantages, 1 - self.clip_low, 1 + self.clip_high
            )
        )


@dataclass(frozen=True, kw_only=True)
class GSPOToken(GSPO):
    """GSPO with an advantage per token: s_t = sg[s] pi_t / sg[pi_t] in the clipped form (Eq. 13 to 17).

    Equal to GSPO in value, clipping and gradient when the advantage is constant over a response.
    """

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        log_ratio_BT = sequence_log_ratio(batch).detach() + batch.logp - batch.logp.detach()
        return Surrogate(
            *clipped_objective(log_ratio_BT, batch.advantages, 1 - self.clip_low, 1 + self.clip_high)
        )
