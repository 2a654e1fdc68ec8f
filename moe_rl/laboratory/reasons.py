"""Why experts changed with one update, as rows of the tables that a run keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.laboratory.attribution import RouterInputs, attribute_change, capture_router_inputs
from moe_rl.laboratory.margins import drift_by_margin
from moe_rl.laboratory.observe import RoutedPass
from moe_rl.laboratory.prediction import first_order_change, measure_prediction
from moe_rl.laboratory.ratio_variance import ratio_variance
from moe_rl.laboratory.rows import Row, rows_of, table_rows
from moe_rl.laboratory.weights import Weights
from moe_rl.routing import RoutingError
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.passes import Plan

QUANTILES = 10


@dataclass(frozen=True, eq=False)
class Before:
    """π_old on a batch, as the reasons need it; `inputs` is None where attribution refuses the family."""

    weights: Weights
    passed: RoutedPass
    inputs: RouterInputs | None
    batch: RolloutBatch
    plan: Plan
    groups_B: Tensor
    temperature: float


def reasons(
    before: Before, policy: PreTrainedModel, new: RoutedPass, resamples: int, subject: str
) -> tuple[dict[str, list[Row]], dict[str, str]]:
    """Rows of attribution, margins, prediction and ratio_variance over response tokens; and what is missing.

    `policy` is at the new weights, where `new` was observed. A table that the family of the model does not
    allow is left out, with the reason under its name.
    """
    makers: dict[str, Callable[[], Iterator[Row]]] = {
        "attribution": lambda: _attribution(before, policy, resamples, subject),
        "margins": lambda: _margins(before, new, resamples, subject),
        "prediction": lambda: _prediction(before, policy, new, resamples, subject),
        "ratio_variance": lambda: _ratio_variance(before, policy, new, resamples, subject),
    }
    tables: dict[str, list[Row]] = {}
    missing: dict[str, str] = {}
    for name, make in makers.items():
        try:
            tables[name] = list(make())
        except RoutingError as error:
            missing[name] = str(error)
    return tables, missing


def _attribution(before: Before, policy: PreTrainedModel, resamples: int, subject: str) -> Iterator[Row]:
    if before.inputs is None:  # refused for π_old: the same error again, for the reason's sake
        capture_router_inputs(policy, before.batch, before.plan)
        return
    after = capture_router_inputs(policy, before.batch, before.plan)
    table = attribute_change(before.inputs, after, before.batch.routing_rows_BT, before.groups_B)
    yield from table_rows(table, resamples, subject=subject, rows="response")


def _margins(before: Before, new: RoutedPass, resamples: int, subject: str) -> Iterator[Row]:
    rows_BT = before.batch.routing_rows_BT
    quantiles = min(QUANTILES, int(rows_BT.sum()))
    table = drift_by_margin(before.passed, new, rows_BT, quantiles=quantiles, groups_B=before.groups_B)
    for metric, sums in (("experts", table.experts), ("sets", table.sets)):
        yield from rows_of(
            sums,
            resamples,
            subject=subject,
            rows="response",
            metric=metric,
            by="quantile",
            at=range(quantiles),
        )


def _prediction(
    before: Before, policy: PreTrainedModel, new: RoutedPass, resamples: int, subject: str
) -> Iterator[Row]:
    change_BTLE = first_order_change(policy, before.weights, before.passed, before.batch, before.plan)
    table = measure_prediction(before.passed, new, change_BTLE, before.batch.routing_rows_BT, before.groups_B)
    yield from table_rows(table, resamples, subject=subject, rows="response")


def _ratio_variance(
    before: Before, policy: PreTrainedModel, new: RoutedPass, resamples: int, subject: str
) -> Iterator[Row]:
    table = ratio_variance(
        policy, before.passed, new, before.batch, before.plan, before.temperature, before.groups_B
    )
    yield from table_rows(table, resamples, subject=subject, rows="response")
