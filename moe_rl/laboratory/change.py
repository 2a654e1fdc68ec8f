"""How much routing differs between two passes over the same tokens: each metric by response, layer, position.

Of a (token, layer), with A and B the old and the new expert sets:

experts        1 - |A ∩ B| / K; its mean is the "roughly 10%" of GSPO (arXiv 2507.18071, 5.3)
sets           whether A and B differ at all
tokens         of a token: whether the sets differ in at least one layer; of one layer alone this is `sets`
top1           whether the expert with the largest gate weight is another one
gate_mass      ½ Σ_e |w_old(e) - w_new(e)|, the weights of each pass normalised to sum to 1 over its K
               experts: the share of the mixture that moved to other experts, 0 to 1
router_shift   of a token: γ = exp(-mean over layers and old experts of |Δ log softmax router|), RSPO's ratio
               in (0, 1] (arXiv 2510.23027, Eq. 5); of one layer alone, γ with only this layer. 1: no change

The first three need traces. `top1` and `gate_mass` need gate weights, `router_shift` the routers' log-probs:
a metric whose inputs either pass lacks is absent from the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.laboratory.observe import RoutedPass
from moe_rl.laboratory.sums import LayerTable, ResponseSums, cat_groups, require_groups
from moe_rl.objectives import router_shift
from moe_rl.routing import RoutingError, RoutingTrace

_NUMBERS_PER_CHUNK = 1 << 20  # bounds memory


@dataclass(frozen=True, eq=False)
class DriftTable(LayerTable):
    """The metrics above, as sums over the rows of each response, on the CPU.

    layer_sums      float64 [B, L] for each metric
    position_sums   float64 [B, P] for each metric, of a token over all layers; position 0 is the response's
                    first row in `rows_BT`
    rows_BP         float64 [B, P]: 1 where a row was compared
    groups_B        int64 [B]: the prompt of each response; None if not given
    """

    layer_ids: tuple[int, ...]
    top_k: int
    layer_sums: Mapping[str, Tensor]
    position_sums: Mapping[str, Tensor]
    rows_BP: Tensor
    groups_B: Tensor | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self.layer_sums)

    def whole(self, metric: str) -> ResponseSums:
        by_position = self.positions(metric)
        return ResponseSums(
            by_position.sums_BC.sum(1, keepdim=True),
            by_position.counts_BC.sum(1, keepdim=True),
            self.groups_B,
        )

    def layers(self, metric: str) -> ResponseSums:
        sums_BL = self._of(self.layer_sums, metric)
        per_row = self.top_k if metric == "experts" else 1
        return ResponseSums(
            sums_BL, (per_row * self.rows_BP.sum(1, keepdim=True)).expand_as(sums_BL), self.groups_B
        )

    def positions(self, metric: str) -> ResponseSums:
        """A column for each position in the response: the metric over all layers at this position."""
        L = len(self.layer_ids)
        per_row = {"experts": L * self.top_k, "tokens": 1, "router_shift": 1}.get(metric, L)
        return ResponseSums(self._of(self.position_sums, metric), per_row * self.rows_BP, self.groups_B)

    def by_position(self, metric: str) -> Tensor:
        """float64 [P]: the metric at each position, over the responses that reach it."""
        return self.positions(metric).values

    @staticmethod
    def cat(tables: Sequence[DriftTable]) -> DriftTable:
        """The table of all responses of `tables`, with the metrics that all have.

        Prompt ids must differ between tables that answer different prompts. Raises RoutingError for tables of
        different models.
        """
        if not tables:
            raise RoutingError("cat needs at least one DriftTable")
        first = tables[0]
        if any((table.layer_ids, table.top_k) != (first.layer_ids, first.top_k) for table in tables):
            raise RoutingError("drift tables of different layers or K cannot be joined")
        P = max(table.rows_BP.shape[1] for table in tables)
        metrics = [m for m in first.metrics if all(m in table.metrics for table in tables)]

        def padded(rows_BP: Tensor) -> Tensor:
            return torch.nn.functional.pad(rows_BP, (0, P - rows_BP.shape[1]))

        return DriftTable(
            first.layer_ids,
            first.top_k,
            {m: torch.cat([table.layer_sums[m] for table in tables]) for m in metrics},
            {m: torch.cat([padded(table.position_sums[m]) for table in tables]) for m in metrics},
            torch.cat([padded(table.rows_BP) for table in tables]),
            cat_groups([table.groups_B for table in tables]),
        )


@torch.no_grad()
def measure_change(
    old: RoutedPass | RoutingTrace,
    new: RoutedPass | RoutingTrace,
    rows_BT: Tensor,
    groups_B: Tensor | None = None,
) -> DriftTable:
    """The change from `old` to `new` over the rows of `rows_BT` (bool or 0/1, [B, T]) valid in both.

    Pass `batch.routing_rows_BT` for the rows that score the response; the prompt's and the response's rows
    belong in tables of their own. `groups_B` says which prompt each response answers. Raises RoutingError
    when [B, T], layers, E or K differ, and when no row is left to compare.
    """
    if isinstance(old, RoutingTrace) or isinstance(new, RoutingTrace):
        old, new = _traces_alone(old), _traces_alone(new)
    kept_BT = comparable_rows(old.trace, new.trace, rows_BT)
    B, L, K = len(kept_BT), len(old.trace.layer_ids), old.trace.top_k
    position_BT = rows_BT.cpu().bool().cumsum(1) - 1
    sequence_N, column_N = kept_BT.nonzero(as_tuple=True)
    position_N = position_BT[sequence_N, column_N]
    P = int(position_N.max()) + 1
    layer_sums: dict[str, Tensor] = {}
    position_sums: dict[str, Tensor] = {}
    rows_BP = torch.zeros(B, P, dtype=torch.float64)
    rows_BP[sequence_N, position_N] = 1
    for chunk in torch.arange(len(sequence_N)).split(
        max(1, _NUMBERS_PER_CHUNK // (L * max(old.trace.num_experts, K * K)))
    ):
        at = (sequence_N[chunk], column_N[chunk])
        for metric, (by_layer_NL, whole_N) in _metrics(old, new, at).items():
            layer_sums.setdefault(metric, torch.zeros(B, L, dtype=torch.float64)).index_add_(
                0, at[0], by_layer_NL.double()
            )
            position_sums.setdefault(metric, torch.zeros(B, P, dtype=torch.float64))[
                at[0], position_N[chunk]
            ] = whole_N.double()
    return DriftTable(old.trace.layer_ids, K, layer_sums, position_sums, rows_BP, require_groups(groups_B, B))


def comparable_rows(old: RoutingTrace, new: RoutingTrace, rows_BT: Tensor) -> Tensor:
    """bool [B, T] on the CPU: the rows asked for that are valid in both traces.

    Raises RoutingError for traces of other models or tokens, another shape of rows, and when none is left.
    """
    old.require_same_model(new)
    if not old.valid.shape == new.valid.shape == rows_BT.shape:
        raise RoutingError(
            "both traces and the rows to compare must be of the same tokens, got [B, T] = "
            f"{list(old.valid.shape)}, {list(new.valid.shape)} and {list(rows_BT.shape)}"
        )
    kept_BT = rows_BT.cpu().bool() & old.valid.cpu() & new.valid.cpu()
    if not bool(kept_BT.any()):
        raise RoutingError("no row that was asked for is valid in both traces: there is nothing to compare")
    return kept_BT


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """int64 [...]: |A ∩ B| of ids [..., K], which are distinct within a set."""
    return (a[..., :, None] == b[..., None, :]).flatten(-2).sum(-1)


def _traces_alone(of: RoutedPass | RoutingTrace) -> RoutedPass:
    trace = of if isinstance(of, RoutingTrace) else of.trace
    return RoutedPass(trace, torch.empty(0))


def _metrics(old: RoutedPass, new: RoutedPass, at: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of some rows, what each metric adds by layer [N, L] and over all layers [N]."""
    a_NLK, b_NLK = (one.trace.experts[at].cpu().long() for one in (old, new))
    changed_NL = a_NLK.shape[-1] - overlap(a_NLK, b_NLK)
    sets_NL = changed_NL > 0
    found = {
        "experts": (changed_NL, changed_NL.sum(1)),
        "sets": (sets_NL, sets_NL.sum(1)),
        "tokens": (sets_NL, sets_NL.any(1)),
    }
    if old.weights_BTLK is not None and new.weights_BTLK is not None:
        a_weights_NLK, b_weights_NLK = (
            one.weights_BTLK[at].double() for one in (old, new) if one.weights_BTLK is not None
        )
        top1_NL = _largest(a_NLK, a_weights_NLK) != _largest(b_NLK, b_weights_NLK)
        moved_NL = _mass_moved(a_NLK, a_weights_NLK, b_NLK, b_weights_NLK, old.trace.num_experts)
        found["top1"] = (top1_NL, top1_NL.sum(1))
        found["gate_mass"] = (moved_NL, moved_NL.sum(1))
    if old.router_logp_BTLE is not None and new.router_logp_BTLE is not None:
        a_logp_NLK, b_logp_NLK = (
            one.router_logp_BTLE[at].double().gather(-1, a_NLK)
            for one in (old, new)
            if one.router_logp_BTLE is not None
        )
        alone_NL = router_shift(a_logp_NLK[:, :, None], b_logp_NLK[:, :, None])
        found["router_shift"] = (alone_NL, router_shift(a_logp_NLK[None], b_logp_NLK[None])[0])
    return found


def _largest(ids_NLK: Tensor, weights_NLK: Tensor) -> Tensor:
    """[N, L]: the expert with the largest gate weight."""
    return ids_NLK.gather(-1, weights_NLK.argmax(-1, keepdim=True)).squeeze(-1)


def _mass_moved(
    a_NLK: Tensor, a_weights_NLK: Tensor, b_NLK: Tensor, b_weights_NLK: Tensor, num_experts: int
) -> Tensor:
    """[N, L]: ½ Σ_e |difference| of the normalised gate weights; 0 between the same weights, exactly."""
    difference_NLE = a_weights_NLK.new_zeros(*a_NLK.shape[:2], num_experts)
    difference_NLE.scatter_add_(-1, a_NLK, _normalised(a_weights_NLK))
    difference_NLE.scatter_add_(-1, b_NLK, -_normalised(b_weights_NLK))
    return difference_NLE.abs().sum(-1) / 2


def _normalised(weights_NLK: Tensor) -> Tensor:
    # A skip expert (Zaya) has weight 0, and nothing to share out.
    total_NL1 = weights_NLK.sum(-1, keepdim=True)
    return torch.where(total_NL1 == 0, 0.0, weights_NLK / total_NL1)
