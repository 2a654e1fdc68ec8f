"""A CodeForces-style Elo rating by maximum likelihood, from problems of known rating."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, log_expit
from scipy.stats import chi2

CONFIDENCE = 0.95
PER_POINT = math.log(10) / 400  # log-odds of a solve for every point of rating
FAR = 20_000.0  # points beyond the problems' ratings within which every root lies


@dataclass(frozen=True)
class Rating:
    """A rating in Elo points.

    low, high: by `interval`, the 95 % profile likelihood; with everything or nothing solved the likelihood
    has no maximum: the rating and one bound are infinite, the other is a one-sided 95 % bound.
    """

    rating: float
    low: float
    high: float
    solved: int
    attempts: int
    interval: str


def elo_rating(problem_ratings: Sequence[float], solved: Sequence[int], attempts: Sequence[int]) -> Rating:
    """The rating r that makes the solves most likely, where problem i of rating d_i is solved with
    probability P_i = 1 / (1 + 10^((d_i - r) / 400)), independently in each of its attempts.

    The interval holds every r that a likelihood-ratio test at 5 % does not reject (χ² with one degree of
    freedom). With all solved, `low` is the rating at which that has a chance of 5 %; likewise `high` with
    none. Attempts at one problem are alike beyond its rating, so with several the interval is too narrow.
    Raises ValueError for counts or ratings that do not fit.
    """
    difficulty, right, tried = (np.asarray(x, dtype=float) for x in (problem_ratings, solved, attempts))
    if not len(difficulty) or not len(difficulty) == len(right) == len(tried):
        raise ValueError(
            f"expected a rating, solves and attempts of every problem, got {len(difficulty)}, {len(right)}, "
            f"{len(tried)}"
        )
    possible = (right >= 0).all() and (right <= tried).all() and (tried >= 1).all()
    if not (possible and np.isfinite(difficulty).all()):
        raise ValueError("expected finite ratings, and 0 to n solves of n >= 1 attempts at every problem")

    def log_likelihood(rating: float) -> float:
        margin = PER_POINT * (rating - difficulty)
        return float((right * log_expit(margin) + (tried - right) * log_expit(-margin)).sum())

    def excess(rating: float) -> float:
        return float((right - tried * expit(PER_POINT * (rating - difficulty))).sum())

    lowest, highest = float(difficulty.min()) - FAR, float(difficulty.max()) + FAR
    counts = int(right.sum()), int(tried.sum())
    if counts[0] in (0, counts[1]):
        bound = brentq(lambda r: log_likelihood(r) - math.log(1 - CONFIDENCE), lowest, highest)
        if counts[0] == 0:
            return Rating(-math.inf, -math.inf, bound, *counts, "nothing solved: one-sided 95 % bound")
        return Rating(math.inf, bound, math.inf, *counts, "everything solved: one-sided 95 % bound")

    best = brentq(excess, lowest, highest)
    drop = log_likelihood(best) - chi2.ppf(CONFIDENCE, 1) / 2

    def above_drop(rating: float) -> float:
        return log_likelihood(rating) - drop

    low, high = brentq(above_drop, lowest, best), brentq(above_drop, best, highest)
    return Rating(best, low, high, *counts, "95 % profile likelihood")
