"""Means and intervals over seeds, with no more claimed than the number of seeds supports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import binomtest, norm, permutation_test, t, trim_mean

MIN_SEEDS_FOR_INTERVAL = 5
CONFIDENCE = 0.95
RESAMPLES = 10_000
BOOTSTRAP, RANGE, SINGLE, NOTHING = "95 % bootstrap interval", "min–max of the seeds", "one seed", "no value"


@dataclass(frozen=True)
class Summary:
    """Mean over seeds and what surrounds it.

    low, high: by `interval`, the 95 % bootstrap of the mean (n >= 5, `tail_percent`) or the smallest and
    largest seed (n < 5), which is a range and claims no coverage.  iqm: interquartile mean, the mean of the
    middle half (equal to the mean for n < 4).
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
    resamples at every step.
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
    tail = tail_percent(n)
    sums_RC = np.zeros((RESAMPLES, values_NC.shape[1]))
    for count_R, value_C in zip(_resamples(n).T, values_NC, strict=True):
        sums_RC += count_R[:, None] * value_C  # not a matrix product: that rounds by the number of columns
    low, high = np.percentile(sums_RC / n, [tail, 100 - tail], axis=0)
    return mean, np.clip(low, smallest, mean), np.clip(high, mean, largest)


def _resamples(n: int) -> np.ndarray:
    """How often each resample holds each of n seeds, [RESAMPLES, n]; the same for every curve and row."""
    return np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)


def tail_percent(n: int) -> float:
    """Which percentile of n seeds' resamples, and 100 minus it, bound a 95 % interval: 0.57 for n = 8.

    Percentiles 2.5 and 97.5 are too narrow for few seeds, by √((n − 1) / n) and as a normal distribution is
    narrower than a t: of five to eight normal values they hold the mean in 85 to 90 % of cases. Expanded
    percentiles (Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69
    (2015), "expanded percentile") hold it in 93 to 95 %; of skewed values in fewer.
    """
    half_width = np.sqrt(n / (n - 1)) * t.ppf((1 + CONFIDENCE) / 2, n - 1)
    return float(100 * norm.cdf(-half_width))


def _interval_name(n: int) -> str:
    if n >= MIN_SEEDS_FOR_INTERVAL:
        return BOOTSTRAP
    return (NOTHING, SINGLE)[n] if n < 2 else RANGE


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Summary:
    """Summary of value minus baseline over the seeds that both have."""
    return summarise(list(differences(values, baseline).values()))


def differences(values: Mapping[int, float], baseline: Mapping[int, float]) -> dict[int, float]:
    """Value minus baseline by seed, of the seeds that both have, in their order."""
    return {seed: values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())}


def iqm(values_N: np.ndarray) -> float:
    """Interquartile mean of finite numbers: the mean without the lowest and highest ⌊n/4⌋; NaN for none."""
    return float(trim_mean(values_N, 0.25)) if len(values_N) else float("nan")


def iqm_columns(values_NC: np.ndarray) -> pd.DataFrame:
    """Interquartile mean of each column over its finite rows, with its 95 % bootstrap.

    values_NC: N seeds x C columns, NaN where a seed has no value.  Returns C rows with n, iqm, low, high,
    interval, by the rules of `summarise_columns`: seeds are resampled whole, and fewer than five of them give
    the range of the seeds.
    """
    rows = []
    for values_N in np.asarray(values_NC, dtype=float).T:
        finite = np.sort(values_N[np.isfinite(values_N)])
        n = len(finite)
        low, high = (finite[0], finite[-1]) if n else (np.nan, np.nan)
        centre = float(low) if low == high else iqm(finite)  # equal seeds give their value, unrounded
        if n >= MIN_SEEDS_FOR_INTERVAL:
            tail = tail_percent(n)
            bounds = np.percentile(_resampled_iqm(finite), [tail, 100 - tail])
            low, high = min(max(bounds[0], low), centre), max(min(bounds[1], high), centre)
        rows.append((n, centre, low, high, _interval_name(n)))
    return pd.DataFrame(rows, columns=["n", "iqm", "low", "high", "interval"])


def _resampled_iqm(sorted_N: np.ndarray) -> np.ndarray:
    """The IQM of every resample of ascending numbers, from how often it holds each of them."""
    n = len(sorted_N)
    cut = n // 4
    upto = np.cumsum(_resamples(n), axis=1).clip(cut, n - cut)  # places kept, up to and with each number
    weights = np.diff(upto, axis=1, prepend=cut)
    resampled: np.ndarray = weights @ sorted_N / (n - 2 * cut)
    return resampled


@dataclass(frozen=True)
class PairedTest:
    """Two-sided sign-flip test that paired differences are symmetric about 0.

    p: exact up to 2^13 sign patterns, from 10,000 random ones beyond; NaN without a test.  note: what limits
    it, in words: too few pairs, equal pairs, or the smallest p that n pairs can give; empty if nothing does.
    """

    n: int
    p: float
    note: str


def paired_test(values: Mapping[int, float], baseline: Mapping[int, float]) -> PairedTest:
    """Test of value minus baseline over the seeds that both have, finite differences only."""
    paired = np.array(list(differences(values, baseline).values()), dtype=float)
    paired = paired[np.isfinite(paired)]
    n = len(paired)
    if n < 2:
        return PairedTest(n, float("nan"), f"no test of {n} pair{'s' * (n != 1)}")
    if not paired.any():
        return PairedTest(n, 1.0, "every pair is equal")
    exact = n <= 13
    found = permutation_test(
        (paired,),
        lambda sample, axis: np.mean(sample, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=2**n if exact else RESAMPLES,
        rng=np.random.default_rng(0),
    )
    smallest = 2.0 ** (1 - n)
    note = f"{n} pairs give no p below {smallest:.3g}" if smallest > 1 - CONFIDENCE else ""
    return PairedTest(n, float(found.pvalue), note)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of a family of p values, in their order; NaN stays and is not counted."""
    tested = [index for index, p in enumerate(p_values) if np.isfinite(p)]
    adjusted, running = list(p_values), 0.0
    for rank, index in enumerate(sorted(tested, key=lambda index: p_values[index])):
        running = max(running, min(1.0, (len(tested) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


@dataclass(frozen=True)
class Proportion:
    """`hits` of `n`, with the exact (Clopper–Pearson) 95 % interval; NaN bounds for n = 0."""

    hits: int
    n: int
    low: float
    high: float


def proportion(hits: int, n: int) -> Proportion:
    """A share of independent runs; none and all of them still have an interval."""
    if n == 0:
        return Proportion(0, 0, float("nan"), float("nan"))
    bounds = binomtest(hits, n).proportion_ci(CONFIDENCE)
    return Proportion(hits, n, float(bounds.low), float(bounds.high))
