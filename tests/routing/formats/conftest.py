"""Payloads as each source's documentation or code lays them out, and an independent reading of each.

The readings here (`naive`) share no code with the importers: they are what a payload says, with no check.
"""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_rl.routing import formats
from moe_rl.routing.formats import ModelRouting

MODEL = ModelRouting(num_hidden_layers=5, moe_layer_ids=(1, 2, 4), num_experts=12, top_k=2)


@dataclass(frozen=True)
class Source:
    """How a source writes rows [R, MoE layers, K], how they are imported, and what a payload says."""

    write: Callable[[np.ndarray], Any]
    read: Callable[[Any, int], Any]
    naive: Callable[[Any], tuple[int, np.ndarray]]  # (start, rows [R, layers, K])


def draw_experts(rows: int, seed: int = 0, model: ModelRouting = MODEL) -> np.ndarray:
    """Random distinct ids [rows, MoE layers, K]."""
    scores = np.random.default_rng(seed).random((rows, len(model.moe_layer_ids), model.num_experts))
    return scores.argsort(axis=2)[:, :, : model.top_k]


def all_layers(experts: np.ndarray, model: ModelRouting = MODEL) -> np.ndarray:
    """With the dense layers, which engines leave zero."""
    full = np.zeros((len(experts), model.num_hidden_layers, experts.shape[2]), dtype=experts.dtype)
    full[:, list(model.moe_layer_ids)] = experts
    return full


def b64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def npy(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def load_npy(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)


def flat_int32(text: str) -> np.ndarray:
    layers, top_k = MODEL.num_hidden_layers, MODEL.top_k
    return np.frombuffer(base64.b64decode(text, validate=True), "<i4").reshape(-1, layers, top_k)


def packed(payload: dict, default: str | None = None) -> np.ndarray:
    dtype = np.dtype(payload.get("dtype", default)).newbyteorder("<")
    return np.frombuffer(base64.b64decode(payload["data"], validate=True), dtype).reshape(payload["shape"])


def nrlre1(array: np.ndarray, dtype: str = "int8") -> str:
    return f"nrlre1:{dtype}:{'x'.join(map(str, array.shape))}:{b64(array.astype(dtype))}"


def read_nrlre1(text: str) -> np.ndarray:
    magic, dtype, shape, data = text.split(":")
    assert magic == "nrlre1"
    raw = np.frombuffer(base64.b64decode(data, validate=True), np.dtype(dtype).newbyteorder("<"))
    return raw.reshape([int(size) for size in shape.split("x")])


def tracer_records(experts: np.ndarray, numbers=(1, 2, 4), prefill: int = 5) -> list[dict]:
    """RouterTracer JSONL: one prefill step, then decode steps of one row; one record a step and layer."""
    bounds = [0, *range(prefill, len(experts) + 1)]
    return [
        {
            "step": step,
            "stage": "pre_dispatch",
            "block": "decoder",
            "layer": number,
            "rank": 0,
            "num_tokens": high - low,
            "topk": experts.shape[2],
            "top_indices": experts[low:high, column].tolist(),
        }
        for step, (low, high) in enumerate(pairwise(bounds))
        for column, number in enumerate(numbers)
    ]


def read_tracer(records: list[dict]) -> np.ndarray:
    steps = sorted({record["step"] for record in records})
    layers = sorted({record["layer"] for record in records})
    find = {(record["step"], record["layer"]): record["top_indices"] for record in records}
    return np.concatenate([np.stack([find[step, layer] for layer in layers], axis=1) for step in steps])


def plain(array: Any) -> tuple[int, np.ndarray]:
    return 0, np.asarray(array)


SOURCES = {
    "vllm array": Source(
        lambda x: all_layers(x).astype(np.uint8), lambda v, n: formats.from_vllm(v, MODEL, tokens=n), plain
    ),
    "vllm http": Source(
        lambda x: {"index": 0, "routed_experts": npy(all_layers(x).astype(np.uint8))},
        lambda v, n: formats.from_vllm(v, MODEL, tokens=n),
        lambda v: (0, load_npy(v["routed_experts"])),
    ),
    "vllm 0.20": Source(
        lambda x: all_layers(x).astype(np.int32), lambda v, n: formats.from_vllm(v, MODEL, tokens=n), plain
    ),
    "vllm 0.21": Source(
        lambda x: {"prompt_routed_experts": x[:4].tolist(), "routed_experts": x[4:].tolist()},
        lambda v, n: formats.from_vllm(v, MODEL, tokens=n),
        lambda v: (
            (0, np.concatenate([v["prompt_routed_experts"] or [], v["routed_experts"]]))
            if v.get("prompt_routed_experts") is not None
            else (0, np.asarray(v["routed_experts"]))
        ),
    ),
    "sglang": Source(
        lambda x: {"meta_info": {"routed_experts": b64(all_layers(x).astype("<i4"))}},
        lambda v, n: formats.from_sglang(v, MODEL, tokens=n),
        lambda v: (
            v["meta_info"].get("routed_experts_start_len", 0),
            flat_int32(v["meta_info"]["routed_experts"]),
        ),
    ),
    "sglang dtype": Source(
        lambda x: {
            "meta_info": {"routed_experts": b64(all_layers(x).astype("<i2")), "routed_experts_dtype": "int16"}
        },
        lambda v, n: formats.from_sglang(v, MODEL, tokens=n),
        lambda v: (
            0,
            np.frombuffer(
                base64.b64decode(v["meta_info"]["routed_experts"], validate=True),
                np.dtype(v["meta_info"].get("routed_experts_dtype", "int32")),
            ).reshape(-1, MODEL.num_hidden_layers, MODEL.top_k),
        ),
    ),
    "areal": Source(
        lambda x: all_layers(x).reshape(len(x), -1).astype(np.int32),
        lambda v, n: formats.from_sglang(v, MODEL, tokens=n),
        lambda v: (0, v.reshape(-1, MODEL.num_hidden_layers, MODEL.top_k)),
    ),
    "megatron": Source(
        lambda x: [torch.from_numpy(x[:, column].copy()) for column in range(x.shape[1])],
        lambda v, n: formats.from_megatron(v, MODEL, tokens=n),
        lambda v: (0, np.stack([np.asarray(layer) for layer in v], axis=1)),
    ),
    "megatron inference": Source(
        lambda x: {"moe_topk_indices": x.tolist(), "prompt_moe_topk_indices": x[:4].tolist()},
        lambda v, n: formats.from_megatron_inference(v, MODEL, tokens=n),
        lambda v: (0, np.asarray(v["moe_topk_indices"])),
    ),
    "router tracer": Source(
        tracer_records,
        lambda v, n: formats.from_router_tracer([v] if isinstance(v, str) else v, MODEL, tokens=n),
        lambda v: (0, read_tracer(v)),
    ),
    "verl jagged": Source(
        lambda x: [torch.from_numpy(all_layers(x).astype(np.int16))],
        lambda v, n: formats.from_verl_jagged(v, MODEL, tokens=[n]),
        lambda v: (0, np.asarray(v[0])),
    ),
    "slime": Source(
        lambda x: torch.from_numpy(all_layers(x).astype(np.int32)),
        lambda v, n: formats.from_slime(v, MODEL, tokens=n),
        lambda v: (0, np.asarray(v)),
    ),
    "nemo-rl": Source(
        nrlre1, lambda v, n: formats.from_nemo_rl(v, MODEL, tokens=n), lambda v: (0, read_nrlre1(v))
    ),
    "skyrl": Source(
        lambda x: {"data": b64(all_layers(x).astype(np.uint8)), "shape": [len(x), 5, 2], "dtype": "uint8"},
        lambda v, n: formats.from_skyrl(v, MODEL, tokens=n),
        lambda v: (0, packed(v)),
    ),
    "prime-rl": Source(
        lambda x: {
            "data": b64(all_layers(x).astype(np.uint8)),
            "shape": [len(x), 5, 2],
            "start": 0,
            "dtype": "uint8",
        },
        lambda v, n: formats.from_prime_rl(v, MODEL, tokens=n),
        lambda v: (v.get("start", 0), packed(v, "uint8")),
    ),
    "flashinfer": Source(
        lambda x: [torch.from_numpy(x[:, column].astype(np.int16)) for column in range(x.shape[1])],
        lambda v, n: formats.from_flashinfer(v, MODEL, tokens=n),
        lambda v: (0, np.stack([np.asarray(layer) for layer in v], axis=1)),
    ),
    "tunix": Source(
        lambda x: all_layers(x).swapaxes(0, 1)[None],
        lambda v, n: formats.from_tunix(v, MODEL, tokens=[n]),
        lambda v: (0, v[0].swapaxes(0, 1)),
    ),
}


@pytest.fixture(params=sorted(SOURCES), scope="session")
def source(request: pytest.FixtureRequest) -> Source:
    """Every source in turn."""
    return SOURCES[request.param]


@pytest.fixture(scope="session")
def lay() -> SimpleNamespace:
    """The model and the writers above, for tests that need one format."""
    return SimpleNamespace(
        model=MODEL,
        sources=SOURCES,
        draw=draw_experts,
        all_layers=all_layers,
        b64=b64,
        npy=npy,
        nrlre1=nrlre1,
        tracer_records=tracer_records,
    )
