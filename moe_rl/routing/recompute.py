"""Which router call of which forward a recompute repeats, under gradient checkpointing.

Backward need not recompute every call, nor every forward, so counting recomputes would not tell. Autograd
numbers the nodes of a thread in the order of their making: the number of the node that asks for the recompute
lies within those of the forward that made it.
"""

from __future__ import annotations

import bisect
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moe_rl.routing.errors import RoutingError


@dataclass
class _Span:
    """A forward with gradients. `calls` holds per router (number at the call, layer), rising."""

    checkpointed: bool
    begin: int
    end: int | None = None  # None until it is complete: one that raised has no backward
    reentrant: bool = False
    recomputed: bool = False
    calls: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    graph: weakref.ref | None = None  # dead once no backward can reach the forward


class _Graph:
    """Lives as long as the autograd nodes that hold it."""


class CheckpointedCalls:
    """The router calls of all forwards in one replay context that a backward may follow.

    recomputes   router calls that were repeated
    """

    def __init__(self) -> None:
        self._spans: list[_Span] = []
        self._current: _Span | None = None
        self.recomputes = 0

    def begin(self, checkpointed: bool) -> None:
        """A forward begins; `checkpointed` where the model says that it checkpoints."""
        self._current = None
        if torch.is_grad_enabled():
            self._current = _Span(checkpointed, _next_number())
            self._spans.append(self._current)

    def called(self, r: int, layer: int) -> None:
        """Router r is called for `layer` of the trace."""
        if self._current is not None:
            # Reentrant checkpointing turns gradients off in the first pass, whoever wrapped the layer.
            self._current.reentrant |= not torch.is_grad_enabled()
            self._current.calls.setdefault(r, []).append((_next_number(), layer))

    def end(self, output: Any) -> None:
        """The forward is complete and returned `output`."""
        if self._current is not None:
            self._current.end = _next_number()
            graph = _Graph()
            self._current.graph = weakref.ref(graph)
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    leaf.grad_fn.metadata[_Graph] = graph  # type: ignore[index]  # typed as a method
            self._current = None

    def repeated(self, r: int, layers: list[int]) -> int:
        """The layer of the trace, among the passes of router r, of the call that backward repeats now.

        Raises RoutingError where a looped model is checkpointed so that its passes cannot be told apart.
        """
        self.recomputes += 1
        number = _backward_number()
        # None: within a recompute of its own (nested checkpoints), or of a forward before this context.
        span = next((s for s in self._spans if s.end is not None and s.begin <= number < s.end), None)
        if span is not None:
            span.recomputed = True
        if len(layers) == 1:
            return layers[0]
        calls = [] if span is None else span.calls.get(r, [])
        after = bisect.bisect_right([at for at, _ in calls], number)
        # A reentrant checkpoint is one node, made before the calls in it; otherwise backward asks from a node
        # of the layer itself, and first from the experts, which come after their router.
        at = after if span is not None and span.reentrant else after - 1
        if not 0 <= at < len(calls):
            raise RoutingError(
                "a recompute of a looped model belongs to no pass of a forward inside replay_routing: run "
                "its forward inside as well, and do not nest checkpoints"
            )
        return calls[at][1]

    def missing(self) -> tuple[int, int]:
        """(checkpointed forwards that were not recomputed, all checkpointed forwards).

        A forward whose output is gone has no backward and is not missing, unless none was recomputed at all.
        """
        complete = [s for s in self._spans if s.end is not None and (s.checkpointed or s.reentrant)]
        never = [s for s in complete if not s.recomputed]
        alive = [s for s in never if s.graph is not None and s.graph() is not None]
        return len(never) if len(never) == len(complete) else len(alive), len(complete)


def _next_number() -> int:
    return torch._C._autograd._get_sequence_nr()


def _backward_number() -> int:
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()
