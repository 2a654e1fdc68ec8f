import math

import numpy as np
import pytest
from scipy.stats import bootstrap, trim_mean

from moe_rl.analysis.statistics import (
    holm,
    iqm_columns,
    paired_difference,
    paired_test,
    proportion,
    summarise,
    summarise_columns,
    tail_percent,
)


def test_fewer_than_five_seeds_give_a_range_and_no_confidence_interval() -> None:
    found = summarise([0.2, 0.8, 0.4, 0.6])
    assert (found.n, found.mean, found.low, found.high) == (4, pytest.approx(0.5), 0.2, 0.8)
    assert found.interval == "min–max of the seeds"


def test_five_seeds_give_the_expanded_percentile_bootstrap() -> None:
    values = [0.1, 0.5, 0.6, 0.7, 0.9, 0.2]
    found = summarise(values)
    expected = bootstrap(
        (values,),
        np.mean,
        method="percentile",
        confidence_level=1 - 2 * tail_percent(6) / 100,
        n_resamples=100_000,
        rng=np.random.default_rng(7),
    ).confidence_interval
    assert found.interval == "95 % bootstrap interval"
    assert found.mean == pytest.approx(0.5)
    assert (found.low, found.high) == (
        pytest.approx(expected.low, abs=0.012),
        pytest.approx(expected.high, abs=0.012),
    )
    assert summarise(values) == found  # seeded


def test_percentiles_of_few_seeds_are_expanded() -> None:
    # t quantile of 0.975, 7 degrees of freedom: 2.3646; times sqrt(8/7): 2.5279 normal standard deviations
    assert tail_percent(8) == pytest.approx(0.574, abs=5e-4)
    assert tail_percent(5) == pytest.approx(0.0954, abs=5e-4)
    assert tail_percent(100_000) == pytest.approx(2.5, abs=1e-3)


def test_intervals_of_eight_normal_seeds_hold_the_mean_as_often_as_they_say() -> None:
    samples_NC = np.random.default_rng(5).standard_normal((8, 2_000))
    found = summarise_columns(samples_NC)
    held = ((found["low"] <= 0) & (found["high"] >= 0)).mean()
    assert held == pytest.approx(0.945, abs=0.015)  # percentiles 2.5 and 97.5: 0.89


def test_interquartile_mean_drops_the_outer_quarters() -> None:
    assert summarise([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0]).iqm == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert summarise([1.0, 2.0, 6.0]).iqm == pytest.approx(3.0)


def test_one_seed_no_seed_and_missing_seeds() -> None:
    one = summarise([0.3, math.nan])
    assert (one.n, one.mean, one.low, one.high, one.interval) == (1, 0.3, 0.3, 0.3, "one seed")
    none = summarise([math.nan])
    assert none.n == 0 and math.isnan(none.mean) and math.isnan(none.low) and none.interval == "no value"


@pytest.mark.parametrize("n", [3, 5, 7])
def test_identical_seeds_give_their_value_and_an_empty_interval(n: int) -> None:
    found = summarise([0.1] * n)
    assert (found.mean, found.low, found.high) == (0.1, 0.1, 0.1)


def test_columns_use_the_seeds_that_they_have() -> None:
    nan = math.nan
    frame = summarise_columns(np.array([[1.0, 2.0, nan], [3.0, nan, nan], [5.0, 6.0, nan]]))
    assert frame["n"].tolist() == [3, 2, 0]
    assert frame["mean"].tolist()[:2] == [3.0, 4.0] and math.isnan(frame["mean"][2])
    assert frame["low"].tolist()[:2] == [1.0, 2.0]
    assert frame["high"].tolist()[:2] == [5.0, 6.0]
    assert frame["interval"].tolist() == ["min–max of the seeds"] * 2 + ["no value"]


def test_a_column_has_the_interval_it_has_alone() -> None:
    values = np.random.default_rng(0).random((6, 4))
    values[2, 1] = math.nan
    frame = summarise_columns(values)
    for column in range(4):
        alone = summarise(values[:, column])
        assert (frame["low"][column], frame["high"][column]) == (alone.low, alone.high)


def test_paired_difference_uses_shared_seeds_only() -> None:
    found = paired_difference({0: 0.9, 1: 0.8, 2: 0.7}, {1: 0.5, 2: 0.6, 3: 0.0})
    assert found.n == 2
    assert (found.mean, found.low, found.high) == (
        pytest.approx(0.2),
        pytest.approx(0.1),
        pytest.approx(0.3),
    )


def test_iqm_columns_against_resampling_one_by_one() -> None:
    values = np.array([0.1, 0.9, 0.5, 0.4, 0.8, 0.3, 0.2, 0.7])
    found = iqm_columns(np.stack([values, np.where(values > 0.6, np.nan, values)], axis=1))
    assert found["n"].tolist() == [8, 5]
    assert found["iqm"][0] == pytest.approx((0.3 + 0.4 + 0.5 + 0.7) / 4)
    assert found["iqm"][1] == pytest.approx((0.2 + 0.3 + 0.4) / 3)
    resampled = trim_mean(np.random.default_rng(3).choice(values, (50_000, 8)), 0.25, axis=1)
    low, high = np.percentile(resampled, [tail_percent(8), 100 - tail_percent(8)])
    assert (found["low"][0], found["high"][0]) == (
        pytest.approx(low, abs=0.006),
        pytest.approx(high, abs=0.006),
    )
    assert found["interval"].tolist() == ["95 % bootstrap interval"] * 2


def test_iqm_of_few_equal_and_no_seeds() -> None:
    nan = math.nan
    found = iqm_columns(np.array([[0.2, 0.1, nan], [0.6, 0.1, nan]]))
    assert found["iqm"].tolist()[:2] == [pytest.approx(0.4), 0.1]
    assert (found["low"][0], found["high"][0]) == (0.2, 0.6)
    assert (found["low"][1], found["high"][1]) == (0.1, 0.1)
    assert found["interval"].tolist() == ["min–max of the seeds"] * 2 + ["no value"]
    assert iqm_columns(np.full((7, 1), 0.1))[["iqm", "low", "high"]].iloc[0].tolist() == [0.1, 0.1, 0.1]


def test_the_sign_flip_test_by_hand() -> None:
    # means as large as that of (1, 2, 3), in size: only it and its negative, of the 8 sign patterns
    found = paired_test({0: 1.0, 1: 2.0, 2: 3.0, 9: 5.0}, dict.fromkeys(range(3), 0.0))
    assert (found.n, found.p, found.note) == (3, 0.25, "3 pairs give no p below 0.25")
    # |sum| of (1, 1, 1, 1, 1, -1) is 4: the 2 patterns of size 6 and the 12 of size 4, of 64
    values = dict(enumerate([1.0, 1.0, 1.0, 1.0, 1.0, -1.0]))
    found = paired_test(values, dict.fromkeys(range(6), 0.0))
    assert (found.n, found.p, found.note) == (6, pytest.approx(14 / 64), "")


def test_a_test_that_cannot_be_made_says_so() -> None:
    assert paired_test({0: 1.0}, {0: 0.5}).note == "no test of 1 pair"
    assert math.isnan(paired_test({}, {}).p)
    equal = paired_test({0: 0.3, 1: 0.4}, {0: 0.3, 1: 0.4})
    assert (equal.p, equal.note) == (1.0, "every pair is equal")


def test_holm() -> None:
    adjusted = holm([0.01, 0.04, 0.03, math.nan])
    assert adjusted[:3] == [pytest.approx(0.03), pytest.approx(0.06), pytest.approx(0.06)]
    assert math.isnan(adjusted[3])


def test_a_proportion_of_none_has_an_interval() -> None:
    none, half, empty = proportion(0, 8), proportion(4, 8), proportion(0, 0)
    assert (none.low, none.high) == (0.0, pytest.approx(1 - 0.025 ** (1 / 8)))
    assert (half.low, half.high) == (pytest.approx(0.157, abs=1e-3), pytest.approx(0.843, abs=1e-3))
    assert empty.n == 0 and math.isnan(empty.low)
