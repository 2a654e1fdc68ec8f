"""Replays recorded routing: the experts come from a trace, their weights from the current router."""

from __future__ import annotations

import functools
from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.routing.attach import add_taps, remove_taps, taps_of
from moe_rl.routing.drift import expert_change
from moe_rl.routing.forcing import LayerForce, TraceRows
from moe_rl.routing.forward import Forward, ForwardWatch, in_recompute
from moe_rl.routing.gates import TopKGate
from moe_rl.routing.recompute import CheckpointedCalls
from moe_rl.routing.routers import Router, common_sizes, find_routers
from moe_rl.routing.trace import RoutingError, RoutingTrace, id_dtype
from moe_rl.routing.variants import OldWeights, Threshold, Variant


def replay_routing(
    model: nn.Module, trace: RoutingTrace, *, variant: Variant | None = None, native: bool = True
) -> Replay:
    """A context in which `model` sends every valid row of `trace` to the experts that the trace names.

    with replay_routing(model, trace) as replay:         # hold it open until after backward()
        loss(model(input_ids=ids, attention_mask=mask)).backward()
    replay.native

    Gate weights are gathered from the router's current scores and normalised by the model's own code, so the
    router gets its gradient; rows that are not valid route natively. Every forward inside must have the
    trace's [B, T] and an empty cache; for micro-batches open a context on `trace[rows]` around each forward +
    backward. Rows are looked up by (router, pass) and never used up, so forwards may repeat and gradient
    checkpointing may recompute.

    `variant` is None (all experts of the trace, current weights), `Threshold(min_ratio)` or
    `OldWeights(weights_BTLK)`; for the response alone replay `trace.where(scoring_rows(response_mask))`.
    With native=False the rows that are replayed skip the router's own selection, and there is no
    `replay.native`.

    A trace that knows its tokens (`trace.for_tokens`) is checked against those of every forward. Raises
    RoutingError for a trace that is damaged, of another model or without a valid row; leaving raises
    it when a layer was never replayed, or when checkpointed layers were not recomputed inside.
    """
    return Replay(model, trace, variant, native)


class Replay:
    """One `replay_routing` context.

    hits         router calls that were forced, recomputes not counted
    recomputes   router calls that were forced again under gradient checkpointing
    """

    def __init__(
        self, model: nn.Module, trace: RoutingTrace, variant: Variant | None, keep_native: bool
    ) -> None:
        self._model, self._routers = model, find_routers(model)
        self._layers = _layer_table(self._routers, trace)
        self._trace = trace.validate()
        if not bool(trace.valid.any()):
            raise RoutingError(
                "no row of the trace is valid, so nothing would be replayed: check the mask it was recorded "
                "or restricted with, or run this batch outside replay_routing"
            )
        if isinstance(variant, Threshold) and not keep_native:
            raise RoutingError("Threshold compares with the router's own choice: leave native=True")
        if isinstance(variant, OldWeights):
            variant.require_fit(trace)
        self._variant, self._keep_native = variant, keep_native
        self._taps = [_ReplayTap(self, r) for r in range(len(self._routers))]
        self._watch = ForwardWatch(model, [router.name for router in self._routers], self._begin, self._end)
        self._on_device: dict[torch.device, TraceRows] = {}
        self._passes: Counter[int] = Counter()
        self._calls = CheckpointedCalls()
        self._native: dict[int, Tensor] = {}
        self._used: dict[int, Tensor] = {}
        self._seen: set[int] = set()
        self._native_trace: RoutingTrace | None = None
        self._used_trace: RoutingTrace | None = None
        self.hits = 0

    def __enter__(self) -> Replay:
        if any(isinstance(tap, _ReplayTap) for router in self._routers for tap in taps_of(router)):
            raise RoutingError("the model already replays a trace; leave that context first")
        self._watch.attach()
        add_taps(self._routers, self._taps)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        remove_taps(self._routers, self._taps)
        self._watch.detach()
        self._on_device.clear()
        if kind is None:
            self._require_complete()

    @property
    def recomputes(self) -> int:
        return self._calls.recomputes

    @property
    def native(self) -> RoutingTrace:
        """What the gates chose by themselves in the latest complete forward, on the trace's valid rows."""
        if self._native_trace is None:
            raise RoutingError(
                "no complete forward ran inside replay_routing yet"
                if self._keep_native
                else "replay_routing(native=False) leaves out what the router would have chosen by itself"
            )
        return self._native_trace

    @property
    def used(self) -> RoutingTrace:
        """What the experts got in the latest complete forward, on the trace's valid rows.

        This is the trace, but for Threshold; `expert_change(trace, replay.used)` is its change by layer.
        """
        if not isinstance(self._variant, Threshold):
            return self._trace
        if self._used_trace is None:
            raise RoutingError("no complete forward ran inside replay_routing yet")
        return self._used_trace

    @property
    def replaced(self) -> float:
        """The share of replayed slots that Threshold gave to the router's own choice, as a fraction."""
        return expert_change(self._trace, self.used).experts

    def _begin(self, forward: Forward) -> None:
        B, T = self._trace.valid.shape
        if forward.start:
            raise RoutingError(
                f"replay needs whole sequences, but the cache already holds {forward.start} rows: "
                "call the model without past_key_values"
            )
        if forward.shape != (B, T):
            raise RoutingError(
                f"the trace routes [B, T] = [{B}, {T}], the forward has {list(forward.shape)} rows: "
                "open replay_routing on trace[rows] for a micro-batch, trace.fit(T) for another length"
            )
        if forward.tokens is not None:
            self._trace.require_tokens(forward.tokens, forward.valid)
        self._passes.clear()
        self._native.clear()
        self._used.clear()
        self._calls.begin(_checkpoints(self._model))

    def _end(self, forward: Forward, output: Any) -> None:
        self._calls.end(output)
        if len(self._native) == len(self._trace.layer_ids):
            self._native_trace = self._joined(self._native)
        if len(self._used) == len(self._trace.layer_ids):
            self._used_trace = self._joined(self._used)

    def _joined(self, layers: dict[int, Tensor]) -> RoutingTrace:
        trace, device = self._trace, layers[0].device
        experts_BTLK = torch.stack([ids.to(device) for _, ids in sorted(layers.items())], dim=2)
        everywhere = torch.ones_like(trace.valid, device=device)
        joined = RoutingTrace(experts_BTLK, everywhere, trace.layer_ids, trace.num_experts)._trusted()
        return joined.where(trace.valid)

    def _enter(self, r: int) -> LayerForce:
        """Look up which layer of the trace the call of router r is that begins now."""
        passes = self._layers[r]
        if in_recompute():
            return self._force(r, self._calls.repeated(r, passes))
        self._watch.require(self._routers[r].name)
        if self._passes[r] == len(passes):
            raise RoutingError(
                f"{self._routers[r].name} ran more often in one forward than the trace's {len(passes)} passes"
            )
        layer = passes[self._passes[r]]
        self._passes[r] += 1
        self._calls.called(r, layer)
        return self._force(r, layer)

    def _routed(self, r: int, gate: TopKGate) -> None:
        if in_recompute():
            return
        layer = self._layers[r][self._passes[r] - 1]
        if self._keep_native:
            self._native[layer] = self._compact(gate.native_NK)
        if isinstance(self._variant, Threshold):
            self._used[layer] = self._compact(gate.used_NK)
        self._seen.add(layer)
        self.hits += 1

    def _compact(self, ids_NK: Tensor | None) -> Tensor:
        assert ids_NK is not None
        compact_NK = ids_NK.detach().to(id_dtype(self._trace.num_experts))
        return compact_NK.view(*self._trace.valid.shape, -1)

    def _force(self, r: int, layer: int) -> LayerForce:
        return LayerForce(
            self._rows_on,
            layer,
            isinstance(self._variant, OldWeights),
            functools.partial(self._check_rows, self._routers[r].name),
        )

    def _check_rows(self, router: str, num_rows: int) -> None:
        if num_rows != self._trace.valid.numel():
            self._watch.require(router, num_rows)

    def _rows_on(self, device: torch.device) -> TraceRows:
        if device not in self._on_device:
            self._on_device[device] = TraceRows(self._trace, self._variant, self._keep_native, device)
        return self._on_device[device]

    def _require_complete(self) -> None:
        missed = [layer for at, layer in enumerate(self._trace.layer_ids) if at not in self._seen]
        if missed:
            raise RoutingError(f"no forward inside replay_routing reached the routers of layers {missed}")
        missing, checkpointed = self._calls.missing()
        if missing:
            raise RoutingError(
                f"{missing} of {checkpointed} forwards under gradient checkpointing were not recomputed "
                "inside replay_routing: hold it open until after every backward(), or the recompute routes "
                "natively; use torch.no_grad() where no backward follows"
            )


class _ReplayTap:
    def __init__(self, replay: Replay, r: int) -> None:
        self.replay, self.r = replay, r

    def enter(self) -> LayerForce:
        return self.replay._enter(self.r)

    def routed(self, gate: TopKGate) -> None:
        self.replay._routed(self.r, gate)


def _layer_table(routers: list[Router], trace: RoutingTrace) -> list[list[int]]:
    """Positions l in the trace of every router's passes.

    The j-th of m routers in a layer is called for the (p m + j)-th occurrence of the layer id in pass p.
    Raises RoutingError when the trace is of another model.
    """
    num_experts, top_k = common_sizes(routers)
    if (num_experts, top_k) != (trace.num_experts, trace.top_k):
        raise RoutingError(
            f"the trace is of another model: it selects {trace.top_k} of {trace.num_experts} experts, "
            f"the model {top_k} of {num_experts}"
        )
    positions: dict[int, list[int]] = {}
    for at, layer in enumerate(trace.layer_ids):
        positions.setdefault(layer, []).append(at)
    in_layer = Counter(router.layer_id for router in routers)
    if positions.keys() != in_layer.keys() or any(len(positions[i]) % m for i, m in in_layer.items()):
        raise RoutingError(
            f"the trace is of another model: it routes layers {trace.layer_ids}, the model has routers in "
            f"layers {tuple(router.layer_id for router in routers)}"
        )
    table, j = [], Counter[int]()
    for router in routers:
        m = in_layer[router.layer_id]
        table.append(positions[router.layer_id][j[router.layer_id] :: m])
        j[router.layer_id] += 1
    return table


def _checkpoints(model: nn.Module) -> bool:
    """Whether a layer is checkpointed, by transformers or by torch's checkpoint_wrapper."""
    return any(
        (getattr(module, "gradient_checkpointing", False) and module.training)
        or hasattr(module, "_checkpoint_wrapped_module")
        for module in model.modules()
    )
