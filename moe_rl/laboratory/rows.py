"""Tables as rows of a CSV file in long form: sum, count, value and interval of every metric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moe_rl.laboratory.change import DriftTable
from moe_rl.laboratory.sums import LayerTable, ResponseSums, Table

Row = dict[str, Any]
# The columns of every table, in their order.
COLUMNS = (
    "subject", "rows", "metric", "by", "at", "sum", "count", "value", "low", "high", "n", "unit"
)  # fmt: skip


def rows_of(
    sums: ResponseSums,
    resamples: int,
    *,
    subject: str,
    rows: str,
    metric: str,
    by: str = "all",
    at: Sequence[Any] = ("",),
) -> Iterator[Row]:
    """One row for each column of `sums`; `at` names the columns.

    subject  what is measured: the number of an update, a path of the noise floor, a cause
    rows     the tokens counted: "response", "prompt" or "all"
    by, at   "all"; or "layer" and its decoder layer, "position" and its number in the response, "bin"
    n, unit  what the interval resamples: responses or prompts
    """
    found = sums.intervals(resamples=resamples)
    for place, total, count, interval in zip(
        at, sums.sums.tolist(), sums.counts.tolist(), found, strict=True
    ):
        yield dict(
            zip(
                COLUMNS,
                (
                    subject, rows, metric, by, place, total, count, interval.value, interval.low,
                    interval.high, interval.n, interval.unit,
                ),
                strict=True,
            )
        )  # fmt: skip


def table_rows(table: Table, resamples: int, *, subject: str, rows: str) -> Iterator[Row]:
    """Every metric of a table as a whole, and by layer and position where it has them."""
    for metric in table.metrics:
        named = {"subject": subject, "rows": rows, "metric": metric}
        yield from rows_of(table.whole(metric), resamples, **named)
        if isinstance(table, LayerTable):
            at = places(table.layer_ids)
            yield from rows_of(table.layers(metric), resamples, by="layer", at=at, **named)
        if isinstance(table, DriftTable) and rows != "prompt":
            positions = table.positions(metric)
            every = range(positions.sums_BC.shape[1])
            yield from rows_of(positions, resamples, by="position", at=every, **named)


def places(layer_ids: Sequence[int]) -> Sequence[int]:
    """The decoder layers, or 0, 1, … in execution order where a layer routes several times in a forward."""
    return layer_ids if len(set(layer_ids)) == len(layer_ids) else range(len(layer_ids))
