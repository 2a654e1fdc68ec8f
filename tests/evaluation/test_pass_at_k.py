"""Pass@1 and pass@k: hand-worked values and identities."""

from itertools import combinations
from math import comb

import pytest

from moe_rl.evaluation import mean_pass_at_1, mean_pass_at_k, pass_at_k


@pytest.mark.parametrize(
    "samples, correct, k, expected",
    [
        (5, 2, 2, 0.7),  # 1 - C(3,2)/C(5,2) = 1 - 3/10
        (4, 1, 3, 0.75),  # one of four is among three of them
        (10, 0, 4, 0.0),
        (10, 7, 4, 1.0),  # three wrong ones cannot fill four places
        (32, 8, 1, 0.25),
    ],
)
def test_hand_worked(samples, correct, k, expected):
    assert pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-12)


def test_it_is_the_share_of_all_subsets_that_hold_a_right_one():
    right = [True, True, False, False, False, False]
    subsets = list(combinations(right, 3))
    assert pass_at_k(6, 2, 3) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_where_the_binomials_overflow_a_float():
    exact = 1 - comb(9_990, 2_000) / comb(10_000, 2_000)  # integers of 2,000 digits, divided exactly
    assert pass_at_k(10_000, 10, 2_000) == pytest.approx(exact, rel=1e-10)


def test_mean_pass_at_1_is_the_mean_of_the_problems_shares():
    rate = mean_pass_at_1([32, 0, 16, 8, 8], [32] * 5)
    assert rate.value == pytest.approx(0.4)
    assert (rate.problems, rate.interval) == (5, "95 % bootstrap over problems")
    assert 0 <= rate.low < 0.4 < rate.high <= 1
    assert mean_pass_at_k([32, 0, 16, 8, 8], [32] * 5, 1).value == pytest.approx(rate.value)


def test_the_interval_is_that_of_whole_problems():
    """30 problems, half of them always solved: the mean's standard error is sqrt(.25 / 30) = 0.0913, however
    many samples each has; that of 960 independent samples would be 0.016."""
    rate = mean_pass_at_1([32, 0] * 15, [32] * 30)
    half_width = 2.0452 * (0.25 / 29) ** 0.5  # t of 29 degrees of freedom
    assert rate.low == pytest.approx(0.5 - half_width, abs=0.02)
    assert rate.high == pytest.approx(0.5 + half_width, abs=0.02)


def test_fewer_than_five_problems_claim_no_coverage():
    rate = mean_pass_at_1([1, 3], [4, 4])
    assert (rate.value, rate.low, rate.high, rate.interval) == (0.5, 0.25, 0.75, "range of the problems")


@pytest.mark.parametrize("correct, samples", [([], []), ([1], [1, 2]), ([3], [2]), ([-1], [2]), ([0], [0])])
def test_counts_that_do_not_fit(correct, samples):
    with pytest.raises(ValueError, match="expected"):
        mean_pass_at_1(correct, samples)


@pytest.mark.parametrize("k", [0, 5])
def test_k_beyond_the_samples(k):
    with pytest.raises(ValueError, match=f"pass@{k} of 4"):
        pass_at_k(4, 1, k)
