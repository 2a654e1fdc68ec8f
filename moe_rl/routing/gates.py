"""Inside a gate: where a router selects its experts, and how its selection is replaced.

The router's own forward runs under a TorchFunctionMode that sees its `topk` over the E scores. Recording
reads the ids. Replay answers with the scores gathered at the forced ids, so the model's own normalisation,
scaling and dtype casts run on them unchanged and the gradient reaches the router's parameters. Gates that
select by other means have an adapter here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_rl.routing.trace import RoutingError

Scores = Callable[[Tensor], Tensor]  # ids [N, K] -> how high the router ranks them now [N, K]


class Force(Protocol):
    """What replaces the selection of one router call on N rows.

    reweighs  whether the gate weights are replaced as well
    """

    reweighs: bool

    def own_rows(self, num_rows: int, device: torch.device) -> Tensor | None:
        """The rows that must choose by themselves; None for all N. Raises RoutingError for a wrong N."""
        ...

    def experts(self, native_NK: Tensor, scores: Scores | None) -> Tensor:
        """The ids to use [N, K], from those of the own rows, and the router's scores if it ranks experts."""
        ...

    def weights(self, current_NK: Tensor) -> Tensor:
        """The gate weights to use [N, K], from the router's current ones at the used ids."""
        ...


_TOPK = (torch.topk, torch.Tensor.topk)
_MAX = (torch.max, torch.Tensor.max)
_MASKED_FILL = (torch.masked_fill, torch.Tensor.masked_fill)


class TopKGate(TorchFunctionMode):
    """A gate that selects by one top-k over E columns; a later match replaces an earlier one."""

    def __init__(self, router: nn.Module, num_experts: int, top_k: int, force: Force | None) -> None:
        super().__init__()
        self.router, self.num_experts, self.top_k, self.force = router, num_experts, top_k, force
        self.native_NK: Tensor | None = None
        self.used_NK: Tensor | None = None
        self.output: Any = None
        self._masked: Tensor | None = None
        self._unmasked: Tensor | None = None
        self._group_scores: Tensor | None = None
        self._ranked_over: Tensor | None = None

    @property
    def name(self) -> str:
        return type(self.router).__name__.removeprefix("Instrumented")

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call the router's `forward`; afterwards `output` is its output, `used_NK` the ids the experts got.

        `native_NK` is what the router chose by itself, of all rows or of the force's `own_rows`. Raises
        RoutingError when the forward never selected K of E experts.
        """
        self.output = self._forward(forward, *args, **kwargs)
        if self.used_NK is None:
            raise RoutingError(
                f"{self.name} did not select {self.top_k} of {self.num_experts} experts "
                "by a top-k, so its choice cannot be recorded or replayed"
            )
        if self.force is not None and self.force.reweighs:
            scores, old, *rest = self.output
            self.output = (scores, self.force.weights(self.weights).view(old.shape), *rest)

    @property
    def weights(self) -> Tensor:
        """The gate weights [N, K] in the router's output. Raises RoutingError if it holds none."""
        assert self.used_NK is not None
        weights = self.output[1] if isinstance(self.output, tuple) and len(self.output) > 2 else None
        if weights is None or not weights.is_floating_point() or weights.numel() != self.used_NK.numel():
            raise RoutingError(
                f"{self.name} does not return gate weights [N, K] beside its expert ids, so "
                "they can be neither recorded nor replaced; its experts can"
            )
        return weights.view(self.used_NK.shape)

    @property
    def scores(self) -> Tensor:
        """What the top-k ranked [N, E], detached, float32 or wider: with selection bias and group mask.

        Raises RoutingError where experts are not chosen by one score each.
        """
        if self._ranked_over is None:
            raise RoutingError(
                f"{self.name} does not choose its experts by a top-k over one score per expert, so it has no "
                "selection scores to record; its experts can be recorded"
            )
        scores_NE = self._ranked_over.detach().reshape(-1, self.num_experts)
        return scores_NE if scores_NE.dtype == torch.float64 else scores_NE.float()

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return forward(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TOPK:
            return self._topk(func, *args, **kwargs)
        out = func(*args, **kwargs)
        if func in _MASKED_FILL and self._is_scores(out):
            self._masked, self._unmasked = out, args[0]
        if func in _MAX and isinstance(out, tuple):
            self._group_scores = out[0]
        return out

    def _topk(self, func: Any, input: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        if k != self.top_k or not self._is_scores(input) or dim % input.dim() != input.dim() - 1:
            return func(input, k, dim, **options)
        if (
            input is self._group_scores
        ):  # DeepSeek-V2 with as many groups as experts: which groups, not experts
            return func(input, k, dim, **options)
        self._ranked_over = input
        if self.force is None:
            native = func(input, k, dim, **options)
            self._select(self._ids(native.indices.reshape(-1, k)))
            return native
        own = self.force.own_rows(input.numel() // self.num_experts, input.device)
        rows = input if own is None else input.reshape(-1, self.num_experts)[own]
        native_NK = self._ids(func(rows, k, -1, **options).indices.reshape(-1, k), own)
        # DeepSeek-V2 fills the scores outside its expert groups with 0 and takes gate weights from the rest:
        # a forced expert outside the groups would get weight 0. The model's own selection keeps the mask.
        scores = self._unmasked if input is self._masked and self._unmasked is not None else input
        used_NK = self._select(native_NK, functools.partial(self._ranked, scores))
        columns = self._columns(used_NK).view(*input.shape[:-1], k)
        return torch.return_types.topk((scores.gather(-1, columns), columns))

    def _ranked(self, scores: Tensor, ids_NK: Tensor) -> Tensor:
        """What the router ranks experts by, as a probability where it ranks logits, at some ids."""
        scores_NE = scores.detach().reshape(-1, self.num_experts)
        if any(cls.__name__ in RANKS_LOGITS for cls in type(self.router).__mro__):
            scores_NE = scores_NE.float().softmax(-1)
        return scores_NE.gather(-1, self._columns(ids_NK))

    def _select(self, native_NK: Tensor, scores: Scores | None = None) -> Tensor:
        self.native_NK = native_NK
        self.used_NK = native_NK if self.force is None else self.force.experts(native_NK, scores)
        return self.used_NK

    def _own(self, native_NK: Tensor) -> Tensor:
        """The ids of the rows whose own choice is needed."""
        own = None if self.force is None else self.force.own_rows(len(native_NK), native_NK.device)
        return native_NK if own is None else native_NK[own]

    def _ids(self, columns_NK: Tensor, own_rows: Tensor | None = None) -> Tensor:
        return columns_NK

    def _columns(self, ids_NK: Tensor) -> Tensor:
        return ids_NK

    def _is_scores(self, tensor: Tensor) -> bool:
        return tensor.dim() >= 2 and tensor.shape[-1] == self.num_experts


class HashGate(TopKGate):
    """DeepSeek-V4's first layers: a frozen table of token ids chooses, the scores only weigh.

    It ranks no experts, so `Threshold` keeps what the trace says.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.__getitem__ and args[0] is self.router.tid2eid:
            native_NK = out.long()
            return self._select(self._own(native_NK))
        return out


class MegaBlocksGate(TopKGate):
    """MegaBlocks' LearnedRouter: a top-k, or for K = 1 a maximum."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MAX and self.top_k == 1 and self._is_scores(args[0]):
            return self._topk(torch.topk, args[0], 1)
        return super().__torch_function__(func, types, args, kwargs)


class ProductKeyGate(TopKGate):
    """Doge: experts are pairs of keys, selected among the pairs of keys sorted by score.

    The columns of the second top-k are ranks of keys: column r of E is expert x[r // n] n + y[r % n], where
    x and y list the keys of either half in falling order and n = √E.
    """

    def _topk(self, func: Any, input: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        if input.dim() == 3 and input.shape[0] == 2:
            sorted_keys = func(input, k, dim, **options)
            self._key_of_rank = sorted_keys.indices
            self._rank_of_key = sorted_keys.indices.argsort(-1)
            return sorted_keys
        return super()._topk(func, input, k, dim, **options)

    @property
    def scores(self) -> Tensor:
        of_columns_NE = super().scores
        ids_E = torch.arange(self.num_experts, device=of_columns_NE.device)
        return of_columns_NE.gather(1, self._columns(ids_E.expand_as(of_columns_NE)))

    def _ids(self, columns_NK: Tensor, own_rows: Tensor | None = None) -> Tensor:
        keys = self._key_of_rank if own_rows is None else self._key_of_rank[:, own_rows]
        return self._translate(columns_NK, keys)

    def _columns(self, ids_NK: Tensor) -> Tensor:
        return self._translate(ids_NK, self._rank_of_key)

    def _translate(self, pairs_NK: Tensor, keys_2Nn: Tensor) -> Tensor:
        n = keys_2Nn.shape[-1]
        return keys_2Nn[0].gather(1, pairs_NK // n) * n + keys_2Nn[1].gather(1, pairs_NK % n)


class SparseMixerGate(TopKGate):
    """PhiMoE: one expert after the other, by argmax, in training mode by sampling (arXiv 2409.12136).

    A gate weight is a softmax over the experts within a threshold of the best one. Replay replaces what was
    chosen, and keeps the forced expert in that softmax, so that its weight is not 0 beyond the threshold. The
    second choice depends on the first, so the gate's own choice takes a forward of its own, on the same
    random numbers.
    """

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.force is None:
            output = forward(*args, **kwargs)
            self._select(output[2])
            return output
        (hidden,) = args  # a copy for the first forward, since input jitter works in place
        devices = [hidden.device] if hidden.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            native_NK = forward(hidden.clone())[2]
        self._select(self._own(native_NK), self._no_ranking)
        self._masks = self._choices = 0
        with self:
            return forward(hidden, **kwargs)

    def _no_ranking(self, ids_NK: Tensor) -> Tensor:
        raise RoutingError(
            f"{self.name} chooses one expert after the other, each by scores of its own, so "
            "a replayed set has no K-th score to be compared with: replay it without Threshold"
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert self.used_NK is not None
        if func in _MASKED_FILL and self._is_scores(args[0]):
            scores_NE, mask_NE, value = args
            mask_NE = mask_NE.scatter(1, self.used_NK[:, self._masks, None], False)
            self._masks += 1
            return func(scores_NE, mask_NE, value)
        out = func(*args, **kwargs)
        # Training mode chooses by `max(dim)` of noisy scores, evaluation by `max(dim, keepdim)`.
        if func in _MAX and self._is_scores(args[0]) and bool(kwargs.get("keepdim")) != self.router.training:
            chosen = self.used_NK[:, self._choices].view(out.indices.shape)
            self._choices += 1
            return torch.return_types.max((out.values, chosen))
        return out


# Routers whose top-k is over logits; all others rank probabilities, with a selection bias in some.
RANKS_LOGITS = {
    "AriaTextTopKRouter",
    "Cohere2MoeTopKRouter",
    "DogeCDMoE",
    "GptOssTopKRouter",
    "GraniteMoeHybridTopKRouter",
    "GraniteMoeSWATopKRouter",
    "GraniteMoeSharedTopKRouter",
    "GraniteMoeTopKRouter",
    "JetMoeTopKGating",
    "Kolibri1TopKRouter",
    "Llama4Router",
}
_ADAPTERS = {
    "DeepseekV4HashRouter": HashGate,
    "DogeCDMoE": ProductKeyGate,
    "LearnedRouter": MegaBlocksGate,
    "PhimoeTopKRouter": SparseMixerGate,
}


def gate_of(router: nn.Module) -> type[TopKGate]:
    """How `router` selects, by the name of its class."""
    return _gate_of_class(type(router))  # type: ignore[arg-type]


@functools.cache
def _gate_of_class(cls: Any) -> type[TopKGate]:
    return next((_ADAPTERS[base.__name__] for base in cls.__mro__ if base.__name__ in _ADAPTERS), TopKGate)
