"""Log-ratios in units of an objective's clip range: at 1 the objective begins to clip.

GRPO clips the ratio of a token, GSPO that of a response, exp of the mean token log-ratio (arXiv 2507.18071,
Eq. 2, 5 and 7). The same log-ratio is therefore small for one and large for the other, and only in these
units can the error of a sampler, or the step of an update, be compared between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.laboratory.sums import ResponseSums
from moe_rl.objectives import get_objective


@dataclass(frozen=True)
class ClipRange:
    """The interval [1 - low, 1 + high] of ratios that an objective leaves alone."""

    low: float
    high: float

    @staticmethod
    def of(objective: str) -> ClipRange:
        """The default range of an objective, which is its paper's."""
        found = get_objective(objective)
        return ClipRange(float(getattr(found, "clip_low")), float(getattr(found, "clip_high")))  # noqa: B009

    def units(self, log_ratio: Tensor) -> Tensor:
        """|log ratio| over that of the bound on its side, log(1 + high) or -log(1 - low); outside above 1."""
        up, down = math.log1p(self.high), math.log1p(-self.low)
        return torch.where(log_ratio >= 0, log_ratio / up, log_ratio / down)


RANGES = {name: ClipRange.of(name) for name in ("grpo", "gspo")}


def clip_unit_sums(
    log_ratio_BT: Tensor, mask_BT: Tensor, groups_B: Tensor | None = None
) -> dict[str, ResponseSums]:
    """By metric, one column of sums over response tokens, or over responses that have any.

    token/log_sq, sequence/log_sq    mean of d² and of m², nats²: d the log-ratio of a token, m the mean over
                                     the response, log s of GSPO Eq. 7
    <objective>/token, …/sequence    mean of |d| and |m| in clip units of grpo and of gspo
    …_outside                        share of tokens, or responses, outside the range, whatever the sign of
                                     the advantage
    """
    mask_BT = mask_BT.cpu().double()
    tokens_B = mask_BT.sum(1)
    token_BT = torch.where(mask_BT > 0, log_ratio_BT.cpu().double(), 0.0)
    one_B = (tokens_B > 0).double()
    sequence_B = token_BT.sum(1) / tokens_B.clamp(min=1)
    sums = {
        "token/log_sq": (token_BT.square().sum(1), tokens_B),
        "sequence/log_sq": (sequence_B.square(), one_B),
    }
    for name, clip in RANGES.items():
        units_BT, units_B = clip.units(token_BT), clip.units(sequence_B)
        sums[f"{name}/token"] = (units_BT.sum(1), tokens_B)
        sums[f"{name}/token_outside"] = ((units_BT > 1).double().sum(1), tokens_B)
        sums[f"{name}/sequence"] = (units_B, one_B)
        sums[f"{name}/sequence_outside"] = ((units_B > 1).double(), one_B)
    return {
        metric: ResponseSums(sums_B[:, None], counts_B[:, None], groups_B)
        for metric, (sums_B, counts_B) in sums.items()
    }
