"""Recognises files that hold routing, and splits them into payloads that the importers read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.routing.formats.decode import base64_bytes, npy_array
from moe_rl.routing.formats.engines import layer_rows, sglang_rows, tunix_rows, vllm_rows
from moe_rl.routing.formats.geometry import ModelRouting
from moe_rl.routing.formats.megatron import (
    megatron_inference_rows,
    miles_micro_batch,
    read_json_lines,
    read_miles_dump,
    tracer_rows,
)
from moe_rl.routing.formats.rows import Decoder, to_trace
from moe_rl.routing.formats.trainers import nemo_rl_rows, prime_rl_rows, skyrl_rows, slime_rows, verl_rows
from moe_rl.routing.trace import RoutingError, RoutingTrace

DECODERS: dict[str, Decoder] = {
    "vllm": vllm_rows,
    "sglang": sglang_rows,
    "megatron-inference": megatron_inference_rows,
    "router-tracer": tracer_rows,
    "per-layer": layer_rows,
    "verl": verl_rows,
    "slime": slime_rows,
    "nemo-rl": nemo_rl_rows,
    "skyrl": skyrl_rows,
    "prime-rl": prime_rl_rows,
    "tunix": tunix_rows,
}
_NPY_MAGIC = b"\x93NUMPY"
_ZIP_MAGIC = b"PK\x03\x04"  # what torch.save writes


@dataclass(frozen=True)
class Payload:
    """The routing of one sequence in a file: where it is, its format, its length where the file says."""

    place: str
    format: str
    value: Any
    tokens: int | None = None


def is_own_trace(path: Path) -> bool:
    """Whether a file looks like safetensors, as `RoutingTrace.save` writes: a length, then a JSON header."""
    with open(path, "rb") as file:
        start = file.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size


def read_payloads(path: Path, format: str | None = None) -> list[Payload]:
    """The payloads of a `.npy`, `.pt`, JSON, JSON-lines or text file; `format` overrides what it looks like.

    Raises RoutingError for a file that holds no routing, OSError for one that cannot be read.
    """
    data = path.read_bytes()
    if data.startswith(_NPY_MAGIC):
        payloads = _arrays(npy_array(data, str(path)), format)
    elif data.startswith(_ZIP_MAGIC):
        layers = read_miles_dump(path)
        counts = range(min(map(len, layers), default=0))
        payloads = [Payload(f"micro-batch {m}", "per-layer", miles_micro_batch(layers, m)) for m in counts]
    else:
        payloads = [
            payload if format is None else Payload(payload.place, format, payload.value, payload.tokens)
            for payload in _text(path, data)
        ]
    if not payloads:
        raise RoutingError("no routing in it")
    return payloads


def import_payload(
    payload: Payload, routing: ModelRouting, tokens: int | None = None, start: int = 0
) -> RoutingTrace:
    """The checked trace of one payload.

    Where neither `tokens` nor the file says how long the sequence is, the number of rows cannot be checked:
    the rows are then taken to end with the last token but one, or with the last where the format pads.
    """
    rows = DECODERS[payload.format](payload.value, routing, start)
    length = payload.tokens if tokens is None else tokens
    if length is None and rows.experts_RLK is not None:
        length = rows.start + len(rows.experts_RLK) + (rows.padding is None)
    return to_trace([rows], routing, [length or 1])


def _arrays(array: np.ndarray, format: str | None) -> list[Payload]:
    if array.ndim == 4:
        if format is None:
            raise RoutingError(
                f"a batch {list(array.shape)} is verl's [B, T, layers, K] or tunix's [B, layers, T, K]: "
                "name its format"
            )
        return [Payload(f"sequence {b}", format, experts) for b, experts in enumerate(array)]
    return [Payload("", format or ("vllm" if array.ndim == 3 else "sglang"), array)]


def _text(path: Path, data: bytes) -> list[Payload]:
    try:
        text = data.decode().strip()
    except UnicodeDecodeError as error:
        raise RoutingError("neither text, .npy, .pt nor safetensors") from error
    if not text.startswith(("{", "[", '"')):
        return list(_find(text))
    try:
        return list(_find(json.loads(text)))
    except (ValueError, RecursionError) as error:
        if isinstance(error, RoutingError) or "\n" not in text:
            raise RoutingError(f"no readable JSON: {error}") from error
    return list(_find(read_json_lines(path)))


def _find(value: Any, place: str = "") -> Iterator[Payload]:
    """The payloads of a JSON value or a text."""
    if isinstance(value, str):
        yield Payload(place, _text_format(value), value)
    elif isinstance(value, Mapping):
        yield from _find_in_object(value, place)
    elif isinstance(value, list) and value and all(isinstance(item, Mapping | str) for item in value):
        if all(isinstance(item, Mapping) and "top_indices" in item for item in value):
            yield Payload(place, "router-tracer", value)
            return
        for index, item in enumerate(value):
            yield from _find(item, f"{place} entry {index}".strip())
    else:
        yield Payload(place, "vllm", value)


def _find_in_object(value: Mapping[str, Any], place: str) -> Iterator[Payload]:
    if isinstance(value.get("choices"), list):
        single = len(value["choices"]) == 1
        for index, choice in enumerate(value["choices"]):
            where = f"{place} choice {index}".strip()
            shared = {name: value[name] for name in ("prompt_routed_experts", "sglext") if name in value}
            if not isinstance(choice, Mapping):
                raise RoutingError(f"{where} is no object")
            for payload in _find_in_object({**shared, **choice}, where):
                tokens = payload.tokens or (_length(value.get("usage")) if single else None)
                yield Payload(payload.place, payload.format, payload.value, tokens)
    elif "meta_info" in value or "sglext" in value or "expert_ids_schema" in value:
        yield Payload(place, "sglang", value, _length(value.get("meta_info")))
    elif "rollout_routed_experts" in value:
        tokens = value.get("tokens")
        yield Payload(place, "slime", value, len(tokens) if isinstance(tokens, list) and tokens else None)
    elif "moe_topk_indices" in value:
        yield Payload(place, "megatron-inference", value)
    elif "top_indices" in value:
        yield Payload(place, "router-tracer", [value])
    elif "data" in value and "shape" in value:
        yield Payload(place, "prime-rl" if "start" in value or "dtype" not in value else "skyrl", value)
    elif "routed_experts" in value:
        routed = value["routed_experts"]
        if routed is None or isinstance(routed, list) or "prompt_routed_experts" in value:
            yield Payload(place, "vllm", value)
        else:
            yield from _find(routed, place)
    else:
        raise RoutingError(f"no routing among {sorted(map(str, value))[:10]}")


def _text_format(text: str) -> str:
    if text.startswith("nrlre1:"):
        return "nemo-rl"
    return "vllm" if base64_bytes(text, "text").startswith(_NPY_MAGIC) else "sglang"


def _length(usage: Any) -> int | None:
    """Prompt and completion tokens, where both are told."""
    if not isinstance(usage, Mapping):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return prompt + completion if type(prompt) is int and type(completion) is int else None
