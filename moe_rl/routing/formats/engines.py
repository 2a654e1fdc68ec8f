"""What rollout engines return: vLLM, SGLang, FlashInfer, tunix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from moe_rl.routing.formats.checks import is_list, require_count
from moe_rl.routing.formats.decode import base64_bytes, integers, npy_array, raw_array
from moe_rl.routing.formats.geometry import ModelRouting
from moe_rl.routing.formats.rows import Rows, import_sequences
from moe_rl.routing.trace import RoutingError, RoutingTrace


def from_vllm(
    value: Any, routing: ModelRouting, *, tokens: int | Sequence[int], start: int | Sequence[int] = 0
) -> RoutingTrace:
    """Routing that vLLM returned with `enable_return_routed_experts`.

    value   one of: an array or nested lists [rows, layers, K] (`CompletionOutput.routed_experts`; int32 up to
            0.20, uint8 or uint16 since); the base64 `.npy` text of an HTTP choice; a choice, a mapping with
            `routed_experts`; the split form of 0.21, a mapping with `prompt_routed_experts` as well, where
            cached prompt tokens are -1; None for an aborted request.
    tokens  prompt + completion tokens. A sequence of them makes `value` a sequence of payloads.
    start   `SamplingParams.routed_experts_prompt_start` of the request.
    Raises RoutingError. Sources: vllm/model_executor/layers/fused_moe/routed_experts_capturer.py; vLLM's
    documentation, training/routed_experts_replay (0.21) and training/routed_experts (later).
    """
    return import_sequences(vllm_rows, value, routing, tokens, start)


def vllm_rows(value: Any, routing: ModelRouting, start: int = 0) -> Rows:
    """Decode one vLLM payload; see `from_vllm`."""
    source = "vLLM"
    if isinstance(value, Mapping):
        completion = _field(value, "routed_experts", source)
        prompt = value.get("prompt_routed_experts")
        if prompt is None or completion is None:
            return vllm_rows(completion, routing, start)
        return Rows(f"{source} 0.21", _join(prompt, completion, f"{source} 0.21"), start)
    if value is None:
        return Rows(source, None, start)
    if isinstance(value, str | bytes):
        return Rows(source, npy_array(base64_bytes(value, source), source), start)
    return Rows(source, integers(value, source), start)


def from_sglang(
    value: Any, routing: ModelRouting, *, tokens: int | Sequence[int], start: int | Sequence[int] = 0
) -> RoutingTrace:
    """Routing that SGLang returned with `return_routed_experts`; also what ROLL and AReaL keep of it.

    value   one of: a response, or its `meta_info`, with `routed_experts` (base64 of raw int32, or of
            `routed_experts_dtype` where the server names one), or with `input_expert_ids`,
            `output_expert_ids` and `expert_ids_schema`; the base64 text alone (int32); decoded ids, flat,
            [rows, layers * K] or [rows, layers, K]; None for an aborted request.
    tokens  prompt + completion tokens. A sequence of them makes `value` a sequence of payloads.
    start   `routed_experts_start_len` of the request, unless `meta_info` repeats it.
    Dense layers are there and hold zeros. A flat payload in which N rows of K ids could be N - 1 rows with
    fused shared experts besides (sequences of K + 1 tokens or fewer) is refused.
    Raises RoutingError. Source: python/sglang/srt/state_capturer/routed_experts.py.
    """
    return import_sequences(sglang_rows, value, routing, tokens, start)


def sglang_rows(value: Any, routing: ModelRouting, start: int = 0) -> Rows:
    """Decode one SGLang payload; see `from_sglang`."""
    source = "SGLang"
    if isinstance(value, Mapping):
        meta = value.get("meta_info") or value.get("sglext") or value
        if not isinstance(meta, Mapping):
            raise RoutingError(f"{source}: meta_info must be an object, got {type(meta).__name__}")
        if "expert_ids_schema" in meta:
            return _sglang_partitions(meta, routing, start)
        told = meta.get("routed_experts_start_len")
        if told is not None:
            told = require_count("routed_experts_start_len", told, least=0)
            if start not in (0, told):
                raise RoutingError(f"{source}: meta_info says start = {told}, the caller {start}")
            start = told
        ids = _field(meta, "routed_experts", source)
        if ids is None:
            return Rows(source, None, start)
        raw = base64_bytes(ids, source)
        flat = raw_array(raw, None, meta.get("routed_experts_dtype", "int32"), source)
        return Rows(source, _unflatten(flat, routing, source), start, flat=True)
    if value is None:
        return Rows(source, None, start)
    if isinstance(value, str | bytes):
        flat = raw_array(base64_bytes(value, source), None, "int32", source)
        return Rows(source, _unflatten(flat, routing, source), start, flat=True)
    array = integers(value, source)
    if array.ndim == 3:
        return Rows(source, array, start)
    return Rows(source, _unflatten(array, routing, source), start, flat=array.ndim == 1)


def from_flashinfer(
    value: Sequence[Any],
    routing: ModelRouting,
    *,
    tokens: int | Sequence[int],
    start: int | Sequence[int] = 0,
) -> RoutingTrace:
    """Routing that FlashInfer's fused MoE kernels wrote to `routing_replay_out`.

    value   one int16 buffer [tokens, K] per MoE layer, in layer order, already cut to the tokens of the
            sequence: rows beyond them are left over from other batches.
    Raises RoutingError. Source: flashinfer/fused_moe/core.py, `routing_replay_out`.
    """
    return import_sequences(layer_rows, value, routing, tokens, start)


def layer_rows(value: Any, routing: ModelRouting, start: int = 0) -> Rows:
    """Decode one array [rows, K] per MoE layer, in layer order."""
    source = "per-layer buffers"
    return Rows(source, stack_layers(value, source), start, layer_ids=routing.moe_layer_ids)


def from_tunix(value: Any, routing: ModelRouting, *, tokens: Sequence[int]) -> RoutingTrace:
    """Routing in tunix's axis order, of a batch padded on the right.

    value   [B, layers, length, K]; padding and unrouted rows hold -1 or zeros.
    Raises RoutingError. Source: tunix/experimental/rollout/sampler.py, `SamplerResponse.routed_experts`.
    """
    array_BLTK = integers(value, "tunix")
    if array_BLTK.ndim != 4 or array_BLTK.shape[1] not in (
        routing.num_hidden_layers,
        len(routing.moe_layer_ids),
    ):
        raise RoutingError(
            f"tunix: expected [B, layers, length, K] with {routing.num_hidden_layers} decoder or "
            f"{len(routing.moe_layer_ids)} MoE layers on axis 1, got {list(array_BLTK.shape)}"
        )
    return import_sequences(tunix_rows, array_BLTK, routing, tokens)


def tunix_rows(value: Any, routing: ModelRouting, start: int = 0) -> Rows:
    """Decode one sequence [layers, length, K] of a tunix batch."""
    array_LTK = integers(value, "tunix")
    if array_LTK.ndim != 3:
        raise RoutingError(f"tunix: expected [layers, length, K], got {list(array_LTK.shape)}")
    return Rows("tunix", array_LTK.swapaxes(0, 1), start, padding=(0,))


def stack_layers(layers: Any, source: str) -> np.ndarray:
    """[rows, layers, K] of one [rows, K] array per layer. Raises RoutingError when they do not fit."""
    if isinstance(layers, Tensor) or not is_list(layers) or len(layers) == 0:
        raise RoutingError(
            f"{source}: expected one [rows, K] array per MoE layer, got {type(layers).__name__}"
        )
    arrays = []
    for index, layer in enumerate(layers):
        if layer is None:
            raise RoutingError(
                f"{source}: entry {index} holds nothing: its router never ran. Leave out instances that are "
                "not part of the model that was run"
            )
        arrays.append(integers(layer, source))
    shapes = {array.shape for array in arrays}
    dtypes = {array.dtype.name for array in arrays}
    if len(shapes) > 1 or len(dtypes) > 1 or arrays[0].ndim != 2:
        raise RoutingError(
            f"{source}: every layer must be [rows, K] of one shape and dtype, got {sorted(shapes)} "
            f"{sorted(dtypes)}"
        )
    return np.stack(arrays, axis=1)


def _field(record: Mapping[str, Any], name: str, source: str) -> Any:
    if name not in record:
        raise RoutingError(
            f"{source}: no {name} among {sorted(map(str, record))[:10]}; was its return asked for?"
        )
    return record[name]


def _join(first: Any, second: Any, source: str) -> np.ndarray:
    arrays = [integers(first, source), integers(second, source)]
    if arrays[0].dtype != arrays[1].dtype or any(array.ndim != 3 for array in arrays):
        raise RoutingError(
            f"{source}: prompt and completion must be [rows, layers, K] of one dtype, got "
            + " and ".join(f"{array.dtype} {list(array.shape)}" for array in arrays)
        )
    if arrays[0].shape[1:] != arrays[1].shape[1:]:
        raise RoutingError(
            f"{source}: prompt and completion differ in [layers, K]: {arrays[0].shape[1:]}, "
            f"{arrays[1].shape[1:]}"
        )
    return np.concatenate(arrays)


def _unflatten(array: np.ndarray, routing: ModelRouting, source: str) -> np.ndarray:
    """[rows, layers, K] of ids that are flat or [rows, layers * K]; all decoder layers are there."""
    layers, top_k = routing.num_hidden_layers, routing.top_k
    row = layers * top_k
    if array.ndim not in (1, 2) or array.size % row or (array.ndim == 2 and array.shape[1] != row):
        raise RoutingError(
            f"{source}: {list(array.shape)} ids are not rows of {layers} layers * {top_k} experts "
            "(num_hidden_layers and K from the model's config). Another K, a fused shared expert, or "
            "another model"
        )
    return array.reshape(array.size // row, layers, top_k)


def _sglang_partitions(meta: Mapping[str, Any], routing: ModelRouting, start: int) -> Rows:
    """The prompt's and the completion's rows apart, with a schema that states the layout."""
    source = "SGLang partitions"
    schema = meta["expert_ids_schema"]
    if not isinstance(schema, Mapping):
        raise RoutingError(f"{source}: expert_ids_schema must be an object, got {type(schema).__name__}")
    expected = {
        "layout": "row_major",
        "id_space": "logical_global",
        "num_layers": routing.num_hidden_layers,
        "top_k": routing.top_k,
        "moe_layer_ids": list(routing.moe_layer_ids),
    }
    for name, wanted in expected.items():
        if schema.get(name) != wanted:
            raise RoutingError(f"{source}: expected {name} = {wanted}, the schema says {schema.get(name)!r}")
    parts, begin, end = [], start, None
    for part in ("input", "output"):
        if meta.get(f"{part}_expert_ids") is None:
            continue
        position = require_count(f"{part}_start_position", schema.get(f"{part}_start_position"), least=0)
        count = require_count(f"{part}_num_rows", schema.get(f"{part}_num_rows"), least=0)
        if end is not None and position != end:
            raise RoutingError(
                f"{source}: the prompt's rows end at {end}, the completion's begin at {position}"
            )
        begin, end = position if end is None else begin, position + count
        raw = base64_bytes(meta[f"{part}_expert_ids"], source)
        shape = [count, routing.num_hidden_layers, routing.top_k]
        parts.append(raw_array(raw, shape, schema.get("dtype"), source))
    if start not in (0, begin):
        raise RoutingError(f"{source}: the schema says start = {begin}, the caller {start}")
    return Rows(source, np.concatenate(parts) if parts else None, begin)
