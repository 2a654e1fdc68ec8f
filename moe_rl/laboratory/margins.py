"""The router's margin, by how much the last chosen expert beats the first one left out, and drift by it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.laboratory.change import comparable_rows, overlap
from moe_rl.laboratory.observe import RoutedPass
from moe_rl.laboratory.sums import ResponseSums, require_groups
from moe_rl.routing import RoutingError, RoutingTrace


def router_margins(scores: Tensor, top_k: int) -> Tensor:
    """[...]: the K-th largest minus the (K + 1)-th largest of selection scores [..., E].

    In the units that the family ranks in: probability, or logit. inf where the groups that were chosen hold K
    experts. Raises RoutingError where all experts are chosen.
    """
    if top_k >= scores.shape[-1]:
        raise RoutingError(
            f"with {top_k} of {scores.shape[-1]} experts chosen there is none left out, and no margin"
        )
    best = scores.topk(top_k + 1, dim=-1).values
    return best[..., top_k - 1] - best[..., top_k]


@dataclass(frozen=True, eq=False)
class MarginTable:
    """Drift by quantile of the old margin, quantile 0 the smallest margins, as sums over each response.

    Quantiles are taken within each layer, since margins differ in scale between layers: every layer adds as
    many tokens to each of the Q quantiles, but for one.

    experts, sets   a column for each quantile: 1 - |A ∩ B| / K, and whether the sets differ
    margins_LQ      float64: the median margin of the tokens in a quantile, by layer
    """

    layer_ids: tuple[int, ...]
    experts: ResponseSums
    sets: ResponseSums
    margins_LQ: Tensor


@torch.no_grad()
def drift_by_margin(
    old: RoutedPass,
    new: RoutedPass | RoutingTrace,
    rows_BT: Tensor,
    *,
    quantiles: int = 10,
    groups_B: Tensor | None = None,
) -> MarginTable:
    """Drift from `old` to `new` over the rows of `rows_BT` ([B, T]), by the margin the router had in `old`.

    Raises RoutingError when `old` has no scores, when fewer rows are left than quantiles, and as
    `measure_change` does.
    """
    scores_BTLE = require_scores(old)
    new_trace = new if isinstance(new, RoutingTrace) else new.trace
    kept_BT = comparable_rows(old.trace, new_trace, rows_BT)
    B, K, L, N = len(kept_BT), old.trace.top_k, len(old.trace.layer_ids), int(kept_BT.sum())
    if quantiles > N:
        raise RoutingError(f"{N} rows cannot be split into {quantiles} quantiles")
    margins_NL = router_margins(scores_BTLE[kept_BT], K).double()
    changed_NL = (
        K - overlap(old.trace.experts[kept_BT].cpu().long(), new_trace.experts[kept_BT].cpu().long())
    ).double()
    order_NL = margins_NL.argsort(dim=0, stable=True)
    of_rank_N = torch.arange(N) * quantiles // N
    quantile_NL = torch.empty_like(order_NL).scatter_(0, order_NL, of_rank_N[:, None].expand(N, L))

    cells_NL = (
        kept_BT.nonzero()[:, :1] * quantiles + quantile_NL
    )  # (response, quantile) of each (token, layer)

    def summed(values_NL: Tensor) -> Tensor:
        flat = torch.zeros(B * quantiles, dtype=torch.float64)
        return flat.index_add_(0, cells_NL.flatten(), values_NL.flatten()).view(B, quantiles)

    groups_B = require_groups(groups_B, B)
    counts_BQ = summed(torch.ones_like(margins_NL))
    sorted_NL = margins_NL.gather(0, order_NL)
    return MarginTable(
        old.trace.layer_ids,
        ResponseSums(summed(changed_NL), K * counts_BQ, groups_B),
        ResponseSums(summed((changed_NL > 0).double()), counts_BQ, groups_B),
        torch.stack([sorted_NL[of_rank_N == q].median(0).values for q in range(quantiles)], dim=1),
    )


def require_scores(of: RoutedPass) -> Tensor:
    """The selection scores of a pass. Raises RoutingError when it was observed without them."""
    if of.scores_BTLE is None:
        raise RoutingError("this pass has no selection scores: observe(..., scores=True)")
    return of.scores_BTLE
