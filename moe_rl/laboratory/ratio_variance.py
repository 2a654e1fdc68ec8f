"""How much of the token log-ratio comes from expert change: the new policy on its own and on the old experts.

With d = log π_new - log π_old of a token under native routing and d̃ the same with the old experts replayed in
the new policy's forward, d - d̃ is what the change of experts adds: at this token, and at those it attends to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.laboratory.change import comparable_rows, overlap
from moe_rl.laboratory.observe import RoutedPass
from moe_rl.laboratory.sums import ResponseSums, Table, require_groups
from moe_rl.routing import RoutingError, replay_routing
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.passes import Plan, flat
from moe_rl.training.policy import score


@dataclass(frozen=True, eq=False)
class RatioVariance(Table):
    """Sums over the response tokens of each sequence, float64 [B]; `changed` of the tokens whose experts did.

    A token's experts are those of the row that produced it, and changed if any layer's set did. Metrics:

    native, replayed, routing    mean of d², d̃² and (d - d̃)², nats²
    native/changed, …/unchanged  mean of d² over the tokens whose experts changed, and over the others;
    replayed/changed, …          the same of d̃²
    native/mean, replayed/mean   mean of d and d̃, nats: their variance is the mean square less this squared
    tokens_changed               share of tokens whose experts changed
    share_changed                share of Σ d² that lies on these tokens
    share_removed                1 - Σ d̃² / Σ d²: what replay takes away, negative where it adds

    sums      of d ("native/sum"), d² ("native") and so on, over all tokens and over the changed ones
    tokens, changed_tokens  how many there are
    """

    sums: Mapping[str, Tensor]
    changed_sums: Mapping[str, Tensor]
    tokens: Tensor
    changed_tokens: Tensor
    groups_B: Tensor | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self._ratios())

    def whole(self, metric: str) -> ResponseSums:
        ratios = self._ratios()
        if metric not in ratios:
            raise RoutingError(f"this table has no {metric!r}: it has {', '.join(ratios)}")
        sums_B, counts_B = ratios[metric]
        return ResponseSums(sums_B[:, None], counts_B[:, None], self.groups_B)

    def variance(self, routing: str) -> float:
        """Variance over tokens of d ("native") or d̃ ("replayed"), nats²."""
        return self.value(routing) - self.value(f"{routing}/mean") ** 2

    def _ratios(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The sums and counts [B] of each metric."""
        whole, changed = self.sums, self.changed_sums
        found = {name: (whole[name], self.tokens) for name in ("native", "replayed", "routing")}
        for name in ("native", "replayed"):
            found[f"{name}/changed"] = (changed[name], self.changed_tokens)
            found[f"{name}/unchanged"] = (whole[name] - changed[name], self.tokens - self.changed_tokens)
            found[f"{name}/mean"] = (whole[f"{name}/sum"], self.tokens)
        return found | {
            "tokens_changed": (self.changed_tokens, self.tokens),
            "share_changed": (changed["native"], whole["native"]),
            "share_removed": (whole["native"] - whole["replayed"], whole["native"]),
        }


@torch.no_grad()
def ratio_variance(
    model: PreTrainedModel,
    old: RoutedPass,
    new: RoutedPass,
    batch: RolloutBatch,
    plan: Plan,
    temperature: float,
    groups_B: Tensor | None = None,
) -> RatioVariance:
    """Compare the log-ratio of `new` to `old` with that of a forward of `model` on `old`'s experts.

    `model` is at the new weights, where `new` was observed on the same batch, plan and temperature. Raises
    RoutingError for passes of other models or tokens, and for a batch without response tokens.
    """
    replayed = []
    for rows in flat(plan):
        with replay_routing(model, old.trace[rows], native=False):
            replayed.append(score(model, batch[rows], temperature).logp_BT.cpu())
    return compare_ratios(old, new, torch.cat(replayed), batch, groups_B)


def compare_ratios(
    old: RoutedPass,
    new: RoutedPass,
    replayed_logp_BT: Tensor,
    batch: RolloutBatch,
    groups_B: Tensor | None = None,
) -> RatioVariance:
    """The table, from the log-probabilities [B, T] that the new policy gives on the old experts."""
    rows_BT = comparable_rows(old.trace, new.trace, batch.routing_rows_BT)
    before, after = (one.trace.experts.cpu().long() for one in (old, new))
    changed_BT = (overlap(before, after) < old.trace.top_k).any(-1)
    # The row that produced token t is t - 1.
    token_BT, changed_BT = (rows.roll(1, dims=1) for rows in (rows_BT, rows_BT & changed_BT))
    native_BT, replayed_BT = (
        torch.where(token_BT, logp_BT.cpu().double() - old.logp_BT.double(), 0.0)
        for logp_BT in (new.logp_BT, replayed_logp_BT)
    )
    summed = {
        "native": native_BT**2,
        "replayed": replayed_BT**2,
        "routing": (native_BT - replayed_BT) ** 2,
        "native/sum": native_BT,
        "replayed/sum": replayed_BT,
    }
    return RatioVariance(
        {name: values_BT.sum(1) for name, values_BT in summed.items()},
        {name: (values_BT * changed_BT).sum(1) for name, values_BT in summed.items()},
        token_BT.sum(1).double(),
        changed_BT.sum(1).double(),
        require_groups(groups_B, len(token_BT)),
    )
