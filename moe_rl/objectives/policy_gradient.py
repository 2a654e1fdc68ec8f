"""Objectives of the form sg[weight] A log pi: the ratio scales the gradient but carries none itself.

Their losses are not estimates of anything; only their gradients are meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_rl.objectives.base import Objective, Surrogate, outside_interval
from moe_rl.objectives.batch import Batch


@dataclass(frozen=True, kw_only=True)
class CISPO(Objective):
    """sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi: weights are capped, no token is dropped.

    The paper (2506.13585 Eq. 4 and 5) uses no lower bound, which is clip_low = 1, and does not print the
    upper one: 4.0 is the cap of 5 that TRL recommends. Since nothing is clipped away, clip_frac/token counts
    tokens whose weight is capped in the direction of A (TRL's count), clip_frac/token_signblind all capped
    ones (verl's).
    """

    clip_low: float = 1.0
    clip_high: float = 4.0
    aggregation: str = "token-mean"

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        low, high = 1 - self.clip_low, 1 + self.clip_high
        ratio_BT = batch.log_ratio.detach().exp()
        capped, outside = outside_interval(ratio_BT, batch.advantages, low, high)
        return Surrogate(ratio_BT.clamp(low, high) * batch.advantages * batch.logp, capped, outside)


@dataclass(frozen=True, kw_only=True)
class DPPOTotalVariation(Objective):
    """sg[min(r, ratio_cap)] A log pi, dropping tokens whose probability moved too far.

    The binary TV form of 2602.04879. Widths bound pi - pi_old, the TV of "this token or another":
    a token is dropped when its probability has grown by more than clip_high under A > 0 or shrunk by more
    than clip_low under A < 0.
    """

    clip_low: float = 0.15
    clip_high: float = 0.15
    ratio_cap: float = 20.0
    aggregation: str = "token-mean"

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        moved_BT = batch.logp.detach().exp() - batch.old_logp.exp()
        dropped, outside = outside_interval(moved_BT, batch.advantages, -self.clip_low, self.clip_high)
        return Surrogate(_kept_gradient(batch, dropped, self.ratio_cap), dropped, outside)


@dataclass(frozen=True, kw_only=True)
class DPPODivergence(Objective):
    """sg[min(r, ratio_cap)] A log pi, dropping tokens by their binary KL.

    The binary KL form of 2602.04879. Widths bound KL(pi_old || pi) of "this token or another", nats: a token
    is dropped when it exceeds clip_high with pi > pi_old under A > 0, or clip_low with pi < pi_old under
    A < 0.
    """

    clip_low: float = 0.05
    clip_high: float = 0.05
    ratio_cap: float = 20.0
    aggregation: str = "token-mean"

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        logp_BT = batch.logp.detach()
        divergence_BT = torch.sign(batch.log_ratio.detach()) * binary_kl(batch.old_logp, logp_BT)
        dropped, outside = outside_interval(divergence_BT, batch.advantages, -self.clip_low, self.clip_high)
        return Surrogate(_kept_gradient(batch, dropped, self.ratio_cap), dropped, outside)


@dataclass(frozen=True, kw_only=True)
class MiniRL(Objective):
    """M sg[min(pi / mu, ratio_cap)] A log pi, summed over tokens; mu is the sampler (2512.01374 Eq. 7).

    M drops tokens as GRPO's clip does, on pi / pi_old and the sign of A. The call takes sampler_logp_BT, the
    log-probabilities that the inference engine sampled with (old_logp_BT where it is the same model).
    Advantages are group_advantages(..., normalise="mean"). The cap is the paper's truncation at 5, read as
    acting on the whole token weight pi / mu.
    """

    clip_low: float = 0.2
    clip_high: float = 0.27
    ratio_cap: float = 5.0
    aggregation: str = "seq-mean-token-sum"

    needs: ClassVar[tuple[str, ...]] = ("sampler_logp_BT",)

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        ratio_BT = batch.log_ratio.detach().exp()
        dropped, outside = outside_interval(ratio_BT, batch.advantages, 1 - self.clip_low, 1 + self.clip_high)
        weight_BT = (batch.logp - tensors["sampler_logp_BT"]).detach().exp().clamp(max=self.ratio_cap)
        objective_BT = weight_BT.masked_fill(dropped, 0) * batch.advantages * batch.logp
        return Surrogate(objective_BT, dropped, outside)


def binary_kl(old_logp_BT: Tensor, logp_BT: Tensor) -> Tensor:
    """KL between the old and new chance of "this token or another", nats, from token log-probabilities.

    1e-8 stands in for the chance of another token when it is smaller than that, as in verl. Rounding may put
    a log-probability slightly above 0, where that chance would be negative: it counts as 0.
    """
    old_logp_BT, logp_BT = old_logp_BT.clamp(max=0), logp_BT.clamp(max=0)
    old_other_BT, other_BT = -torch.expm1(old_logp_BT), -torch.expm1(logp_BT)
    same_BT = old_logp_BT.exp() * (old_logp_BT - logp_BT)
    return same_BT + old_other_BT * torch.log((old_other_BT + 1e-8) / (other_BT + 1e-8))


def _kept_gradient(batch: Batch, dropped_BT: Tensor, ratio_cap: float) -> Tensor:
    weight_BT = batch.log_ratio.detach().exp().clamp(max=ratio_cap).masked_fill(dropped_BT, 0)
    return weight_BT * batch.advantages * batch.logp
