"""Two sides timed in turn, so that a busy machine slows both: ratios, their median and its interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scipy.stats import binom

T = TypeVar("T")
Clock = Callable[[], float]  # seconds


@dataclass(frozen=True)
class Ratio:
    """A median and the 95 % interval of the median."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Ratio:
        """From the order statistics of a sample; no distribution is assumed."""
        ordered, n = sorted(values), len(values)
        below = max(int(binom.ppf(0.025, n, 0.5)) - 1, 0)
        middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
        return Ratio(middle, ordered[below], ordered[n - 1 - below])

    @staticmethod
    def exactly(value: float) -> Ratio:
        """A value that was counted, not sampled."""
        return Ratio(value, value, value)

    def __str__(self) -> str:
        if self.low == self.high:
            return shown(self.median)
        return f"{shown(self.median)} [{shown(self.low)}, {shown(self.high)}]"


def shown(value: float) -> str:
    """Three decimals, or none from 100 on."""
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def rounds(sides: Sequence[Callable[[], T]], count: int, warm: int = 2) -> list[list[T]]:
    """What each side returned in each of `count` rounds, after `warm` rounds that are dropped.

    A round calls every side once; the one that begins changes from round to round.
    """
    results: list[list[T]] = [[] for _ in sides]
    for number in range(warm + count):
        for place in range(len(sides)):
            side = (number + place) % len(sides)
            value = sides[side]()
            if number >= warm:
                results[side].append(value)
    return results


def seconds(work: Callable[[], object], clock: Clock = time.process_time) -> float:
    """Seconds that `work` takes; by default CPU seconds of this process, all of its threads together."""
    start = clock()
    work()
    return clock() - start


def compare(
    side: Callable[[], object], base: Callable[[], object], pairs: int, clock: Clock = time.process_time
) -> Ratio:
    """Time of `side` over time of `base`, in pairs of alternating order, after two pairs that warm up."""
    times = rounds([lambda: seconds(side, clock), lambda: seconds(base, clock)], pairs)
    return Ratio.of([a / b for a, b in zip(*times, strict=True)])
