"""What Megatron records: RouterReplay lists, RouterTracer files, inference responses, miles' dumps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from moe_rl.routing.formats.checks import require_count, require_counts
from moe_rl.routing.formats.decode import integers
from moe_rl.routing.formats.engines import stack_layers
from moe_rl.routing.formats.geometry import ModelRouting
from moe_rl.routing.formats.rows import Rows, import_sequences, to_trace
from moe_rl.routing.trace import RoutingError, RoutingTrace

Layout = Literal["thd", "sbh"]


def from_megatron(
    recorded: Sequence[Any],
    routing: ModelRouting,
    *,
    tokens: int | Sequence[int],
    layout: Layout | None = None,
    layer_ids: Sequence[int] | None = None,
) -> RoutingTrace:
    """`RouterReplay.get_recorded_data()` of one micro-batch.

    recorded   one [rows, K] tensor per local MoE layer, gathered over the ranks of sequence parallelism.
    tokens     tokens of the sequence, or of every sequence of the micro-batch.
    layout     of several sequences: "thd" packs one after another, "sbh" interleaves them (row t * B + b) and
               pads all to one length. The rows do not tell, so it must be said.
    layer_ids  decoder layer (counted from 0) of every entry; all MoE layers in ascending order when absent.
               A pipeline rank has its own layers, and interleaved stages list them out of order.
    Raises RoutingError, also for an entry that is None: an instance whose router never ran.
    Source: megatron/core/transformer/moe/router_replay.py.
    """
    stacked = stack_layers(recorded, "Megatron")
    return _from_stacked(stacked, routing, tokens, layout, layer_ids, "Megatron")


def from_megatron_inference(
    value: Any, routing: ModelRouting, *, tokens: int | Sequence[int]
) -> RoutingTrace:
    """Routing of Megatron's inference engine, of the MoE layers only.

    value  `request.routing_indices` (int16 or int32 [tokens - 1, MoE layers, K]), a choice of the HTTP server
           with `moe_topk_indices` (prompt and completion; `prompt_moe_topk_indices` repeats its start), or
           None. A sequence of `tokens` makes it a sequence of those.
    Raises RoutingError. Sources: megatron/core/inference/inference_request.py,
    .../dynamic_text_gen_server/endpoints/chat_completions.py.
    """
    return import_sequences(megatron_inference_rows, value, routing, tokens)


def megatron_inference_rows(value: Any, routing: ModelRouting, start: int = 0) -> Rows:
    """Decode one Megatron inference payload; see `from_megatron_inference`."""
    source = "Megatron inference"
    if isinstance(value, Mapping):
        if "moe_topk_indices" not in value:
            raise RoutingError(f"{source}: the choice has no moe_topk_indices")
        value = value["moe_topk_indices"]
    ids = None if value is None else integers(value, source)
    return Rows(source, ids, start, layer_ids=routing.moe_layer_ids)


def from_router_tracer(
    records: str | Path | Iterable[Mapping[str, Any]],
    routing: ModelRouting,
    *,
    tokens: int | Sequence[int],
    layout: Layout | None = None,
    step: int | None = None,
) -> RoutingTrace:
    """Megatron's `router_trace_rank{r}.jsonl`, of one rank.

    records  the file, or its records {step, stage, block, layer, rank, num_tokens, topk, top_indices}.
             Records of multi-token prediction (`block` "mtp") are left out. Layers are told by their numbers:
             the decoder's from 0 (forward hooks), from 1 (the inference recorder), or MoE layers counted from
             0 (a recorder without layer numbers).
    step     only this step; when absent, all steps one after another, as prefill and decode of one sequence.
    tokens, layout  as in `from_megatron`.
    Where the hook saw a routing map, ids come in ascending order instead of by score.
    Raises RoutingError, also for a layer that one step holds twice (micro-batches, recomputation) and for
    records of several ranks.
    Source: megatron/core/transformer/moe/router_trace.py.
    """
    if isinstance(records, str | Path):
        records = read_json_lines(records)
    stacked, layer_ids = tracer_steps(records, routing, step)
    return _from_stacked(stacked, routing, tokens, layout, layer_ids, "RouterTracer")


def tracer_steps(
    records: Iterable[Mapping[str, Any]], routing: ModelRouting, step: int | None = None
) -> tuple[np.ndarray, tuple[int, ...]]:
    """[rows, layers, K] of the steps of a RouterTracer file one after another, and the columns' layers."""
    source = "RouterTracer"
    if not isinstance(records, Iterable) or isinstance(records, np.ndarray | torch.Tensor):
        raise RoutingError(f"{source}: expected a list of records, got {type(records).__name__}")
    steps: dict[int, dict[int, np.ndarray]] = {}
    ranks = set()
    for record in records:
        if not isinstance(record, Mapping) or "top_indices" not in record:
            raise RoutingError(f"{source}: a record without top_indices")
        if record.get("block", "decoder") != "decoder" or "mtp_idx" in record:
            continue
        number, layer, rank = (require_count(name, record.get(name), 0) for name in ("step", "layer", "rank"))
        if layer in steps.setdefault(number, {}):
            raise RoutingError(
                f"{source}: step {number} holds layer {layer} twice (micro-batches, or recomputation): "
                "which tokens each belongs to is unknown"
            )
        steps[number][layer] = _tracer_ids(record)
        ranks.add(rank)
    chosen = [steps[number] for number in sorted(steps) if step in (None, number)]
    if not chosen or len(ranks) > 1:
        raise RoutingError(
            f"{source}: expected decoder records of one rank"
            + ("" if step is None else f" in step {step}")
            + f", got ranks {sorted(ranks)} and steps {sorted(steps)[:10]}"
        )
    numbers = sorted(chosen[0])
    stacked = [stack_layers([layers[number] for number in sorted(layers)], source) for layers in chosen]
    if any(sorted(layers) != numbers for layers in chosen) or len({ids.shape[2] for ids in stacked}) > 1:
        raise RoutingError(f"{source}: the steps differ in layers or K")
    return np.concatenate(stacked), _decoder_layers(numbers, routing)


def tracer_rows(value: Any, routing: ModelRouting, start: int = 0) -> Rows:
    """Decode all steps of a RouterTracer file's records as one sequence; see `from_router_tracer`."""
    stacked, layers = tracer_steps(value, routing)
    return Rows("RouterTracer", stacked, start, layer_ids=layers)


def _tracer_ids(record: Mapping[str, Any]) -> np.ndarray:
    ids = integers(record["top_indices"], "RouterTracer")
    if ids.shape != (record.get("num_tokens"), record.get("topk")):
        raise RoutingError(
            f"RouterTracer: a record says {record.get('num_tokens')} tokens of {record.get('topk')} experts, "
            f"its ids are {list(ids.shape)}"
        )
    return ids


def from_miles_dump(
    path: str | Path,
    routing: ModelRouting,
    *,
    tokens: int | Sequence[int],
    micro_batch: int = 0,
    layout: Layout | None = None,
    layer_ids: Sequence[int] | None = None,
) -> RoutingTrace:
    """One micro-batch of miles' `rank0_routing_replay.pt`: for every MoE layer a list of [rows, K] tensors.

    The file is read with `weights_only`, which builds tensors and containers and nothing else. `tokens`,
    `layout` and `layer_ids` as in `from_megatron`. Raises RoutingError. Source:
    miles/utils/debug_utils/run_megatron/worker/replay.py.
    """
    return from_megatron(
        miles_micro_batch(read_miles_dump(path), micro_batch),
        routing,
        tokens=tokens,
        layout=layout,
        layer_ids=layer_ids,
    )


def read_miles_dump(path: str | Path) -> list[list[torch.Tensor]]:
    """The lists of tensors of a miles dump, per MoE layer and micro-batch. Raises RoutingError."""
    try:
        layers = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive fails in many ways; a pickle with code in it in another
        raise RoutingError(f"{path} is no readable miles dump of tensors: {error}") from error
    lists = isinstance(layers, list) and all(isinstance(layer, list) for layer in layers)
    if not lists or not all(isinstance(ids, torch.Tensor) for layer in layers for ids in layer):
        raise RoutingError(f"{path}: expected a list per MoE layer of one [rows, K] tensor per micro-batch")
    return layers


def miles_micro_batch(layers: list[list[torch.Tensor]], micro_batch: int) -> list[torch.Tensor]:
    """The tensors of one micro-batch, per layer. Raises RoutingError when a layer lacks it."""
    counts = {len(layer) for layer in layers}
    if len(counts) != 1 or not 0 <= micro_batch < min(counts):
        raise RoutingError(
            f"miles: micro-batch {micro_batch} asked for, the layers hold {sorted(counts)} micro-batches each"
        )
    return [layer[micro_batch] for layer in layers]


def read_json_lines(path: str | Path) -> list[Any]:
    """The values of a JSON-lines file. Raises RoutingError with the line that is none."""
    values = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except ValueError as error:  # of the text, or of a path that no file can have
        raise RoutingError(f"{path!r} is no file of text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise RoutingError(f"{path}, line {number} is not JSON: {error}") from error
    return values


def _from_stacked(
    stacked_RLK: np.ndarray,
    routing: ModelRouting,
    tokens: int | Sequence[int],
    layout: Layout | None,
    layer_ids: Sequence[int] | None,
    source: str,
) -> RoutingTrace:
    layers = routing.moe_layer_ids if layer_ids is None else tuple(layer_ids)
    if len(set(layers)) < len(layers) or not set(layers) <= set(routing.moe_layer_ids):
        raise RoutingError(
            f"{source}: layers {layers} are not distinct MoE layers of {routing.moe_layer_ids}"
        )
    lengths = require_counts("tokens", tokens, least=1)
    parts = _sequences(stacked_RLK, lengths, layout, source)
    return to_trace([Rows(source, part, layer_ids=layers) for part in parts], routing, lengths)


def _sequences(
    stacked_RLK: np.ndarray, lengths: list[int], layout: Layout | None, source: str
) -> list[np.ndarray]:
    """The rows of every sequence of a micro-batch."""
    rows, B = len(stacked_RLK), len(lengths)
    if layout == "sbh":
        if rows % B or rows // B < max(lengths):
            raise RoutingError(
                f"{source}: {rows} rows are not {B} sequences padded to {max(lengths)} or more"
            )
        stacked_TBLK = stacked_RLK.reshape(rows // B, B, *stacked_RLK.shape[1:])
        return [stacked_TBLK[:length, b] for b, length in enumerate(lengths)]
    if B == 1:
        return [stacked_RLK]
    if layout != "thd":
        raise RoutingError(
            f"{source}: say whether the {B} sequences are packed ('thd') or interleaved ('sbh')"
        )
    if rows != sum(lengths):
        raise RoutingError(
            f"{source}: {rows} rows for packed sequences of {sum(lengths)} tokens; a rank of sequence or "
            "context parallelism holds a part only, gather the ranks first"
        )
    ends = list(accumulate(lengths))
    return [stacked_RLK[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _decoder_layers(numbers: list[int], routing: ModelRouting) -> tuple[int, ...]:
    """The decoder layers, counted from 0, of a RouterTracer file's layer numbers."""
    moe = routing.moe_layer_ids
    for counted in (moe, tuple(layer + 1 for layer in moe), tuple(range(len(moe)))):
        if tuple(numbers) == counted:
            return moe
    raise RoutingError(
        f"RouterTracer: layers {tuple(numbers)} are not the MoE layers {moe} of the model, counted from 0 "
        "or 1: another model, or one rank of a pipeline"
    )
