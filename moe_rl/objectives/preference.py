"""Objectives that compare the responses of a prompt: one value per response, no clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from moe_rl.objectives.aggregation import masked, sequence_mean
from moe_rl.objectives.base import Objective, Surrogate, never
from moe_rl.objectives.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Comparison(Objective):
    """An objective whose value belongs to whole responses, so that only a mean over responses makes sense."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aggregation != "seq-mean-token-mean":
            raise ValueError(
                f"{type(self).__name__} has one value per response and averages those: aggregation must stay "
                f"seq-mean-token-mean, got {self.aggregation!r}"
            )

    def response_surrogate(self, values_B: Tensor, batch: Batch, metrics: dict[str, Tensor]) -> Surrogate:
        """The surrogate that gives all tokens of a response its value."""
        unclipped_BT = never(batch.logp)
        return Surrogate(values_B[:, None].expand_as(batch.logp), unclipped_BT, unclipped_BT, metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class Contrastive(Comparison):
    """Mean over groups of sum_i sigmoid(beta (Lambda_i - mean_G Lambda) A_i), Lambda = mean_t log r_t.

    A contrastive sequence score that one write-up calls GSPO; the GSPO paper (2507.18071) has no such thing,
    and no framework is known to ship it. The group_size responses of a prompt are next to each other, and a
    micro-batch holds whole groups. Responses without tokens are left out of their group's mean.
    """

    group_size: int
    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2:
            raise ValueError(
                f"contrastive compares responses: group_size must be 2 or more, got {self.group_size}"
            )

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        grouped = (_groups(batch, self.group_size), self.group_size)
        score_PG = sequence_mean(batch.log_ratio, batch.mask).reshape(grouped)
        present_PG = batch.mask.any(dim=1).reshape(grouped)
        centre_P1 = score_PG.sum(dim=1, keepdim=True) / present_PG.sum(dim=1, keepdim=True).clamp(min=1)
        advantage_PG = sequence_mean(batch.advantages, batch.mask).reshape(grouped)
        value_PG = torch.sigmoid(self.beta * (score_PG - centre_P1) * advantage_PG)
        # A sum over the group, where aggregation takes a mean over responses.
        return self.response_surrogate(self.group_size * value_PG.flatten(), batch, {})


@dataclass(frozen=True, kw_only=True)
class DPO(Comparison):
    """log sigmoid(beta (h_w - h_l)), h = sum_t log(pi / pi_ref), mean over pairs (2305.18290 Eq. 7).

    Rows 2i and 2i + 1 are a pair, and the one with the greater advantage is preferred; a pair of equal
    advantages, or with a response without tokens, has no loss but counts in the mean. The call takes
    ref_logp_BT; old_logp_BT enters the metrics alone. Whole pairs in every micro-batch.
    """

    beta: float = 0.1

    needs: ClassVar[tuple[str, ...]] = ("ref_logp_BT",)

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        paired = (_groups(batch, 2), 2)
        advantage_P2 = sequence_mean(batch.advantages, batch.mask).reshape(paired)
        preference_P = torch.sign(advantage_P2[:, 0] - advantage_P2[:, 1])
        compared_P = (preference_P != 0) & batch.mask.any(dim=1).reshape(paired).all(dim=1)
        reward_P2 = (
            masked(batch.logp - tensors["ref_logp_BT"].detach(), batch.mask).sum(dim=1).reshape(paired)
        )
        margin_P = self.beta * preference_P * (reward_P2[:, 0] - reward_P2[:, 1])
        value_P = torch.where(compared_P, logsigmoid(margin_P), torch.zeros_like(margin_P))
        pairs = compared_P.sum().clamp(min=1)
        metrics = {
            "preference/accuracy": ((margin_P > 0) & compared_P).sum() / pairs,
            "preference/margin": margin_P.masked_fill(~compared_P, 0).sum() / pairs,
        }
        return self.response_surrogate(value_P.repeat_interleave(2), batch, metrics)


def _groups(batch: Batch, size: int) -> int:
    groups, left_over = divmod(len(batch.logp), size)
    if left_over:
        raise ValueError(f"rows must come in whole groups of {size}, got {len(batch.logp)} rows")
    return groups
