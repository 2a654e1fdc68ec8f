"""Objectives that clip per token in log space and then take the geometric mean over the response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_rl.objectives.aggregation import masked, sequence_mean
from moe_rl.objectives.base import Objective, Surrogate, outside_interval, token_mean
from moe_rl.objectives.batch import Batch


@dataclass(frozen=True, kw_only=True)
class GMPO(Objective):
    """exp(mean_t d_t) A, each token's log-ratio d clipped to [-clip_low, clip_high] on the side A pushes to.

    Widths are nats (2507.20673: ratios within exp(-0.4) to exp(0.4)). A clipped token has no gradient but
    still counts in the mean. Advantages [B, T] clip by their own sign and weight the response's ratio.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        clipped_log_ratio_BT, clipped_BT, outside_BT = self._clip(batch.log_ratio, batch.advantages)
        return Surrogate(
            geometric_mean(clipped_log_ratio_BT, batch) * batch.advantages, clipped_BT, outside_BT
        )

    def _clip(self, log_ratio_BT: Tensor, advantages_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        clipped_BT, outside_BT = outside_interval(
            log_ratio_BT.detach(), advantages_BT, -self.clip_low, self.clip_high
        )
        bound_BT = torch.full_like(log_ratio_BT, -self.clip_low).masked_fill(
            advantages_BT > 0, self.clip_high
        )
        return torch.where(clipped_BT, bound_BT, log_ratio_BT), clipped_BT, outside_BT


@dataclass(frozen=True, kw_only=True)
class RSPO(GMPO):
    """GMPO on ratios scaled by how far each token's routing has moved (2510.23027 v2, Eq. 5 to 11).

    The call takes router_shift_BT, the router-shift ratio gamma in (0, 1] that router_shift() gives, 1 where
    routing is unchanged. It is detached and floored at gamma_min. apply="pre_clip" scales before clipping, as
    v2 says; "post_clip" scales the clipped ratio, as v1 is summarised. ValueError on a gamma outside (0, 1].
    """

    gamma_min: float = 0.8
    apply: str = "pre_clip"

    needs: ClassVar[tuple[str, ...]] = ("router_shift_BT",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gamma_min <= 1:
            raise ValueError(f"gamma_min must be in (0, 1], got {self.gamma_min}")
        if self.apply not in ("pre_clip", "post_clip"):
            raise ValueError(f"unknown apply {self.apply!r}; known: pre_clip, post_clip")

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        gamma_BT = tensors["router_shift_BT"].detach()
        if not bool((((gamma_BT > 0) & (gamma_BT <= 1)) | ~batch.mask).all()):
            raise ValueError(
                "router_shift_BT is the ratio gamma = exp(-shift) and must lie in (0, 1] on response tokens: "
                "if you pass the shift itself, pass torch.exp(-shift)"
            )
        log_gamma_BT = masked(gamma_BT.clamp(min=self.gamma_min).log(), batch.mask)
        if self.apply == "pre_clip":
            log_ratio_BT, clipped_BT, outside_BT = self._clip(
                batch.log_ratio + log_gamma_BT, batch.advantages
            )
        else:
            log_ratio_BT, clipped_BT, outside_BT = self._clip(batch.log_ratio, batch.advantages)
            log_ratio_BT = log_ratio_BT + log_gamma_BT
        metrics = {
            "router_shift/gamma_mean": token_mean(gamma_BT, batch.mask),
            "router_shift/floored_frac": token_mean((gamma_BT < self.gamma_min).double(), batch.mask),
        }
        objective_BT = geometric_mean(log_ratio_BT, batch) * batch.advantages
        return Surrogate(objective_BT, clipped_BT, outside_BT, metrics=metrics)


@torch.no_grad()
def router_shift(old_BTLK: Tensor, new_BTLK: Tensor) -> Tensor:
    """RSPO's gamma in (0, 1], [B, T]: exp(-mean over layers and old experts of |change of log router p|).

    old_BTLK, new_BTLK: log-probabilities, nats, that the routers of the old and the new policy give the old
    policy's top-K experts, in the row that produced the token. Detached. Raises ValueError unless both have
    one shape [B, T, L, K].
    """
    if old_BTLK.ndim != 4 or old_BTLK.shape != new_BTLK.shape:
        raise ValueError(
            "router log-probabilities must both be [B, T, L, K], got "
            f"{tuple(old_BTLK.shape)} and {tuple(new_BTLK.shape)}"
        )
    return torch.exp(-(new_BTLK - old_BTLK).abs().mean((-1, -2)))


def geometric_mean(log_ratio_BT: Tensor, batch: Batch) -> Tensor:
    """exp(mean_t log-ratio) of each response at all its tokens, [B, T]."""
    mean_B = sequence_mean(log_ratio_BT, batch.mask)
    return masked(mean_B[:, None].expand_as(log_ratio_BT), batch.mask).exp()
