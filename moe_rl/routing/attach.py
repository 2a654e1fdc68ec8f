"""How contexts get into a router: a subclass of its own class, for as long as a context is open.

A closure in `router.forward` would be copied by `copy.deepcopy(model)` with the original's weights inside; a
class takes its weights from the instance it is called on. A copy made inside a context gets the plain class.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from moe_rl.routing.gates import Force, TopKGate, gate_of
from moe_rl.routing.routers import Router

_TAPS = "_routing_taps"


class Tap(Protocol):
    """What one context does at one router."""

    def enter(self) -> Force | None:
        """The router is about to run: what replaces its selection, None for nothing."""
        ...

    def routed(self, gate: TopKGate) -> None:
        """The router ran: what it chose by itself, and what the experts got."""
        ...


class _Instrumented:
    """Mixin over a router's class that shows its selection to the open contexts."""

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        router, taps = self.__dict__[_TAPS]
        # One of the contexts at most replays. Contexts count calls on entry: where a router spans the
        # experts, non-reentrant checkpointing may stop a recompute inside it.
        force = next(filter(None, [tap.enter() for tap in taps]), None)
        gate = gate_of(router.module)(router.module, router.num_experts, router.top_k, force)
        gate.run(super().forward, *args, **kwargs)  # type: ignore[misc]
        for tap in taps:
            tap.routed(gate)
        return gate.output

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced_to(type(self).__mro__[2], super().__reduce_ex__(protocol), _TAPS)


@functools.cache
def _instrumented(cls: Any) -> type[nn.Module]:
    return type(f"Instrumented{cls.__name__}", (_Instrumented, cls), {"__module__": cls.__module__})


def reduced_to(cls: type, reduced: Any, hidden: str) -> Any:
    """What `__reduce_ex__` returned, of the plain class `cls` and without the attribute `hidden`."""
    _, (_, *args), state, *rest = reduced
    # Not copyreg.__newobj__, for which pickle insists on the class that the object has now.
    return (object.__new__, (cls, *args), {key: state[key] for key in state if key != hidden}, *rest)


def add_taps(routers: Sequence[Router], taps: Sequence[Tap]) -> None:
    """`add_tap` for a context's tap at every router."""
    for router, tap in zip(routers, taps, strict=True):
        add_tap(router, tap)


def remove_taps(routers: Sequence[Router], taps: Sequence[Tap]) -> None:
    """Undo `add_taps`."""
    for router, tap in zip(routers, taps, strict=True):
        remove_tap(router, tap)


def add_tap(router: Router, tap: Tap) -> None:
    """Show every later call of `router` to `tap`."""
    module = router.module
    if _TAPS not in module.__dict__:
        module.__dict__[_TAPS] = (router, [])
        _become(module, _instrumented(type(module)))  # type: ignore[arg-type]
    module.__dict__[_TAPS][1].append(tap)


def remove_tap(router: Router, tap: Tap) -> None:
    """Undo `add_tap`; the last tap to leave restores the router's class."""
    module = router.module
    taps = module.__dict__[_TAPS][1]
    taps.remove(tap)
    if not taps:
        del module.__dict__[_TAPS]
        _become(module, type(module).__mro__[2])


def taps_of(router: Router) -> tuple[Tap, ...]:
    """The taps on `router` now."""
    return tuple(router.module.__dict__.get(_TAPS, (None, ()))[1])


def _become(module: nn.Module, cls: Any) -> None:
    module.__class__ = cls
    if (
        "_old_forward" in module.__dict__
    ):  # accelerate (device_map) calls the forward it found, on the instance
        module.__dict__["_old_forward"] = types.MethodType(cls.forward, module)
