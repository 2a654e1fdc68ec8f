"""The records of a run as rows, one a training step, which is the axis that every tracker has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_rl.store.files import to_json
from moe_rl.store.records import read_metrics
from moe_rl.store.writer import METRIC_STREAMS

Row = dict[str, int | float]


def row_of(stream: str, record: dict[str, Any]) -> Row:
    """The numbers of one record, as the store keeps them.

    Keys of `steps` and `evals` stay as they are; those of a step's n-th gradient update are below
    `update_n/`. A list, of one number a MoE layer, becomes `<key>/0`, `<key>/1`, … Texts are left out.
    """
    record = json.loads(to_json(record))
    prefix = f"update_{record['update']}/" if stream == "updates" else ""
    row: Row = {}
    for key, value in record.items():
        if key in ("step", "update"):
            continue
        if isinstance(value, int | float):
            row[prefix + key] = value
        elif isinstance(value, list):
            row |= {f"{prefix}{key}/{index}": item for index, item in enumerate(value)}
    return row


def stored_rows(path: Path) -> dict[int, Row]:
    """The row of every step of a run directory, in order. Raises StoreError for damaged records."""
    rows: dict[int, Row] = {}
    for stream in METRIC_STREAMS:
        for record in read_metrics(path / f"{stream}.jsonl"):
            rows.setdefault(record["step"], {}).update(row_of(stream, record))
    return dict(sorted(rows.items()))
