"""What can be wrong with the rows of one sequence: one function a fault, each raises RoutingError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from moe_rl.routing.formats.geometry import ModelRouting
from moe_rl.routing.trace import RoutingError

MISSING = -1  # fills the rows an engine knows it did not capture


def require_count(name: str, value: Any, least: int) -> int:
    """Return an int of at least `least`; bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise RoutingError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def is_list(value: Any) -> bool:
    """Whether a value has items to count: a list, a tuple, or an array that is no scalar."""
    if isinstance(value, Tensor):
        return not value.is_nested and value.ndim > 0
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)


def is_one_integer(value: Any) -> bool:
    """Whether a count stands for one sequence, and not for a list of them."""
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim == 0
    return isinstance(value, int | np.integer)


def require_counts(name: str, value: Any, least: int) -> list[int]:
    """One integer a sequence; a single integer stands for one sequence."""
    if isinstance(value, np.ndarray) or (isinstance(value, Tensor) and not value.is_meta):
        value = value.tolist()
    if is_one_integer(value):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RoutingError(f"{name} must be an integer, or a list of one a sequence, got {value!r}")
    return [require_count(name, one, least) for one in value]


def require_top_k(source: str, experts_RLK: np.ndarray, top_k: int) -> None:
    """Rows [rows, layers, K] with the K of the model's config."""
    if experts_RLK.ndim != 3:
        raise RoutingError(f"{source}: expected [rows, layers, K], got {list(experts_RLK.shape)}")
    if experts_RLK.shape[2] != top_k:
        raise RoutingError(
            f"{source}: expected K = {top_k} experts per token from the model's config, got "
            f"{experts_RLK.shape[2]}. One more is a fused shared expert that the engine did not strip"
        )


def unpad(source: str, experts_RLK: np.ndarray, padding: tuple[int, ...], expected: int) -> np.ndarray:
    """The rows of the sequence; refuses routing in the rows after it, where a shift would put it."""
    padding_R = np.zeros(len(experts_RLK), dtype=bool)
    for filler in (padding, 0, MISSING):
        padding_R |= (experts_RLK == filler).all(axis=(1, 2))
    stray = np.flatnonzero(~padding_R[expected:])
    if len(stray):
        raise RoutingError(
            f"{source}: row {expected + int(stray[0])}, after the end of its {expected} tokens, holds "
            "routing: the rows are shifted, or the length is another sequence's"
        )
    unrouted = len(experts_RLK) >= expected and padding_R[expected - 1]
    return experts_RLK[: expected - 1 if unrouted else expected]


def require_row_count(source: str, count: int, start: int, tokens: int) -> None:
    """A row for every token from `start` on, or for every one but the last."""
    expected = tokens - start
    if count in (expected, expected - 1) and not (start == 1 and count == expected):
        return
    if start == 1 and count == expected:
        hint = "an engine that ignored start sends as many; ask it for start = 0"
    elif start and count in (tokens, tokens - 1):
        hint = "the engine ignored start; import the payload with start = 0"
    elif count < expected:
        hint = "rows were lost, and which ones is unknown"
    else:
        hint = "rows were added or sent twice"
    raise RoutingError(
        f"{source}: {count} rows for {tokens} tokens from start = {start}; expected {expected} (every "
        f"token) or {expected - 1} (all but the last, which is never routed): {hint}"
    )


def require_one_reading(source: str, count: int, expected: int, top_k: int) -> None:
    """N rows of K ids without a shape can be N - 1 rows of K + s, where (N - 1) (K + s) = N K."""
    if 1 < count == expected and top_k % (count - 1) == 0:
        shared = top_k // (count - 1)
        raise RoutingError(
            f"{source}: {count} rows of {top_k} ids are as many as {count - 1} rows of {top_k + shared}, "
            f"{shared} of them fused shared experts, and a payload without a shape does not tell which"
        )


def require_wide_dtype(source: str, dtype: np.dtype, num_experts: int) -> None:
    """A dtype that holds every id, so that none has wrapped."""
    if np.iinfo(dtype).max < num_experts - 1:
        raise RoutingError(
            f"{source}: {dtype} cannot hold the ids of {num_experts} experts, so some may have wrapped. The "
            "payload is of another model, or the engine is too old for this one"
        )


def moe_columns(source: str, experts_RLK: np.ndarray, routing: ModelRouting) -> np.ndarray:
    """The MoE layers among the columns; dense ones are dropped by their index, and must be empty."""
    moe, columns = list(routing.moe_layer_ids), experts_RLK.shape[1]
    if columns == len(moe):
        return experts_RLK
    if columns != routing.num_hidden_layers:
        raise RoutingError(
            f"{source}: expected all {routing.num_hidden_layers} decoder layers or the {len(moe)} MoE "
            f"layers, got {columns}. Multi-token prediction layers must not be included"
        )
    dense = np.delete(experts_RLK, moe, axis=1)
    if ((dense != 0) & (dense != MISSING)).any():
        raise RoutingError(
            f"{source}: a dense layer holds expert ids, so the layers are shifted or the config is another "
            f"model's; the MoE layers are {tuple(moe)} of {routing.num_hidden_layers}"
        )
    return experts_RLK[:, moe]


def named_columns(source: str, experts_RLK: np.ndarray, layer_ids: tuple[int, ...]) -> np.ndarray:
    """The columns, one a layer of `layer_ids`, in ascending order of the layers."""
    if experts_RLK.shape[1] != len(layer_ids):
        raise RoutingError(
            f"{source}: expected {len(layer_ids)} MoE layers {layer_ids}, got {experts_RLK.shape[1]}. Dense "
            "layers, multi-token prediction and routers that are not part of the model must be left out"
        )
    return experts_RLK[:, np.argsort(layer_ids)]


def require_ids(source: str, experts_RLK: np.ndarray, layers: tuple[int, ...], num_experts: int) -> None:
    """Logical ids of the model in every place of a routed row."""
    if (experts_RLK == MISSING).any():
        raise RoutingError(f"{source}: a row holds -1 in some places; a missing row is -1 in every layer")
    outside_L = ((experts_RLK < 0) | (experts_RLK >= num_experts)).any(axis=(0, 2))
    if outside_L.any():
        ids = experts_RLK[:, outside_L.argmax()]
        raise RoutingError(
            f"{source}: expert ids must lie in [0, {num_experts}), layer {layers[outside_L.argmax()]} holds "
            f"{ids.min()} to {ids.max()}. A load balancer's physical ids must be mapped to logical ones "
            "first"
        )


def require_captured(source: str, experts_RLK: np.ndarray, num_experts: int) -> None:
    """No zeros where a capture did not run. With one expert per token a layer of zeros can be a collapsed
    router, so only zeros in all of several layers are refused."""
    if num_experts == 1 or not experts_RLK.size:
        return
    zero_R = (experts_RLK == 0).all(axis=(1, 2))
    top_k = experts_RLK.shape[2]
    if (top_k > 1 and zero_R.any()) or (experts_RLK.shape[1] > 1 and zero_R.all()):
        which = "every row" if zero_R.all() else f"row {int(zero_R.argmax())}"
        raise RoutingError(
            f"{source}: {which} is zero in every layer, so it was not captured (a kernel without the hook, "
            "a cached prefix, a preempted request)"
        )
