"""Why experts changed: the router itself, or the hidden states it read (counterfactuals for each layer).

With A(θ, h) the experts that a router with weights θ chooses on hidden states h, a (token, layer) changed
from A(θ_old, h_old) to A(θ_new, h_new). Between them lie two choices that no forward made: the new router on
the old hidden states, A(θ_new, h_old), and the old router on the new ones, A(θ_old, h_new). A router is its
module with the biases it is called with; hidden states carry every change below it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_rl.laboratory.change import comparable_rows, overlap
from moe_rl.laboratory.sums import LayerTable, ResponseSums, require_groups
from moe_rl.routing import Router, RoutingError, RoutingTrace, find_routers, record_routing
from moe_rl.routing.gates import gate_of
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.passes import Plan, flat
from moe_rl.training.policy import score


@dataclass(frozen=True, eq=False)
class RouterCall:
    """One router call of a forward, on rows [N, D] or [B, T, D] of a micro-batch.

    router     index into `RouterInputs.routers`
    hidden     what the router read
    args       its further arguments: selection biases, flags
    kwargs     the same by name
    """

    router: int
    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class RouterInputs:
    """The routers of a model as they were, what they read on a batch, and what they chose.

    routers   copies, which later updates of the model do not reach
    parts     for each micro-batch its L router calls, in execution order
    trace     RoutingTrace [B, T] of the same forwards, on the CPU
    """

    routers: tuple[Router, ...]
    parts: tuple[tuple[RouterCall, ...], ...]
    trace: RoutingTrace


@dataclass(frozen=True, eq=False)
class Attribution(LayerTable):
    """Sums over the rows of each response, by layer: int64 [B, L] for each metric, on the CPU.

    As means of 1 - |A ∩ B| / K against the old experts:

    both          the actual change
    router        by the new router on the old hidden states
    hidden        by the old router on the new hidden states
    interaction   both - router - hidden: what neither explains alone, negative where they cancel

    As shares of (token, layer), of which these four sum to the sets that changed:

    sets/router   the set changed, and changes by the router alone but not by the hidden states alone
    sets/hidden   ... by the hidden states alone but not by the router alone
    sets/either   ... by each of them alone
    sets/joint    ... by neither of them alone
    """

    layer_ids: tuple[int, ...]
    top_k: int
    layer_sums: Mapping[str, Tensor]
    rows_B: Tensor
    groups_B: Tensor | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self.layer_sums)

    def layers(self, metric: str) -> ResponseSums:
        sums_BL = self._of(self.layer_sums, metric).double()
        per_row = 1 if metric.startswith("sets/") else self.top_k
        counts_BL = (per_row * self.rows_B.double()[:, None]).expand_as(sums_BL)
        return ResponseSums(sums_BL, counts_BL, self.groups_B)

    def whole(self, metric: str) -> ResponseSums:
        by_layer = self.layers(metric)
        return ResponseSums(
            by_layer.sums_BC.sum(1, keepdim=True), by_layer.counts_BC.sum(1, keepdim=True), self.groups_B
        )


@torch.no_grad()
def capture_router_inputs(model: PreTrainedModel, batch: RolloutBatch, plan: Plan) -> RouterInputs:
    """What every router of `model` reads on a batch, in the slices of `plan`: B·T·L·D numbers in its dtype.

    Each router is run again on what it read. Raises RoutingError where this does not give the experts of the
    forward, or where a router is called with more than hidden states: its choice then depends on something
    that a counterfactual would have to invent (token ids, a state from another layer, random numbers).
    """
    live = find_routers(model)
    copies = tuple(_copy_of(router) for router in live)
    parts, traces = [], []
    for rows in flat(plan):
        calls: list[RouterCall] = []
        hooks = [
            router.module.register_forward_pre_hook(_capture(calls, index, router), with_kwargs=True)
            for index, router in enumerate(live)
        ]
        try:
            with record_routing(model) as recorder:
                score(model, batch[rows], temperature=1.0)
        finally:
            for hook in hooks:
                hook.remove()
        trace = recorder.trace().to("cpu")
        for layer, call in enumerate(calls):
            _require_same_choice(copies[call.router], call, trace, layer)
        parts.append(tuple(calls))
        traces.append(trace)
    return RouterInputs(copies, tuple(parts), RoutingTrace.cat(traces))


@torch.no_grad()
def attribute_change(
    old: RouterInputs, new: RouterInputs, rows_BT: Tensor, groups_B: Tensor | None = None
) -> Attribution:
    """Attribute the change from `old` to `new` over the rows of `rows_BT` (bool or 0/1, [B, T]).

    Both captures must be of the same batch and plan. Raises RoutingError when they are not, and when no row
    is left to compare.
    """
    kept_BT = comparable_rows(old.trace, new.trace, rows_BT)
    if [len(part) for part in old.parts] != [len(part) for part in new.parts]:
        raise RoutingError("both captures must be of the same slices of one batch")
    K = old.trace.top_k
    sums: dict[str, list[Tensor]] = {}
    first = 0
    for old_calls, new_calls in zip(old.parts, new.parts, strict=True):
        B = old_calls[0].hidden.shape[:-1].numel() // kept_BT.shape[1]
        rows, first = slice(first, first + B), first + B
        kept_BT1 = kept_BT[rows, :, None]
        before, after = (one.trace.experts[rows].long() for one in (old, new))
        columns = []
        for layer, (was, now) in enumerate(zip(old_calls, new_calls, strict=True)):
            shape = (*kept_BT1.shape[:2], K)
            new_router = _choice(new.routers[now.router], was.hidden, now).view(shape).cpu()
            new_hidden = _choice(old.routers[was.router], now.hidden, was).view(shape).cpu()
            columns.append(
                [
                    K - overlap(before[:, :, layer], ids)
                    for ids in (after[:, :, layer], new_router, new_hidden)
                ]
            )
        both, router, hidden = (torch.stack(layers, dim=2) for layers in zip(*columns, strict=True))
        for metric, values_BTL in _metrics(both, router, hidden).items():
            sums.setdefault(metric, []).append((values_BTL * kept_BT1).sum(1))
    layer_sums = {metric: torch.cat(parts) for metric, parts in sums.items()}
    groups_B = require_groups(groups_B, len(kept_BT))
    return Attribution(old.trace.layer_ids, K, layer_sums, kept_BT.sum(1), groups_B)


def _metrics(both: Tensor, router: Tensor, hidden: Tensor) -> dict[str, Tensor]:
    by_router, by_hidden, changed = router > 0, hidden > 0, both > 0
    return {
        "both": both,
        "router": router,
        "hidden": hidden,
        "interaction": both - router - hidden,
        "sets/router": (changed & by_router & ~by_hidden).long(),
        "sets/hidden": (changed & by_hidden & ~by_router).long(),
        "sets/either": (changed & by_router & by_hidden).long(),
        "sets/joint": (changed & ~by_router & ~by_hidden).long(),
    }


def _capture(calls: list[RouterCall], index: int, router: Router) -> Any:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        further = [*args[1:], *kwargs.values()]
        tensors = [value for value in further if isinstance(value, Tensor)]
        readable = bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()
        if not readable or any(tensor.numel() != router.num_experts for tensor in tensors):
            raise RoutingError(
                f"{router.name} reads more than hidden states and selection biases, which a counterfactual "
                "would have to invent: its changes cannot be attributed"
            )
        # Copies, which neither a block working in place nor an update of a bias may reach.
        hidden, *rest = map(_copied, args)
        named = {name: _copied(value) for name, value in kwargs.items()}
        calls.append(RouterCall(index, hidden, tuple(rest), named))

    return before


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _copy_of(router: Router) -> Router:
    module = copy.deepcopy(router.module).requires_grad_(False)
    return Router(router.name, module, router.layer_id, router.num_experts, router.top_k)


def _choice(router: Router, hidden: Tensor, call: RouterCall) -> Tensor:
    """int64 [N, K]: the experts a router chooses on hidden states, with the other arguments of `call`."""
    gate = gate_of(router.module)(router.module, router.num_experts, router.top_k, None)
    gate.run(router.module.forward, hidden.clone(), *call.args, **call.kwargs)
    assert gate.used_NK is not None
    return gate.used_NK


def _require_same_choice(router: Router, call: RouterCall, trace: RoutingTrace, layer: int) -> None:
    again = _choice(router, call.hidden, call).view(*trace.valid.shape, -1).cpu()
    if not torch.equal(again[trace.valid], trace.experts[:, :, layer][trace.valid].long()):
        raise RoutingError(
            f"{router.name} chose other experts when it was run again on the hidden states that it had read: "
            "its choice depends on something else (noise in training mode, autocast, a state of its own), so "
            "its changes cannot be attributed"
        )
