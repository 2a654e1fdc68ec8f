"""Elo by maximum likelihood: closed forms, a simulation, and the cases without a maximum."""

import math

import numpy as np
import pytest

from moe_rl.evaluation import elo_rating


def test_one_problem_has_a_closed_form():
    """P = s/n gives r = d + 400 log10(s / (n - s))."""
    found = elo_rating([1500], [3], [4])
    assert found.rating == pytest.approx(1500 + 400 * math.log10(3), abs=1e-6)
    assert (found.solved, found.attempts, found.interval) == (3, 4, "95 % profile likelihood")


def test_the_bounds_lose_half_of_the_chi_squared_quantile():
    found = elo_rating([1500], [3], [4])

    def log_likelihood(rating):
        p = 1 / (1 + 10 ** ((1500 - rating) / 400))
        return 3 * math.log(p) + math.log(1 - p)

    for bound in (found.low, found.high):
        assert log_likelihood(found.rating) - log_likelihood(bound) == pytest.approx(3.841459 / 2, abs=1e-5)
    assert found.low < found.rating < found.high


def test_the_expected_solves_at_the_rating_are_the_solves():
    ratings, solved, attempts = [800, 1200, 1900, 2600], [8, 6, 3, 0], [8, 8, 8, 8]
    found = elo_rating(ratings, solved, attempts)
    expected = sum(8 / (1 + 10 ** ((d - found.rating) / 400)) for d in ratings)
    assert expected == pytest.approx(17, abs=1e-6)


def test_shifting_every_problem_shifts_the_rating():
    low, high = elo_rating([1000, 1400], [3, 1], [4, 4]), elo_rating([1700, 2100], [3, 1], [4, 4])
    assert high.rating - low.rating == pytest.approx(700, abs=1e-6)
    assert high.low - low.low == pytest.approx(700, abs=1e-6)


def test_everything_and_nothing_solved():
    """P^n = 0.05 gives the one-sided bound."""
    every, nothing = elo_rating([1500], [2], [2]), elo_rating([1500], [0], [2])
    p = math.sqrt(0.05)
    assert every.rating == every.high == math.inf
    assert every.low == pytest.approx(1500 + 400 * math.log10(p / (1 - p)), abs=1e-6)
    assert nothing.rating == nothing.low == -math.inf
    assert nothing.high == pytest.approx(3000 - every.low, abs=1e-6)
    assert "everything solved" in every.interval and "nothing solved" in nothing.interval


def test_95_of_100_intervals_hold_the_truth():
    random, truth = np.random.default_rng(0), 1700.0
    ratings = np.linspace(800, 3000, 40)
    chance = 1 / (1 + 10 ** ((ratings - truth) / 400))
    held = 0
    for _ in range(400):
        found = elo_rating(ratings, random.binomial(8, chance), [8] * 40)
        held += found.low <= truth <= found.high
    assert 0.92 <= held / 400 <= 0.98  # binomial standard error 0.011


@pytest.mark.parametrize(
    "ratings, solved, attempts",
    [([], [], []), ([1500], [2], [1]), ([1500], [0], [0]), ([math.nan], [1], [2]), ([1500, 1600], [1], [1])],
)
def test_counts_that_do_not_fit(ratings, solved, attempts):
    with pytest.raises(ValueError, match="expected"):
        elo_rating(ratings, solved, attempts)
