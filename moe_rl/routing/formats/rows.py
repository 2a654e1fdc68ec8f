"""From the rows an engine sent to a checked RoutingTrace: the one way in for every format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_rl.routing.formats import checks
from moe_rl.routing.formats.geometry import ModelRouting
from moe_rl.routing.trace import RoutingError, RoutingTrace, id_dtype


@dataclass(frozen=True)
class Rows:
    """The routing of one sequence as its source sent it.

    experts_RLK    integer array [R, layers, K], or None when nothing was sent (an aborted request).
    start          position of the first row in the sequence.
    layer_ids      decoder layer of every column; None when the columns are either all decoder layers or all
                   MoE layers, which their number tells.
    sized_by_ids   the source picks a dtype by the largest id in the payload, not by E, so that a narrow one
                   proves nothing and dtypes may differ between sequences.
    flat           the payload had no shape: the number of rows follows from K.
    padding        the K ids (or one for all) that the source writes to rows of padding, the never routed last
                   token's among them; None when it sends no padding. Zeros and -1 count as padding as well.
    """

    source: str
    experts_RLK: np.ndarray | None
    start: int = 0
    layer_ids: tuple[int, ...] | None = None
    sized_by_ids: bool = False
    flat: bool = False
    padding: tuple[int, ...] | None = None


Decoder = Callable[[Any, ModelRouting, int], Rows]


def import_sequences(
    decode: Decoder,
    value: Any,
    routing: ModelRouting,
    tokens: int | Sequence[int],
    start: int | Sequence[int] = 0,
) -> RoutingTrace:
    """Decode one payload (`tokens` an int) or a sequence of them (`tokens` a sequence), and join them."""
    lengths = checks.require_counts("tokens", tokens, least=1)
    if checks.is_one_integer(tokens):
        value = [value]
    if not checks.is_list(value) or len(value) != len(lengths):
        raise RoutingError(f"expected a list of {len(lengths)} payloads, one a sequence, got {type(value)}")
    starts = checks.require_counts("start", start, least=0)
    if checks.is_one_integer(start):
        starts *= len(lengths)
    if len(starts) != len(lengths):
        raise RoutingError(f"got {len(starts)} starts for {len(lengths)} sequences")
    rows = [decode(payload, routing, begin) for payload, begin in zip(value, starts, strict=True)]
    return to_trace(rows, routing, lengths)


def to_trace(sequences: Sequence[Rows], routing: ModelRouting, tokens: Sequence[int]) -> RoutingTrace:
    """A checked trace [B, T, L, K] of sequences that have `tokens` tokens each, padded on the right.

    Every sequence must hold a row for each token from its start on (N), or for each but the last, which the
    engine sampled and never routed (N - 1). `valid` says which: the last row of an N - 1 payload is False.
    `source` names the engine. Raises RoutingError for everything that could turn into a wrong trace.
    """
    lengths = [checks.require_count("tokens", length, least=1) for length in tokens]
    _require_one_dtype(sequences)
    placed = [_place(rows, routing, length) for rows, length in zip(sequences, lengths, strict=True)]
    layers = _layers(sequences[0], routing) if sequences else ()
    shape = (len(placed), max(lengths, default=0), len(layers), routing.top_k)
    experts = torch.zeros(shape, dtype=id_dtype(routing.num_experts))
    valid = torch.zeros(shape[:2], dtype=torch.bool)
    for b, (rows, (experts_RLK, routed_R)) in enumerate(zip(sequences, placed, strict=True)):
        stop = rows.start + len(routed_R)
        experts[b, rows.start : stop] = torch.from_numpy(experts_RLK).to(experts.dtype)
        valid[b, rows.start : stop] = torch.from_numpy(routed_R)
    if not bool(valid.any()):
        raise RoutingError(
            "no sequence holds routing: the engine was not told to return it, or every request was aborted"
        )
    source = sequences[0].source
    return RoutingTrace(experts, valid, layers, routing.num_experts, source=source).validate()


def align_to_mask(trace: RoutingTrace, mask_BT: Tensor) -> RoutingTrace:
    """Move a trace onto a padded batch: row t of a sequence goes to the place of its t-th token in `mask_BT`.

    trace    rows from position 0 of every sequence on, as the importers return it.
    mask_BT  bool or 0/1 [B, T], the batch's attention mask: left, right or mixed padding.
    Raises RoutingError when a sequence has a valid row for a token that the mask does not have.
    """
    mask_BT = mask_BT.bool().to(trace.valid.device)
    if mask_BT.dim() != 2 or len(mask_BT) != len(trace.valid):
        raise RoutingError(f"the mask must be [{len(trace.valid)}, T], got {list(mask_BT.shape)}")
    experts = trace.experts.new_zeros(*mask_BT.shape, *trace.experts.shape[2:])
    valid = torch.zeros_like(mask_BT)
    for b, mask_T in enumerate(mask_BT):
        places = mask_T.nonzero().squeeze(1)[: trace.valid.shape[1]]
        if bool(trace.valid[b, len(places) :].any()):
            raise RoutingError(f"sequence {b} has routing for more than the {len(places)} tokens of its mask")
        experts[b, places] = trace.experts[b, : len(places)]
        valid[b, places] = trace.valid[b, : len(places)]
    return replace(trace, experts=experts, valid=valid).validate()


def _layers(rows: Rows, routing: ModelRouting) -> tuple[int, ...]:
    return routing.moe_layer_ids if rows.layer_ids is None else tuple(sorted(rows.layer_ids))


def _place(rows: Rows, routing: ModelRouting, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The checked rows of one sequence, MoE layers only and ascending, and which of them were routed [R]."""
    source, layers, experts_RLK = rows.source, _layers(rows, routing), rows.experts_RLK
    if experts_RLK is None:
        return np.zeros((0, len(layers), routing.top_k), dtype=np.int64), np.zeros(0, dtype=bool)
    start = checks.require_count("start", rows.start, least=0)
    if start >= tokens:
        raise RoutingError(f"{source}: start = {start} lies outside a sequence of {tokens} tokens")
    checks.require_top_k(source, experts_RLK, routing.top_k)
    if rows.padding is not None:
        experts_RLK = checks.unpad(source, experts_RLK, rows.padding, tokens - start)
    checks.require_row_count(source, len(experts_RLK), start, tokens)
    if rows.flat:
        checks.require_one_reading(source, len(experts_RLK), tokens - start, routing.top_k)
    if not rows.sized_by_ids:
        checks.require_wide_dtype(source, experts_RLK.dtype, routing.num_experts)
    if rows.layer_ids is None:
        experts_RLK = checks.moe_columns(source, experts_RLK, routing)
    else:
        experts_RLK = checks.named_columns(source, experts_RLK, rows.layer_ids)
    routed_R = ~(experts_RLK == checks.MISSING).all(axis=(1, 2))
    checks.require_ids(source, experts_RLK[routed_R], layers, routing.num_experts)
    checks.require_captured(source, experts_RLK[routed_R], routing.num_experts)
    return np.where(routed_R[:, None, None], experts_RLK, 0).astype(np.int64), routed_R


def _require_one_dtype(sequences: Sequence[Rows]) -> None:
    dtypes = {
        rows.experts_RLK.dtype.name
        for rows in sequences
        if rows.experts_RLK is not None and not rows.sized_by_ids
    }
    if len(dtypes) > 1:
        raise RoutingError(
            f"the sequences mix the dtypes {sorted(dtypes)}: they come from different servers or models"
        )
