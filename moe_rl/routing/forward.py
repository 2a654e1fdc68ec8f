"""What a context knows of the forward passes of a model: B, T, padding, and the rows a cache holds."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_rl.routing.trace import RoutingError


@dataclass(frozen=True)
class Forward:
    """One call of a model.

    valid   bool [B, T]: False for padding
    start   rows that the cache held before the call; row t of the call is position start + t
    cache   weak reference to the cache the call got, None when it got none
    tokens  int64 [B, T] input_ids, None when the call got embeddings
    """

    valid: Tensor
    start: int
    cache: weakref.ref | None
    tokens: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return (self.valid.shape[0], self.valid.shape[1])


class ForwardWatch:
    """Follows the outermost forward of a model, whichever of its PreTrainedModels with routers is called.

    A vision tower has none: `generate` may call it by itself, and its rows are patches. `begin(forward)` runs
    before the forward, `end(forward, output)` after it, unless it raised. A recompute under gradient
    checkpointing is no forward.
    """

    def __init__(
        self,
        model: nn.Module,
        routers: Iterable[str],
        begin: Callable[[Forward], None],
        end: Callable[[Forward, Any], None],
    ) -> None:
        self._begin, self._end = begin, end
        self._calls: list[nn.Module] = []
        self._handles: list[Any] = []
        names = list(routers)
        models: list[nn.Module] = [
            module
            for path, module in model.named_modules()
            if isinstance(module, PreTrainedModel)
            and any(name.startswith(f"{path}." if path else "") for name in names)
        ]
        self._names = {module: _arguments_of(module) for module in models or [model]}
        self.current: Forward | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A model copied or pickled inside a context takes its hooks along; they must not report to it.
        return ForwardWatch, (nn.Module(), (), _ignore, _ignore)

    def attach(self) -> None:
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after, always_call=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def require(self, router: str, num_rows: int | None = None) -> Forward:
        """The forward that runs now. Raises RoutingError when there is none, or it has other rows."""
        if self.current is None:
            raise RoutingError(
                f"{router} was called outside a forward of the model: call the model that the context was "
                "opened on, not its layers"
            )
        B, T = self.current.shape
        if num_rows is not None and num_rows != B * T:
            raise RoutingError(
                f"{router} routed {num_rows} rows in a forward of B x T = {B} x {T}: only routers that see "
                "every token of the forward can be recorded and replayed"
            )
        return self.current

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in self._names or in_recompute():
            return
        if self._calls and module is self._calls[0]:
            self._calls.clear()  # the last call ended without its hook, by KeyboardInterrupt
        self._calls.append(module)
        if len(self._calls) == 1:
            self.current = None
            self.current = read_forward(
                type(module).__name__, dict(zip(self._names[module], args, strict=False)) | kwargs
            )
            self._begin(self.current)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._calls or self._calls[-1] is not module or in_recompute():
            return
        self._calls.pop()
        if not self._calls:
            forward, self.current = self.current, None
            if forward is not None and output is not None:  # None: the forward raised
                self._end(forward, output)


def _ignore(*arguments: Any) -> None:
    """What the hooks of a copied model report to."""


def _arguments_of(module: nn.Module) -> tuple[str, ...]:
    """The names that positional arguments of the module's forward bind to."""
    forward: Any = module.forward
    if getattr(forward, "__self__", None) is module:
        return _parameters(forward.__func__)[1:]
    return tuple(inspect.signature(forward).parameters)  # set on the instance: a cache would keep it alive


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def in_recompute() -> bool:
    """Whether the code runs inside a backward pass: gradient checkpointing calls layers again there.

    `torch.is_grad_enabled()` would not tell: reentrant checkpointing turns gradients off in the first pass.
    """
    return torch._C._current_graph_task_id() != -1


def read_forward(model: str, arguments: dict[str, Any]) -> Forward:
    """B, T, padding and cache of a call, from its own arguments. Raises RoutingError if they do not tell."""
    inputs = arguments.get("input_ids")
    if inputs is None:
        inputs = arguments.get("inputs_embeds")
    if not isinstance(inputs, Tensor) or inputs.dim() < 2:
        raise RoutingError(
            f"{model} was called without input_ids [B, T] or inputs_embeds [B, T, D], so the "
            "rows of its routing cannot be told apart"
        )
    B, T = inputs.shape[:2]
    cache = arguments.get("past_key_values")
    if cache is None:
        cache = arguments.get("cache")
    start = 0 if cache is None else int(cache.get_seq_length())
    valid_BT = _valid_rows(arguments.get("attention_mask"), B, T, start).to(inputs.device)
    tokens = None if inputs.is_floating_point() else inputs
    return Forward(valid_BT, start, None if cache is None else weakref.ref(cache), tokens)


def _valid_rows(mask: Any, B: int, T: int, start: int) -> Tensor:
    """bool [B, T]: the rows of a call that its attention mask does not call padding."""
    if isinstance(mask, Tensor) and mask.dim() == 2:
        if mask.shape[0] != B or mask.shape[1] < start + T:
            raise RoutingError(
                f"attention_mask must be [B, {start} cached + {T}] with B = {B}, got {list(mask.shape)}"
            )
        return mask[:, start : start + T].bool()
    # With a static cache `generate` prepares [B, 1, T, cache] masks, in some families one per kind of layer:
    # bool, or 0 where a token may attend. A token that may not attend to itself is padding.
    for prepared in mask.values() if isinstance(mask, dict) else [mask]:
        if isinstance(prepared, Tensor) and prepared.dim() != 4:
            raise RoutingError(f"attention_mask must be [B, T] or [B, 1, T, T], got {list(prepared.shape)}")
        if isinstance(prepared, Tensor) and prepared.shape[2] == T and prepared.shape[3] >= start + T:
            itself = prepared[:, 0].diagonal(start, 1, 2)
            return (itself if itself.dtype == torch.bool else itself == 0).expand(B, T)
    return torch.ones(B, T, dtype=torch.bool)
