"""What a search is told and what it chooses from: settings, and one value of an axis.

Every choice costs the number of departures from what a paper or a framework documents: 0 for a documented
setting, 1 for a mistake or for a value that had to be guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

Widths = tuple[float, float]


@dataclass(frozen=True)
class Settings:
    """What the user knows of the trainer's configuration; a value given here is no departure."""

    clip: Widths | None = None  # clip_low, clip_high as widths
    length_divisor: float | None = None  # tokens
    kl_coef: float | None = None
    entropy_coef: float | None = None
    group_size: int | None = None
    departures: int = 1
    tolerance: float | None = None  # relative to Match.scale; None: by the dump's precision


@dataclass(frozen=True)
class Choice:
    """A value of an axis: how it prints, how many departures it costs, and what to know about it."""

    name: str
    cost: int = 0
    note: str = ""
