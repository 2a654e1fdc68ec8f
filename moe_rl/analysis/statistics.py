"""Means and intervals over seeds, with no more claimed than the number of seeds supports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import trim_mean

MIN_SEEDS_FOR_INTERVAL = 5
CONFIDENCE = 0.95
RESAMPLES = 10_000
BOOTSTRAP, RANGE, SINGLE, NOTHING = "95 % bootstrap interval", "min–max of the seeds", "one seed", "no value"


@dataclass(frozen=True)
class Summary:
    """Mean over seeds and what surrounds it.

    low, high: by `interval`, the 95 % percentile bootstrap of the mean (n >= 5) or the smallest and largest
    seed (n < 5), which is a range and claims no coverage.  iqm: interquartile mean, the mean of the middle
    half (equal to the mean for n < 4).
    """

    n: int
    mean: float
    iqm: float
    low: float
    high: float
    interval: str


def summarise(values: Sequence[float]) -> Summary:
    """Summary of one number a seed; non-finite numbers count as missing."""
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    row = summarise_columns(finite[:, None]).iloc[0]
    iqm = float(trim_mean(finite, 0.25)) if len(finite) else float("nan")
    return Summary(len(finite), row["mean"], iqm, row["low"], row["high"], row["interval"])


def summarise_columns(values_NC: np.ndarray) -> pd.DataFrame:
    """Mean and interval of each column over its finite rows.

    values_NC: N seeds x C columns (steps, layers), NaN where a seed has no value.  Returns C rows with
    n, mean, low, high, interval.  Seeds are resampled whole, so that the band of a curve uses the same
    resamples at every step; the percentile bootstrap of so few seeds is known to be somewhat narrow.
    """
    present_NC = np.isfinite(values_NC)
    n_C = present_NC.sum(axis=0)
    frame = pd.DataFrame({"n": n_C, "mean": np.nan, "low": np.nan, "high": np.nan})
    # columns that miss the same seeds share their resamples
    patterns, column_pattern = np.unique(present_NC, axis=1, return_inverse=True)
    for index, present_N in enumerate(patterns.T):
        columns = np.flatnonzero(column_pattern == index)
        if present_N.any():
            values = values_NC[np.ix_(present_N, columns)]
            frame.loc[columns, ["mean", "low", "high"]] = np.stack(_mean_and_bounds(values), axis=1)
    frame["interval"] = [_interval_name(n) for n in n_C]
    return frame


def _mean_and_bounds(values_NC: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = len(values_NC)
    smallest, largest = values_NC.min(axis=0), values_NC.max(axis=0)
    # the sum of equal numbers rounds: equal seeds are to give their value and an empty interval
    mean = np.where(smallest == largest, smallest, values_NC.mean(axis=0))
    if n < MIN_SEEDS_FOR_INTERVAL:
        return mean, smallest, largest
    counts = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(counts @ values_NC / n, [tail, 100 - tail], axis=0)
    return mean, np.clip(low, smallest, mean), np.clip(high, mean, largest)


def _interval_name(n: int) -> str:
    if n >= MIN_SEEDS_FOR_INTERVAL:
        return BOOTSTRAP
    return (NOTHING, SINGLE)[n] if n < 2 else RANGE


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Summary:
    """Summary of value minus baseline over the seeds that both have."""
    shared = sorted(values.keys() & baseline.keys())
    return summarise([values[seed] - baseline[seed] for seed in shared])
