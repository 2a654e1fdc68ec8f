"""Pass@1 as a mean over k samples a problem, with an interval over problems, and the unbiased pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_rl.analysis.statistics import MIN_SEEDS_FOR_INTERVAL, summarise


@dataclass(frozen=True)
class Rate:
    """A fraction of samples or problems, and its interval.

    `interval` says which: the 95 % bootstrap that draws whole problems, or the range of the
    problems where there are fewer than five.
    """

    value: float
    low: float
    high: float
    problems: int
    interval: str


def mean_pass_at_1(correct: Sequence[int], samples: Sequence[int]) -> Rate:
    """Mean Pass@1: the mean over problems of the share of a problem's samples that are right (GSPO §5.1: 32
    samples for AIME'24, 8 for LiveCodeBench).

    `correct[i]` of `samples[i]` are right. Problems are resampled, not samples: those of one problem share
    its difficulty. Where all problems have the same share the interval is that point: too narrow.
    Raises ValueError for counts that do not fit.
    """
    _check(correct, samples)
    return _over_problems([right / drawn for right, drawn in zip(correct, samples, strict=True)])


def mean_pass_at_k(correct: Sequence[int], samples: Sequence[int], k: int) -> Rate:
    """Mean over problems of the unbiased pass@k of each."""
    _check(correct, samples)
    return _over_problems([pass_at_k(drawn, right, k) for right, drawn in zip(correct, samples, strict=True)])


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, 1 - C(n-c, k) / C(n, k), from n samples
    of which c are right (Chen et al. 2021, 2107.03374, Eq. 1).

    As a product, since the binomials overflow. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    _check([correct], [samples])
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples: expected k from 1 to the number of samples")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))


def _over_problems(values: Sequence[float]) -> Rate:
    found = summarise(values)
    several = found.n >= MIN_SEEDS_FOR_INTERVAL
    interval = "95 % bootstrap over problems" if several else "range of the problems"
    return Rate(float(found.mean), float(found.low), float(found.high), found.n, interval)


def _check(correct: Sequence[int], samples: Sequence[int]) -> None:
    if not samples or len(correct) != len(samples):
        raise ValueError(f"expected one count a problem, got {len(correct)} right and {len(samples)} drawn")
    for right, drawn in zip(correct, samples, strict=True):
        if not 0 <= right <= drawn or drawn < 1:
            raise ValueError(f"expected 0 to n right of n >= 1 samples, got {right} of {drawn}")
