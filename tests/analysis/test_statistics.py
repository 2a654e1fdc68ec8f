import math

import numpy as np
import pytest
from scipy.stats import bootstrap

from moe_rl.analysis.statistics import paired_difference, summarise, summarise_columns


def test_fewer_than_five_seeds_give_a_range_and_no_confidence_interval() -> None:
    found = summarise([0.2, 0.8, 0.4, 0.6])
    assert (found.n, found.mean, found.low, found.high) == (4, pytest.approx(0.5), 0.2, 0.8)
    assert found.interval == "min–max of the seeds"


def test_five_seeds_give_the_percentile_bootstrap() -> None:
    values = [0.1, 0.5, 0.6, 0.7, 0.9, 0.2]
    found = summarise(values)
    expected = bootstrap(
        (values,), np.mean, method="percentile", n_resamples=100_000, rng=np.random.default_rng(7)
    ).confidence_interval
    assert found.interval == "95 % bootstrap interval"
    assert found.mean == pytest.approx(0.5)
    assert (found.low, found.high) == (
        pytest.approx(expected.low, abs=0.012),
        pytest.approx(expected.high, abs=0.012),
    )
    assert summarise(values) == found  # seeded


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
