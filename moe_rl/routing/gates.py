"""Inside a gate: where a router selects its experts, and how its selection is replaced.

The router's own forward runs under a TorchFunctionMode that sees its `topk` over the E scores. Recording
reads the ids. Replay answers with the scores gathered at the forced ids, so the model's own normalisation,
scaling and dtype casts run on them unchanged and the gradient reaches the router's parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_rl.routing.trace import RoutingError

Force = Callable[[Tensor], Tensor]  # native ids [N, K] -> the ids to use [N, K]


class TopKGate(TorchFunctionMode):
    """A gate that selects by one top-k over E columns; a later match replaces an earlier one.

    After the router's forward, `native_NK` holds the ids it chose by itself, `used_NK` those the experts got.
    """

    def __init__(self, router: nn.Module, num_experts: int, top_k: int, force: Force | None) -> None:
        super().__init__()
        self.router, self.num_experts, self.top_k, self.force = router, num_experts, top_k, force
        self.native_NK: Tensor | None = None
        self.used_NK: Tensor | None = None
        self._masked: Tensor | None = None
        self._unmasked: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            return self._topk(func, *args, **kwargs)
        out = func(*args, **kwargs)
        if func in (torch.masked_fill, torch.Tensor.masked_fill) and self._is_scores(out):
            self._masked, self._unmasked = out, args[0]
        return out

    def _topk(self, func: Any, input: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        native = func(input, k, dim, **options)
        if k != self.top_k or not self._is_scores(input) or dim % input.dim() != input.dim() - 1:
            return native
        self.native_NK = native.indices.reshape(-1, k)
        if self.force is None:
            self.used_NK = self.native_NK
            return native
        self.used_NK = self.force(self.native_NK)
        # DeepSeek-V2 fills the scores outside its expert groups with 0 and takes gate weights from the rest:
        # a forced expert outside the groups would get weight 0. The model's own selection keeps the mask.
        scores = self._unmasked if input is self._masked and self._unmasked is not None else input
        forced = self.used_NK.view(native.indices.shape)
        return torch.return_types.topk((scores.gather(-1, forced), forced))

    def _is_scores(self, tensor: Tensor) -> bool:
        return tensor.dim() >= 2 and tensor.shape[-1] == self.num_experts


def run_gate(
    router: nn.Module, forward: Callable[[], Any], num_experts: int, top_k: int, force: Force | None
) -> tuple[Any, Tensor, Tensor]:
    """Run a router's forward; (its output, native ids [N, K], used ids [N, K]).

    Raises RoutingError when the router never selected K of E experts by a top-k.
    """
    with TopKGate(router, num_experts, top_k, force) as gate:
        output = forward()
    if gate.native_NK is None or gate.used_NK is None:
        raise RoutingError(
            f"{type(router).__name__} ran without a top-{top_k} over {num_experts} experts: its choice is "
            "unknown"
        )
    return output, gate.native_NK, gate.used_NK
