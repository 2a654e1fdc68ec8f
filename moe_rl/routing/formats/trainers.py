"""What RL trainers keep of their rollouts: verl, ms-swift, slime, miles, NeMo-RL, SkyRL, prime-rl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from moe_rl.routing.formats.checks import require_count
from moe_rl.routing.formats.decode import base64_bytes, integers, packed, raw_array
from moe_rl.routing.formats.geometry import ModelRouting
from moe_rl.routing.formats.rows import (
    Rows,
    align_to_mask,
    import_sequences,
    to_trace,
)
from moe_rl.routing.trace import RoutingError, RoutingTrace

_ZEROS = (0,)
_NEMO_MAGIC = "nrlre1"
_NEMO_DTYPES = ("int8", "int16", "int32")


def from_verl(value: Any, routing: ModelRouting, *, attention_mask: Tensor) -> RoutingTrace:
    """verl's padded `routed_experts`, also ms-swift's batch; the trace keeps the batch's layout.

    value           [B, T, layers, K] (int16; uint8 in older versions, int64 in ms-swift), prompts padded on
                    the left and responses on the right with zeros. A last row of zeros is a token that was
                    never routed. With K = 1 that cannot be told from expert 0 in every layer: the row is
                    then not valid.
    attention_mask  bool or 0/1 [B, T].
    Raises RoutingError, also for routing on padding. Source: verl/experimental/agent_loop/agent_loop.py.
    """
    source = "verl"
    if not isinstance(attention_mask, Tensor) or attention_mask.is_meta or attention_mask.is_nested:
        raise RoutingError(
            f"{source}: attention_mask must be a tensor [B, T], got {type(attention_mask).__name__}"
        )
    array_BTLK, mask_BT = integers(value, source), attention_mask.bool().cpu()
    if array_BTLK.ndim != 4 or array_BTLK.shape[:2] != tuple(mask_BT.shape):
        raise RoutingError(
            f"{source}: expected [B, T, layers, K] with [B, T] = {list(mask_BT.shape)}, got "
            f"{list(array_BTLK.shape)}"
        )
    tokens = mask_BT.sum(dim=1).tolist()
    rows = []
    for b, (rows_TLK, mask_T) in enumerate(zip(array_BTLK, mask_BT.numpy(), strict=True)):
        if rows_TLK[~mask_T].any():
            raise RoutingError(
                f"{source}: sequence {b} holds routing where attention_mask is 0: rows are shifted"
            )
        rows.append(Rows(source, rows_TLK[mask_T], padding=_ZEROS))
    return align_to_mask(to_trace(rows, routing, tokens), mask_BT)


def from_verl_jagged(value: Any, routing: ModelRouting, *, tokens: Sequence[int]) -> RoutingTrace:
    """verl's jagged `routed_experts`: a nested tensor, or a list, of int16 [length or length - 1, layers, K].

    A last row of zeros is a token that was never routed. Raises RoutingError. Source: verl's no-padding
    batches, verl/utils/megatron/router_replay_utils.py.
    """
    if isinstance(value, Tensor) and value.is_nested:
        value = value.unbind()
    return import_sequences(verl_rows, value, routing, tokens)


def verl_rows(value: Any, routing: ModelRouting, start: int = 0) -> Rows:
    """Decode one sequence of a jagged verl batch; see `from_verl_jagged`."""
    return Rows("verl", integers(value, "verl"), start, padding=_ZEROS)


def from_slime(value: Any, routing: ModelRouting, *, tokens: int | Sequence[int]) -> RoutingTrace:
    """`Sample.rollout_routed_experts` of slime or miles: int32 [tokens - 1, layers, K]; miles marks missing
    rows with -1.

    value  an array, tensor or nested lists, the sample's dictionary, or None for an aborted sample. With a
           sequence of `tokens`, a sequence of those.
    Raises RoutingError. Sources: slime/utils/types.py, miles/utils/types.py.
    """
    return import_sequences(slime_rows, value, routing, tokens)


def slime_rows(value: Any, routing: ModelRouting, start: int = 0) -> Rows:
    """Decode one slime or miles sample; see `from_slime`."""
    if isinstance(value, Mapping):
        if "rollout_routed_experts" not in value:
            raise RoutingError("slime: the sample has no rollout_routed_experts")
        value = value["rollout_routed_experts"]
    return Rows("slime", None if value is None else integers(value, "slime"), start)


def from_nemo_rl(value: Any, routing: ModelRouting, *, tokens: int | Sequence[int]) -> RoutingTrace:
    """NeMo-RL's `routed_experts`: `nrlre1:<dtype>:<S>x<L>x<K>:<base64>` strings, or their tensors.

    value  one string, tensor or nested lists [S, L, K]; with a sequence of `tokens`, a sequence of those or a
           batch [B, S, L, K] padded on the right. Rows that are -1 throughout are missing. NeMo-RL fills the
           last token's row and padding with a dummy 0 .. K-1, which is cut.
    Raises RoutingError. Sources: nemo_rl/utils/routed_experts_codec.py; `pad_and_align_routed_expert_indices`
    in nemo_rl/models/generation/vllm/utils.py.
    """
    return import_sequences(nemo_rl_rows, value, routing, tokens)


def nemo_rl_rows(value: Any, routing: ModelRouting, start: int = 0) -> Rows:
    """Decode one NeMo-RL payload; see `from_nemo_rl`."""
    source, dummy = "NeMo-RL", tuple(range(routing.top_k))
    if value is None or not isinstance(value, str):
        return Rows(source, None if value is None else integers(value, source), start, padding=dummy)
    parts = value.split(":", 3)
    if len(parts) != 4 or parts[0] != _NEMO_MAGIC or parts[1] not in _NEMO_DTYPES:
        raise RoutingError(
            f"{source}: expected {_NEMO_MAGIC}:<{'|'.join(_NEMO_DTYPES)}>:<S>x<L>x<K>:<base64>, got "
            f"{value[:40]!r}"
        )
    sizes = parts[2].split("x")
    if any(not (size.isascii() and size.isdigit() and len(size) < 12) for size in sizes):
        raise RoutingError(f"{source}: the shape must be <S>x<L>x<K>, got {parts[2][:40]!r}")
    shape = [int(size) for size in sizes]
    array = raw_array(base64_bytes(parts[3], source), shape, parts[1], source)
    return Rows(source, array, start, padding=dummy)


def from_skyrl(value: Any, routing: ModelRouting, *, tokens: int | Sequence[int]) -> RoutingTrace:
    """SkyRL's `{"data": base64, "shape": [rows, layers, K], "dtype": uint8 | int16 | int32}`.

    value  one such mapping, or None for an aborted request; with a sequence of `tokens`, a sequence of them.
    The dtype follows the largest id of the payload, so it may differ between sequences. Raises RoutingError.
    Source: skyrl/backends/skyrl_train/inference_servers/generate_wire.py.
    """
    return import_sequences(skyrl_rows, value, routing, tokens)


def skyrl_rows(value: Any, routing: ModelRouting, start: int = 0) -> Rows:
    """Decode one SkyRL payload; see `from_skyrl`."""
    if value is None:
        return Rows("SkyRL", None, start)
    return Rows("SkyRL", packed(value, "SkyRL"), start, sized_by_ids=True)


def from_prime_rl(value: Any, routing: ModelRouting, *, tokens: int | Sequence[int]) -> RoutingTrace:
    """prime-rl's `{"data", "shape": [rows, layers, K], "start", "dtype": uint8 | uint16}`.

    value  one such mapping (`data` base64 text on the wire, bytes in a TrainingSample), or None; with a
           sequence of `tokens`, a sequence of them. `dtype` follows the largest id of the payload; absent, it
           is uint8, which is refused for more than 256 experts. The last token's row in a TrainingSample is
           padding of zeros, and is cut.
    Raises RoutingError. Sources: src/prime_rl/inference/vllm/routed_experts.py,
    src/prime_rl/orchestrator/trajectories.py.
    """
    return import_sequences(prime_rl_rows, value, routing, tokens)


def prime_rl_rows(value: Any, routing: ModelRouting, start: int = 0) -> Rows:
    """Decode one prime-rl payload; see `from_prime_rl`."""
    source = "prime-rl"
    if value is None:
        return Rows(source, None, start)
    array = packed(value, source, default_dtype="uint8")
    told = require_count("start", value.get("start", 0), least=0)
    return Rows(source, array, told, sized_by_ids="dtype" in value, padding=_ZEROS)
