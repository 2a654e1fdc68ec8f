"""Records which experts the tokens of a model's forward passes choose."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.routing.attach import add_taps, remove_taps
from moe_rl.routing.caches import follow, release
from moe_rl.routing.forward import Forward, ForwardWatch, in_recompute
from moe_rl.routing.gates import TopKGate
from moe_rl.routing.routers import Router, common_sizes, find_routers
from moe_rl.routing.trace import RoutingError, RoutingTrace, id_dtype


def record_routing(model: nn.Module, *, weights: bool = False, scores: bool = False) -> Recorder:
    """A context that records the routing of every forward of `model` inside it, changing no bit of it.

    with record_routing(model) as recorder:
        model.generate(...)                  # or model(input_ids=..., attention_mask=...)
    trace = recorder.trace()

    Decode steps on one cache are joined along T; a forward without cached rows begins a new trace. Inside
    `replay_routing` it records the ids that the experts got. With weights=True it also keeps the gate weights
    of these experts, for `recorder.weights()`, with scores=True what the routers rank all experts by, for
    `recorder.scores()`. Raises RoutingError for a model without MoE layers, for one whose routers have no
    such weights or scores, and where rows of a cache are reordered inside, by beam search for one.
    """
    kept = {"weights": _gate_weights} if weights else {}
    return Recorder(model, kept | ({"scores": _selection_scores} if scores else {}))


def _gate_weights(gate: TopKGate) -> Tensor:
    return gate.weights


def _selection_scores(gate: TopKGate) -> Tensor:
    return gate.scores


class Recorder:
    """The recordings of one `record_routing` context."""

    def __init__(self, model: nn.Module, kept: Mapping[str, Callable[[TopKGate], Tensor]]) -> None:
        self._kept_of = kept
        self._routers = find_routers(model)
        self._num_experts, _ = common_sizes(self._routers)
        self._taps = [_RecordTap(self, router) for router in self._routers]
        self._watch = ForwardWatch(model, [router.name for router in self._routers], self._begin, self._end)
        self._calls: list[tuple[Router, Tensor]] = []
        self._kept: dict[str, list[Tensor]] = {name: [] for name in kept}
        self._recordings: list[_Recording] = []
        self._followed: list[weakref.ref] = []

    def __enter__(self) -> Recorder:
        self._watch.attach()
        add_taps(self._routers, self._taps)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        remove_taps(self._routers, self._taps)
        self._watch.detach()
        for cache in filter(None, [cache() for cache in self._followed]):
            release(cache)
        self._followed.clear()

    def traces(self) -> list[RoutingTrace]:
        """Every recording, in the order they began."""
        return [recording.trace() for recording in self._recordings]

    def trace(self, mask: Tensor | None = None) -> RoutingTrace:
        """The one recording, as a RoutingTrace [B, T].

        `mask` (bool or 0/1, [B, T] over prompt and response) fixes T and invalidates padding and whatever was
        routed after EOS. Without it T is the number of routed rows: one less than `generate` returns, since
        the last sampled token is never routed. Raises RoutingError when there is no recording, or several.
        """
        trace = self._only().trace()
        return trace if mask is None else trace.fit(mask.shape[1]).where(mask)

    def weights(self) -> Tensor:
        """[B, T, L, K]: gate weights of the experts in `trace()`, as these got them; 0 in rows not valid.

        In the model's dtype, detached, of routed experts only. Raises RoutingError without
        `record_routing(model, weights=True)`, when there is no recording, or several.
        """
        return self._kept_values("weights")

    def scores(self) -> Tensor:
        """[B, T, L, E]: what each router's top-k ranked, biased and group-masked where a family does so.

        Probabilities in most families, logits in those that normalise after the selection. Float32 (float64
        of a float64 router), detached; -inf for experts outside the chosen groups, 0 in rows not valid.
        Inside `replay_routing` these are the router's own scores. Raises RoutingError without
        `record_routing(model, scores=True)`, when there is no recording, or several.
        """
        return self._kept_values("scores")

    def _kept_values(self, name: str) -> Tensor:
        if name not in self._kept_of:
            raise RoutingError(f"{name} were not kept: open record_routing(model, {name}=True)")
        return self._only().kept(name)

    def _only(self) -> _Recording:
        if len(self._recordings) != 1:
            raise RoutingError(
                f"trace() expects one recording, got {len(self._recordings)}"
                + (": use traces()" if self._recordings else ": no forward ran inside record_routing")
            )
        return self._recordings[0]

    def _begin(self, forward: Forward) -> None:
        self._clear()

    def _clear(self) -> None:
        self._calls.clear()
        for layers in self._kept.values():
            layers.clear()

    def _routed(self, router: Router, gate: TopKGate) -> None:
        if in_recompute():
            return
        assert gate.used_NK is not None
        forward = self._watch.require(router.name, len(gate.used_NK))
        compact_NK = gate.used_NK.detach().to(id_dtype(self._num_experts))
        self._calls.append((router, compact_NK.view(*forward.shape, -1)))
        for name, value_of in self._kept_of.items():
            self._kept[name].append(value_of(gate).detach().view(*forward.shape, -1))

    def _end(self, forward: Forward, output: Any) -> None:
        silent = {router.name for router in self._routers} - {router.name for router, _ in self._calls}
        if silent:
            raise RoutingError(
                f"the forward never called {sorted(silent)}, so its recording would lack layers"
            )
        layer_ids = tuple(router.layer_id for router, _ in self._calls)
        device = forward.valid.device
        experts_BTLK = torch.stack([ids_BTK.to(device) for _, ids_BTK in self._calls], dim=2)
        kept = {
            name: torch.stack([values.to(device) for values in layers], dim=2)
            for name, layers in self._kept.items()
        }
        self._clear()
        cache = _cache_of(forward, output)
        recording = self._recording_of(forward.start, cache)
        if recording is None:
            recording = _Recording(layer_ids, self._num_experts, cache)
            self._follow(cache)
            self._recordings.append(recording)
        recording.add(forward, experts_BTLK, kept, layer_ids)

    def _recording_of(self, start: int, cache: Any) -> _Recording | None:
        """The recording that the rows already in `cache` belong to."""
        if start == 0:
            return None
        held = [recording for recording in self._recordings if recording.cache() is cache]
        return held[-1] if held else None

    def _follow(self, cache: Any) -> None:
        if cache is not None and all(held() is not cache for held in self._followed):
            follow(cache)
            self._followed.append(weakref.ref(cache))


class _RecordTap:
    def __init__(self, recorder: Recorder, router: Router) -> None:
        self.recorder, self.router = recorder, router

    def enter(self) -> None:
        return None

    def routed(self, gate: TopKGate) -> None:
        self.recorder._routed(self.router, gate)


class _Recording:
    """Chunks of rows that were routed on one cache."""

    def __init__(self, layer_ids: tuple[int, ...], num_experts: int, cache: Any) -> None:
        self.layer_ids, self.num_experts = layer_ids, num_experts
        self.cache = (lambda: None) if cache is None else weakref.ref(cache)
        self._chunks: list[tuple[Forward, Tensor, dict[str, Tensor]]] = []

    def add(
        self,
        forward: Forward,
        experts_BTLK: Tensor,
        kept: dict[str, Tensor],
        layer_ids: tuple[int, ...],
    ) -> None:
        if self._chunks and forward.shape[0] != self._chunks[0][0].shape[0]:
            raise RoutingError(
                f"one cache was used with {self._chunks[0][0].shape[0]} and then {forward.shape[0]} "
                "sequences; record each batch with a cache of its own"
            )
        if layer_ids != self.layer_ids:
            raise RoutingError(
                f"layers {self.layer_ids} were routed first, then {layer_ids} on the same cache"
            )
        self._chunks.append((forward, experts_BTLK, kept))

    def trace(self) -> RoutingTrace:
        valid_BT = self._joined([forward.valid for forward, _, _ in self._chunks])
        experts_BTLK = self._joined([experts_BTLK for _, experts_BTLK, _ in self._chunks])
        trace = RoutingTrace(experts_BTLK, valid_BT, self.layer_ids, self.num_experts)
        return trace.where(valid_BT)._trusted()

    def kept(self, name: str) -> Tensor:
        values = self._joined([kept[name] for _, _, kept in self._chunks])
        # not a product: the score of an expert outside the chosen groups is -inf
        return values.masked_fill(~self.trace().valid[..., None, None], 0)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """[B, T, ...] of all chunks, zeros where none has rows."""
        last, _, _ = self._chunks[-1]
        B, T = last.shape[0], last.start + last.shape[1]
        whole = parts[-1].new_zeros(B, T, *parts[-1].shape[2:])
        # A chunk may begin before the end of the one before it: assisted decoding crops rejected rows.
        for (forward, _, _), part in zip(self._chunks, parts, strict=True):
            stop = min(forward.start + forward.shape[1], T)
            whole[:, forward.start : stop] = part[:, : stop - forward.start]
        return whole


def _cache_of(forward: Forward, output: Any) -> Any:
    """The cache that a forward wrote: the one it got, else the one it made."""
    if forward.cache is not None:
        return forward.cache()
    made = getattr(output, "past_key_values", None)
    return getattr(output, "cache", None) if made is None else made
