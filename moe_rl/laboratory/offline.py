"""Drift between two recorded traces of the same tokens, without a model."""

from __future__ import annotations

import torch

from moe_rl.laboratory.change import measure_change
from moe_rl.laboratory.protocol import Measurement
from moe_rl.laboratory.rows import Row, table_rows
from moe_rl.routing import RoutingError, RoutingTrace


def compare_traces(
    old: RoutingTrace, new: RoutingTrace, resamples: int, prompt_tokens: int | None = None
) -> Measurement:
    """The drift table of rows valid in both traces; gate weights and scores are not in a trace.

    prompt_tokens   S, the columns of the prompt, padded on the left in a batch: rows S − 1 and on score the
                    response and are told apart from the prompt's. None: all rows in one table

    The shorter trace is padded with rows that are not valid: engines leave out the last token's. Raises
    RoutingError for traces of different models, numbers of sequences or hashed tokens, and where no row of a
    table is valid in both.
    """
    if old.token_hash is not None and new.token_hash is not None and old.valid.shape == new.valid.shape:
        differ = (old.token_hash != new.token_hash).nonzero()[:, 0].tolist()
        if differ:
            raise RoutingError(f"the traces are of different tokens in sequences {differ}")
    T = max(old.valid.shape[1], new.valid.shape[1])
    old, new = old.fit(T), new.fit(T)
    every_BT = torch.ones(len(old.valid), T, dtype=torch.bool)
    rows = {"all": every_BT}
    if prompt_tokens is not None:
        if not 0 < prompt_tokens <= T:
            raise RoutingError(f"prompt_tokens={prompt_tokens}: expected 1 to the traces' {T} rows")
        response_BT = every_BT & (torch.arange(T) >= prompt_tokens - 1)
        rows = {"response": response_BT, "prompt": ~response_BT}
    drift: list[Row] = []
    experts: list[float] = []
    for name, rows_BT in rows.items():
        table = measure_change(old, new, rows_BT)
        drift += table_rows(table, resamples, subject="1", rows=name)
        experts.append(table.value("experts"))
    summary = {
        "sequences": len(old.valid),
        "updates": 1,
        "experts_changed_first": experts[0],
        "experts_changed_last": experts[0],
        "layer_ids": list(old.layer_ids),
    }
    return Measurement({"drift": drift}, {}, summary)
