"""Inside a gate: where a router selects its experts, and how its selection is replaced.

The router's own forward runs under a TorchFunctionMode that sees its `topk` over the E scores. Recording
reads the ids. Replay answers with the scores gathered at the forced ids, so the model's own normalisation,
scaling and dtype casts run on them unchanged and the gradient reaches the router's parameters. Gates that
select by other means have an adapter here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_rl.routing.trace import RoutingError

Force = Callable[[Tensor], Tensor]  # native ids [N, K] -> the ids to use [N, K]

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
        self._masked: Tensor | None = None
        self._unmasked: Tensor | None = None

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Tensor, Tensor]:
        """The output of the router's `forward`, the ids [N, K] it chose by itself, those the experts got.

        Raises RoutingError when the forward never selected K of E experts.
        """
        with self:
            output = forward(*args, **kwargs)
        if self.native_NK is None or self.used_NK is None:
            raise RoutingError(
                f"{type(self.router).__name__} did not select {self.top_k} of {self.num_experts} experts "
                "by a top-k, so its choice cannot be recorded or replayed"
            )
        return output, self.native_NK, self.used_NK

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TOPK:
            return self._topk(func, *args, **kwargs)
        out = func(*args, **kwargs)
        if func in _MASKED_FILL and self._is_scores(out):
            self._masked, self._unmasked = out, args[0]
        return out

    def _topk(self, func: Any, input: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        native = func(input, k, dim, **options)
        if k != self.top_k or not self._is_scores(input) or dim % input.dim() != input.dim() - 1:
            return native
        used_NK = self._select(self._ids(native.indices.reshape(-1, k)))
        if self.force is None:
            return native
        # DeepSeek-V2 fills the scores outside its expert groups with 0 and takes gate weights from the rest:
        # a forced expert outside the groups would get weight 0. The model's own selection keeps the mask.
        scores = self._unmasked if input is self._masked and self._unmasked is not None else input
        columns = self._columns(used_NK).view(native.indices.shape)
        return torch.return_types.topk((scores.gather(-1, columns), columns))

    def _select(self, native_NK: Tensor) -> Tensor:
        self.native_NK = native_NK
        self.used_NK = native_NK if self.force is None else self.force(native_NK)
        return self.used_NK

    def _ids(self, columns_NK: Tensor) -> Tensor:
        return columns_NK

    def _columns(self, ids_NK: Tensor) -> Tensor:
        return ids_NK

    def _is_scores(self, tensor: Tensor) -> bool:
        return tensor.dim() >= 2 and tensor.shape[-1] == self.num_experts


class HashGate(TopKGate):
    """DeepSeek-V4's first layers: a frozen table of token ids chooses, the scores only weigh."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.__getitem__ and args[0] is self.router.tid2eid:
            return self._select(out.long())
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

    def _ids(self, columns_NK: Tensor) -> Tensor:
        return self._translate(columns_NK, self._key_of_rank)

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

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Tensor, Tensor]:
        if self.force is None:
            output = forward(*args, **kwargs)
            self._select(output[2])
        else:
            (hidden,) = args  # a copy for the first forward, since input jitter works in place
            devices = [hidden.device] if hidden.is_cuda else []
            with torch.no_grad(), torch.random.fork_rng(devices):
                self._select(forward(hidden.clone())[2])
            self._masks = self._choices = 0
            with self:
                output = forward(hidden, **kwargs)
        assert self.native_NK is not None and self.used_NK is not None
        return output, self.native_NK, self.used_NK

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


_ADAPTERS = {
    "DeepseekV4HashRouter": HashGate,
    "DogeCDMoE": ProductKeyGate,
    "LearnedRouter": MegaBlocksGate,
    "PhimoeTopKRouter": SparseMixerGate,
}


def gate_of(router: nn.Module) -> type[TopKGate]:
    """How `router` selects, by the name of its class."""
    return next(
        (_ADAPTERS[cls.__name__] for cls in type(router).__mro__ if cls.__name__ in _ADAPTERS), TopKGate
    )
