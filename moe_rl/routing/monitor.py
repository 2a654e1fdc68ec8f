"""Expert change counted while a run goes on, in any trainer: two sets of ids and a mask in, metrics out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_rl.routing.drift import expert_change
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.trace import RoutingTrace

Array = Tensor | NDArray[Any]
_INTEGERS = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64
}  # fmt: skip


class DriftMonitor:
    """Counts how many experts change between two routings of the same tokens, batch after batch.

    monitor = DriftMonitor(num_experts=128, top_k=8, layer_ids=range(48))
    monitor.update(old_BTLK, new_BTLK, mask_BT)          # all layers at once, or [N, L, K] with a mask [N]
    monitor.update(old_BTK, new_BTK, mask_BT, layer=3)   # one layer, or [N, K] with a mask [N]
    monitor.metrics()                                    # over everything since the last reset

    Ids are integers in torch or numpy, on any device; their order within K does not count. Memory is
    3 L + 2 integers whatever passes through. The numbers are those of `expert_change` on the same tokens.

    num_experts  E, logical experts
    top_k        K, experts per token
    layer_ids    names of the L router calls, distinct: decoder-layer indices, as a rule
    """

    def __init__(self, num_experts: int, top_k: int, layer_ids: Iterable[int]) -> None:
        self.num_experts, self.top_k = num_experts, top_k
        self.layer_ids = tuple(int(layer) for layer in layer_ids)
        if not self.layer_ids or len(set(self.layer_ids)) < len(self.layer_ids):
            raise RoutingError(f"layer_ids must name at least one layer, none twice, got {self.layer_ids}")
        if not 0 < top_k <= num_experts:
            raise RoutingError(f"top_k = {top_k} must be between 1 and num_experts = {num_experts}")
        self.reset()

    def reset(self) -> None:
        """Forget everything counted so far."""
        self._state = torch.zeros(3 * len(self.layer_ids) + 2, dtype=torch.int64)

    def update(self, old: Array, new: Array, mask: Array | None = None, layer: int | None = None) -> None:
        """Count the tokens where `mask` (bool or 0/1; None: all) is true.

        old, new  integers [N, L, K] or [B, T, L, K]; with `layer`, one of `layer_ids`, [N, K] or [B, T, K]
        mask      [N] or [B, T]; what its false rows hold in old and new does not matter

        Raises RoutingError for other shapes or dtypes, an unknown layer, and in the masked-in rows an id
        outside [0, E), an expert twice in a row, or a layer that is zero throughout.
        """
        layers = self.layer_ids if layer is None else (self._require_layer(layer),)
        rows = tuple(self._rows(name, ids, layer) for name, ids in (("old", old), ("new", new)))
        if rows[0].shape != rows[1].shape:
            raise RoutingError(
                f"old and new must route the same tokens, got {list(old.shape)} and {list(new.shape)}"
            )
        if mask is not None:
            masked_N = _mask(mask, tuple(old.shape[: -2 if layer is None else -1]))
            rows = tuple(ids[masked_N.to(ids.device)] for ids in rows)
        if not len(rows[0]):
            return
        before, after = (
            self._trace(name, ids, layers) for name, ids in zip(("old", "new"), rows, strict=True)
        )
        change = expert_change(before, after)
        places = [self.layer_ids.index(name) for name in layers]
        L = len(self.layer_ids)
        by_layer_3L = self._state[: 3 * L].view(3, L)
        by_layer_3L[0, places] += change.changed_experts
        by_layer_3L[1, places] += change.changed_sets
        by_layer_3L[2, places] += change.num_tokens
        if layer is None:
            self._state[-2:] += torch.tensor([change.changed_tokens, change.num_tokens])

    def metrics(self, name: str = "drift") -> dict[str, float]:
        """What was counted, as fractions; empty where nothing was.

        {name}/experts      mean over tokens and layers of 1 - |A ∩ B| / K (arXiv 2507.18071, 5.3: "roughly
                            10%" after one update)
        {name}/sets         share of (token, layer) whose expert set changed at all
        {name}/tokens       share of tokens with a change in at least one layer; only where every update gave
                            all layers, since a token's layers cannot be told together otherwise
        {name}/by_layer/ID  {name}/experts of one layer; layers without tokens are left out
        """
        changed_L, sets_L, tokens_L = self._state[:-2].view(3, -1).tolist()
        tokens = sum(tokens_L)
        if not tokens:
            return {}
        found = {
            f"{name}/experts": sum(changed_L) / (self.top_k * tokens),
            f"{name}/sets": sum(sets_L) / tokens,
        }
        changed_jointly, joint = self._state[-2:].tolist()
        if joint * len(self.layer_ids) == tokens:
            found[f"{name}/tokens"] = changed_jointly / joint
        for layer, changed, count in zip(self.layer_ids, changed_L, tokens_L, strict=True):
            if count:
                found[f"{name}/by_layer/{layer}"] = changed / (self.top_k * count)
        return found

    def state(self) -> Tensor:
        """int64 [3 L + 2] on the CPU: sums, so that the states of several ranks add up to that of them all.

        Changed experts [L], changed sets [L] and tokens [L] by layer, then changed tokens and tokens of
        updates with all layers.

        state = monitor.state().to(device)
        torch.distributed.all_reduce(state)
        monitor.load_state(state)
        """
        return self._state.clone()

    def load_state(self, state: Tensor) -> None:
        """Go on from a `state` in place of one's own. Raises RoutingError for one of other layers."""
        if state.dtype != torch.int64 or state.shape != self._state.shape or bool((state < 0).any()):
            raise RoutingError(
                f"the state of a monitor of {len(self.layer_ids)} layers is int64 {list(self._state.shape)}, "
                f"from 0 on; got {state.dtype} {list(state.shape)}"
            )
        self._state = state.detach().to("cpu", copy=True)

    def merge(self, other: DriftMonitor) -> None:
        """Add what another monitor of the same model counted. Raises RoutingError for another model's."""
        for name in ("layer_ids", "num_experts", "top_k"):
            if getattr(self, name) != getattr(other, name):
                raise RoutingError(
                    f"the monitors are of different models: {name} is {getattr(self, name)} in one, "
                    f"{getattr(other, name)} in the other"
                )
        self._state += other._state

    def _require_layer(self, layer: int) -> int:
        if layer not in self.layer_ids:
            raise RoutingError(f"layer = {layer} is none of the monitor's layer_ids {self.layer_ids}")
        return layer

    def _rows(self, name: str, ids: Array, layer: int | None) -> Tensor:
        """[N, L, K], or [N, 1, K] of one layer."""
        tensor = ids.detach() if isinstance(ids, Tensor) else torch.from_numpy(np.array(ids))
        tail = (len(self.layer_ids), self.top_k) if layer is None else (self.top_k,)
        shapes = "[N, L, K] or [B, T, L, K]" if layer is None else "[N, K] or [B, T, K], for layer is given,"
        fits = tensor.dim() - len(tail) in (1, 2) and tuple(tensor.shape[-len(tail) :]) == tail
        if not fits or tensor.dtype not in _INTEGERS:
            raise RoutingError(
                f"{name} must be integers {shapes} with L = {len(self.layer_ids)} and K = {self.top_k}, got "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
        return tensor.reshape(-1, 1 if layer is not None else tail[0], self.top_k)

    def _trace(self, name: str, ids_NLK: Tensor, layers: tuple[int, ...]) -> RoutingTrace:
        valid_1N = torch.ones(1, len(ids_NLK), dtype=torch.bool, device=ids_NLK.device)
        try:
            return RoutingTrace(ids_NLK[None], valid_1N, layers, self.num_experts).validate()
        except RoutingError as error:
            raise RoutingError(f"{name}: {error}") from error


def _mask(mask: Array, shape: tuple[int, ...]) -> Tensor:
    """bool [N] of a mask of `shape`."""
    tensor = mask.detach() if isinstance(mask, Tensor) else torch.from_numpy(np.array(mask))
    if tuple(tensor.shape) != shape or not bool(((tensor == 0) | (tensor == 1)).all()):
        raise RoutingError(
            f"the mask must be bool or 0/1 of shape {list(shape)}, as the tokens of old and new, got "
            f"{tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.reshape(-1).bool()
