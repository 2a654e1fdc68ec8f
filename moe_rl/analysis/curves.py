"""Long tables behind the figures: one value a run and point, and means with bands over the seeds."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
import pandas as pd

from moe_rl.analysis.comparison import Member
from moe_rl.analysis.statistics import summarise_columns

MAX_POINTS = 100  # a longer curve is averaged over bins of consecutive steps
Stream = Literal["steps", "updates", "evals"]


def run_curves(
    members: Sequence[Member],
    column: str,
    stream: Stream = "steps",
    transform: Callable[[pd.Series], pd.Series] | None = None,
) -> pd.DataFrame:
    """A logged column of every run as rows of arm, seed, x, value; empty where nobody logged it.

    x is the step, or for `updates` the number of the update inside its batch, averaged over the steps.
    `steps` of more than 100 rows are averaged over bins of consecutive steps, the same for all runs; x is
    then the last step of a bin.
    Non-finite values count as missing.
    """
    width = bin_width(members) if stream == "steps" else 1
    parts = []
    for member in members:
        frame: pd.DataFrame = getattr(member, stream)
        if column not in frame:
            continue
        values = frame[column] if transform is None else transform(frame[column])
        x = frame["update"] if stream == "updates" else -(-frame["step"] // width) * width
        points = values.where(np.isfinite(values)).groupby(x).mean()
        parts.append(_rows(member, points.index, points.to_numpy()))
    return _join(parts)


def bin_width(members: Iterable[Member]) -> int:
    """How many consecutive steps a point of `run_curves` averages, set by the longest run."""
    return max(1, math.ceil(max(len(member.steps) for member in members) / MAX_POINTS))


def layer_curves(members: Iterable[Member], column: str) -> pd.DataFrame:
    """A list-valued column of every run, averaged over its steps: rows of arm, seed, x = layer, value.

    Layers carry the decoder-layer numbers of the run's summary; 0, 1, ... in the order of execution where
    it has none, or where a layer routes several times in a forward.
    """
    parts = []
    for member in members:
        if column not in member.steps:
            continue
        values_L = np.mean(member.steps[column].dropna().tolist(), axis=0)
        layers = member.run.summary.get("layer_ids") or ()
        names = layers if len(layers) == len(set(layers)) == len(values_L) else range(len(values_L))
        parts.append(_rows(member, names, values_L))
    return _join(parts)


def bands(curves: pd.DataFrame) -> pd.DataFrame:
    """Mean over seeds at every x of `run_curves`: rows of arm, x, n, mean, low, high, interval.

    The mean at a step is over the runs that got there, n of them.
    """
    parts = []
    for arm, group in curves.groupby("arm", sort=False):
        table = group.pivot_table(index="seed", columns="x", values="value", dropna=False)
        band = summarise_columns(table.to_numpy(dtype=float))
        band.insert(0, "arm", arm)
        band.insert(1, "x", table.columns)
        parts.append(band[band["n"] > 0])
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def seed_of(member: Member) -> int:
    """The seed of a run as the curves carry it: -1 where the configuration has none."""
    return -1 if member.run.seed is None else member.run.seed


def _rows(member: Member, x: Iterable[int], values: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({"arm": member.arm, "seed": seed_of(member), "x": list(x), "value": values})


def _join(parts: list[pd.DataFrame]) -> pd.DataFrame:
    return (
        pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["arm", "seed", "x", "value"])
    )
