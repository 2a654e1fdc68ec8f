"""Replays recorded routing: the experts come from a trace, their weights from the current router."""

from __future__ import annotations

import functools
from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.routing.attach import add_tap, remove_tap, taps_of
from moe_rl.routing.forward import Forward, ForwardWatch, in_recompute
from moe_rl.routing.gates import Force
from moe_rl.routing.routers import Router, common_sizes, find_routers
from moe_rl.routing.trace import RoutingError, RoutingTrace, id_dtype


def replay_routing(model: nn.Module, trace: RoutingTrace) -> Replay:
    """A context in which `model` sends every valid row of `trace` to the experts that the trace names.

    with replay_routing(model, trace) as replay:         # hold it open until after backward()
        loss(model(input_ids=ids, attention_mask=mask)).backward()
    replay.native

    Gate weights are gathered from the router's current scores and normalised by the model's own code, so the
    router gets its gradient; rows that are not valid route natively. Every forward inside must have the
    trace's [B, T] and an empty cache; for micro-batches open a context on `trace[rows]` around each forward +
    backward. Rows are looked up by (router, pass) and never used up, so forwards may repeat and gradient
    checkpointing may recompute. Raises RoutingError for a trace that is damaged or of another model; leaving
    raises it when a layer was never replayed, or when checkpointed layers were not recomputed inside.
    """
    return Replay(model, trace)


class Replay:
    """One `replay_routing` context.

    hits         router calls that were forced, recomputes not counted
    recomputes   router calls that were forced again under gradient checkpointing
    """

    def __init__(self, model: nn.Module, trace: RoutingTrace) -> None:
        self._model, self._routers = model, find_routers(model)
        self._layers = _layer_table(self._routers, trace)
        self._trace = trace.validate()
        self._taps = [_ReplayTap(self, r) for r in range(len(self._routers))]
        self._watch = ForwardWatch(model, self._begin, self._end)
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._passes: Counter[int] = Counter()
        self._recomputed: Counter[int] = Counter()
        self._native: dict[int, Tensor] = {}
        self._seen: set[int] = set()
        self._checkpointed = False
        self._native_trace: RoutingTrace | None = None
        self.hits = 0

    def __enter__(self) -> Replay:
        if any(isinstance(tap, _ReplayTap) for router in self._routers for tap in taps_of(router)):
            raise RoutingError("the model already replays a trace; leave that context first")
        self._watch.attach()
        for router, tap in zip(self._routers, self._taps, strict=True):
            add_tap(router, tap)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for router, tap in zip(self._routers, self._taps, strict=True):
            remove_tap(router, tap)
        self._watch.detach()
        self._on_device.clear()
        if kind is None:
            self._require_complete()

    @property
    def recomputes(self) -> int:
        return self._recomputed.total()

    @property
    def native(self) -> RoutingTrace:
        """What the gates chose by themselves in the latest complete forward, on the trace's valid rows."""
        if self._native_trace is None:
            raise RoutingError("no complete forward ran inside replay_routing yet")
        return self._native_trace

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
        self._passes.clear()
        self._native.clear()
        self._checkpointed |= torch.is_grad_enabled() and _checkpoints(self._model)

    def _end(self, forward: Forward, output: Any) -> None:
        if len(self._native) < len(self._trace.layer_ids):
            return
        device = self._native[0].device
        native_BTLK = torch.stack([ids.to(device) for _, ids in sorted(self._native.items())], dim=2)
        trace = self._trace
        everywhere = torch.ones_like(trace.valid, device=device)
        native = RoutingTrace(native_BTLK, everywhere, trace.layer_ids, trace.num_experts)._trusted()
        self._native_trace = native.where(trace.valid)

    def _enter(self, r: int) -> Force:
        """Look up which layer of the trace the call of router r is that begins now."""
        passes = self._layers[r]
        if in_recompute():  # backward meets the passes of a looped model in reverse order
            layer = passes[-1 - self._recomputed[r] % len(passes)]
            self._recomputed[r] += 1
            return functools.partial(self._force, r, layer)
        self._watch.require(self._routers[r].name)
        if self._passes[r] == len(passes):
            raise RoutingError(
                f"{self._routers[r].name} ran more often in one forward than the trace's {len(passes)} passes"
            )
        layer = passes[self._passes[r]]
        self._passes[r] += 1
        return functools.partial(self._force, r, layer)

    def _force(self, r: int, layer: int, native_NK: Tensor) -> Tensor:
        experts_NLK, valid_N1 = self._rows(native_NK.device)
        if native_NK.shape[0] != experts_NLK.shape[0]:
            self._watch.require(self._routers[r].name, native_NK)
        return torch.where(valid_N1, experts_NLK[:, layer].to(native_NK.dtype), native_NK)

    def _routed(self, r: int, native_NK: Tensor) -> None:
        if in_recompute():
            return
        layer = self._layers[r][self._passes[r] - 1]
        compact_NK = native_NK.detach().to(id_dtype(self._trace.num_experts))
        self._native[layer] = compact_NK.view(*self._trace.valid.shape, -1)
        self._seen.add(layer)
        self.hits += 1

    def _rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._on_device:
            trace = self._trace.to(device)
            self._on_device[device] = (trace.experts.flatten(0, 1), trace.valid.reshape(-1, 1))
        return self._on_device[device]

    def _require_complete(self) -> None:
        missed = [layer for at, layer in enumerate(self._trace.layer_ids) if at not in self._seen]
        if missed:
            raise RoutingError(f"no forward inside replay_routing reached the routers of layers {missed}")
        if self._checkpointed and not self.recomputes:
            raise RoutingError(
                "gradient checkpointing is on and no layer was recomputed inside replay_routing: hold it "
                "open until after backward(), or the recompute routes natively; use torch.no_grad() where no "
                "backward follows"
            )


class _ReplayTap:
    def __init__(self, replay: Replay, r: int) -> None:
        self.replay, self.r = replay, r

    def enter(self) -> Force:
        return self.replay._enter(self.r)

    def routed(self, native_NK: Tensor, used_NK: Tensor) -> None:
        self.replay._routed(self.r, native_NK)


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
    return any(
        getattr(module, "gradient_checkpointing", False) and module.training for module in model.modules()
    )
