"""What every table of the laboratory is made of: a sum and a count for each response, and their bootstrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_rl.routing import RoutingError

RESAMPLES = 2000
_NUMBERS_PER_CHUNK = 1 << 22  # bounds the memory of the resampled counts


@dataclass(frozen=True)
class Interval:
    """A value and its bootstrap interval at `level`; `low` and `high` are nan where n < 2.

    n     how many were resampled: responses or prompts (`unit`) that have anything to count
    """

    value: float
    low: float
    high: float
    n: int
    unit: str
    level: float


@dataclass(frozen=True, eq=False)
class ResponseSums:
    """Sums and counts of one measure, so that any part of the responses reduces to sum / count exactly.

    sums_BC, counts_BC  float64 [B, C] on the CPU; a column is a layer, a position, or the only one
    groups_B            int64 [B], which prompt each response answers; None where every response stands alone
    """

    sums_BC: Tensor
    counts_BC: Tensor
    groups_B: Tensor | None = None

    @property
    def sums(self) -> Tensor:
        """float64 [C]: over all responses."""
        return self.sums_BC.sum(0)

    @property
    def counts(self) -> Tensor:
        """float64 [C]: over all responses."""
        return self.counts_BC.sum(0)

    @property
    def values(self) -> Tensor:
        """float64 [C]: sum / count over all responses, nan where nothing was counted."""
        return self.sums / self.counts

    def intervals(self, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0) -> list[Interval]:
        """A percentile bootstrap interval for each column.

        Responses are drawn with replacement, whole; with `groups_B` prompts are, with all their responses
        (cluster bootstrap), since responses to one prompt are not independent. Columns share their draws.
        """
        sums_NC, counts_NC = self._clusters()
        n = len(sums_NC)
        draws = np.random.default_rng(seed)
        ratios = []
        step = max(1, _NUMBERS_PER_CHUNK // max(n, 1))
        for start in range(0, resamples if n > 1 else 0, step):
            times_RN = draws.multinomial(n, np.full(n, 1 / n), size=min(step, resamples - start))
            with np.errstate(invalid="ignore", divide="ignore"):
                ratios.append((times_RN @ sums_NC) / (times_RN @ counts_NC))
        tails = [100 * (1 - level) / 2, 100 * (1 + level) / 2]
        unit = "responses" if self.groups_B is None else "prompts"
        found = []
        for column, value in enumerate(self.values.tolist()):
            counted = int((counts_NC[:, column] > 0).sum())
            low, high = float("nan"), float("nan")
            if counted > 1:
                # a resample may miss every response that is long enough for a late position
                drawn = np.concatenate([ratio[:, column] for ratio in ratios])
                low, high = (float(bound) for bound in np.nanpercentile(drawn, tails))
            found.append(Interval(value, low, high, counted, unit, level))
        return found

    def _clusters(self) -> tuple[np.ndarray, np.ndarray]:
        """Sums and counts [N, C] of what is resampled, without those that have nothing to count."""
        sums_BC, counts_BC = self.sums_BC, self.counts_BC
        if self.groups_B is not None:
            _, index_B = self.groups_B.unique(return_inverse=True)
            empty = sums_BC.new_zeros(int(index_B.max()) + 1, sums_BC.shape[1])
            sums_BC = empty.index_add(0, index_B, sums_BC)
            counts_BC = empty.index_add(0, index_B, counts_BC)
        counted = (counts_BC > 0).any(1)
        return sums_BC[counted].numpy(), counts_BC[counted].numpy()


class Table:
    """Metrics over responses. A subclass says what each of them sums and counts."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that this table has."""
        raise NotImplementedError

    def whole(self, metric: str) -> ResponseSums:
        """One column: the metric over everything that the table counts."""
        raise NotImplementedError

    def value(self, metric: str) -> float:
        """The metric over all responses; nan where nothing was counted."""
        return float(self.whole(metric).values)

    def interval(
        self, metric: str, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
    ) -> Interval:
        """`value` and its bootstrap interval over responses, or over prompts where their ids were given."""
        return self.whole(metric).intervals(level, resamples, seed)[0]

    def _of(self, tensors: Mapping[str, Tensor], metric: str) -> Tensor:
        if metric not in tensors:
            raise RoutingError(f"this table has no {metric!r}: it has {', '.join(self.metrics)}")
        return tensors[metric]


class LayerTable(Table):
    """Metrics that are also known by layer."""

    layer_ids: tuple[int, ...]

    def layers(self, metric: str) -> ResponseSums:
        """A column for each of the L layers: the metric with only this layer."""
        raise NotImplementedError

    def by_layer(self, metric: str) -> Tensor:
        """float64 [L]: the metric with only this layer."""
        return self.layers(metric).values

    def intervals_by_layer(
        self, metric: str, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
    ) -> list[Interval]:
        """`by_layer` and its bootstrap intervals."""
        return self.layers(metric).intervals(level, resamples, seed)


def require_groups(groups_B: Tensor | None, B: int) -> Tensor | None:
    """The prompt ids as int64 [B] on the CPU. Raises RoutingError for another shape."""
    if groups_B is None:
        return None
    if groups_B.shape != (B,):
        raise RoutingError(
            f"groups_B must be one prompt id for each of {B} responses, got {list(groups_B.shape)}"
        )
    return groups_B.cpu().long()


def cat_groups(groups: Sequence[Tensor | None]) -> Tensor | None:
    """The prompt ids of joined tables, where all have them."""
    present = [ids for ids in groups if ids is not None]
    return torch.cat(present) if len(present) == len(groups) else None
