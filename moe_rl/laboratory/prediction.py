"""Which experts change, as the derivative of the router scores along the update predicts it.

With Δθ = θ_new - θ_old the predicted scores are s(θ_old) + ∂s/∂θ Δθ, the predicted experts their top-k, and a
(token, layer) is predicted to change where these differ from the old ones.

The derivative is a central difference along Δθ, (s(θ_old + ε Δθ) - s(θ_old - ε Δθ)) / 2ε, with the old
experts replayed in both forwards: so it stays on the smooth branch on which θ_old lies, instead of jumping
where a near tie flips below. Forward-mode differentiation (torch.func.jvp) gives the same derivative without
an ε, but the kernels in use do not have it (grouped matrix products, fused attention), while two more
forwards ask nothing of a model. What is left out is what first order leaves out: curvature, the jump in the
hidden states above a changed expert, and a change of expert groups where a family limits routing to some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.laboratory.change import comparable_rows, overlap
from moe_rl.laboratory.margins import require_scores, router_margins
from moe_rl.laboratory.observe import RoutedPass
from moe_rl.laboratory.sums import LayerTable, ResponseSums, require_groups
from moe_rl.laboratory.weights import Weights, along, at_weights, relative_update, snapshot
from moe_rl.routing import RoutingError, RoutingTrace, record_routing, replay_routing
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.passes import Plan, flat
from moe_rl.training.policy import score

RELATIVE_STEP = 1e-3  # ‖ε Δθ‖ / ‖θ‖: far above float32's rounding of weights and scores, and still small
METHODS = ("first_order", "margin_only")


@dataclass(frozen=True, eq=False)
class PredictionTable(LayerTable):
    """How well changes were predicted, as counts over the rows of each response, by layer.

    Metrics, shares of (token, layer), for each method: `precision` (of those predicted to change, how many
    did) and `recall` (of those that changed, how many were predicted), as `first_order/precision` and so on.
    nan where nothing was predicted, or nothing changed.

    first_order   the top-k of the predicted scores differs from the old one
    margin_only   the tokens with the smallest old margins, in each layer as many as first_order predicts:
                  what is known without the update's direction

    hits, predicted   int64 [B, L] for each method; changed  int64 [B, L]
    """

    layer_ids: tuple[int, ...]
    hits: Mapping[str, Tensor]
    predicted: Mapping[str, Tensor]
    changed: Tensor
    groups_B: Tensor | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(f"{method}/{rate}" for method in METHODS for rate in ("precision", "recall"))

    def layers(self, metric: str) -> ResponseSums:
        method, _, rate = metric.partition("/")
        hits_BL = self._of(self.hits, metric if rate not in ("precision", "recall") else method)
        among_BL = self.predicted[method] if rate == "precision" else self.changed
        return ResponseSums(hits_BL.double(), among_BL.double(), self.groups_B)

    def whole(self, metric: str) -> ResponseSums:
        by_layer = self.layers(metric)
        return ResponseSums(
            by_layer.sums_BC.sum(1, keepdim=True), by_layer.counts_BC.sum(1, keepdim=True), self.groups_B
        )


@torch.no_grad()
def first_order_change(
    model: PreTrainedModel,
    old_weights: Weights,
    old: RoutedPass,
    batch: RolloutBatch,
    plan: Plan,
    *,
    relative_step: float = RELATIVE_STEP,
) -> Tensor:
    """The first-order change of the selection scores, ∂s/∂θ Δθ: [B, T, L, E] on the CPU, in two forwards.

    `model` is at θ_new and is there again afterwards, bit for bit; `old_weights` is its `snapshot` at θ_old,
    where `old` was observed. 0 where an expert is outside the chosen groups, and where nothing changed.
    """
    new_weights = snapshot(model)
    update = relative_update(old_weights, model)
    if update == 0:
        return torch.zeros_like(require_scores(old))
    step = relative_step / update
    ahead, behind = (
        _scores_at(model, along(old_weights, new_weights, side * step), old.trace, batch, plan)
        for side in (1, -1)
    )
    change = (ahead - behind) / (2 * step)
    return change.nan_to_num_(0.0, 0.0, 0.0)  # -inf - -inf outside the chosen groups, ±inf where groups flip


def measure_prediction(
    old: RoutedPass,
    new: RoutedPass | RoutingTrace,
    change_BTLE: Tensor,
    rows_BT: Tensor,
    groups_B: Tensor | None = None,
) -> PredictionTable:
    """Compare the changes that `first_order_change` predicts with those from `old` to `new`, over `rows_BT`.

    Raises RoutingError when `old` has no scores, and as `measure_change` does.
    """
    scores_BTLE = require_scores(old)
    if change_BTLE.shape != scores_BTLE.shape:
        raise RoutingError(
            f"the change of the scores must be [B, T, L, E] = {list(scores_BTLE.shape)}, "
            f"got {list(change_BTLE.shape)}"
        )
    new_trace = new if isinstance(new, RoutingTrace) else new.trace
    kept_BT = comparable_rows(old.trace, new_trace, rows_BT)
    K = old.trace.top_k
    scores_NLE, before_NLK = scores_BTLE[kept_BT], old.trace.experts[kept_BT].cpu().long()
    after_NLK = new_trace.experts[kept_BT].cpu().long()
    expected_NLK = (scores_NLE + change_BTLE[kept_BT]).topk(K, dim=-1).indices
    changed_NL = overlap(before_NLK, after_NLK) < K
    predicted = {"first_order": overlap(before_NLK, expected_NLK) < K}
    rank_NL = router_margins(scores_NLE, K).argsort(dim=0, stable=True).argsort(dim=0)
    predicted["margin_only"] = rank_NL < predicted["first_order"].sum(0)

    def by_response(found_NL: Tensor) -> Tensor:
        sums_BL = torch.zeros(len(kept_BT), found_NL.shape[1], dtype=torch.long)
        return sums_BL.index_add_(0, kept_BT.nonzero()[:, 0], found_NL.long())

    return PredictionTable(
        old.trace.layer_ids,
        {method: by_response(found & changed_NL) for method, found in predicted.items()},
        {method: by_response(found) for method, found in predicted.items()},
        by_response(changed_NL),
        require_groups(groups_B, len(kept_BT)),
    )


def _scores_at(
    model: PreTrainedModel, weights: Weights, trace: RoutingTrace, batch: RolloutBatch, plan: Plan
) -> Tensor:
    """[B, T, L, E]: the routers' own scores at other weights, with every token on the experts of `trace`."""
    parts = []
    with at_weights(model, weights):
        for rows in flat(plan):
            with (
                replay_routing(model, trace[rows], native=False),
                record_routing(model, scores=True) as recorder,
            ):
                score(model, batch[rows], temperature=1.0)
            parts.append(recorder.scores().cpu())
    return torch.cat(parts)
