"""Contrasts: runs that differ in one setting, paired seed by seed; p values by Holm over those of a kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moe_rl.analysis.comparison import said, setting
from moe_rl.analysis.evidence import (
    Difference,
    Measure,
    Statement,
    Tested,
    difference,
    gains,
    ids,
    shown_difference,
    tested,
)
from moe_rl.analysis.run_files import CompactRun
from moe_rl.analysis.statistics import paired_difference, paired_test

Runs = Sequence[CompactRun]


@dataclass(frozen=True)
class Contrast:
    """Runs with `value` of a setting minus runs with its base; `words` are the other settings looked at."""

    words: str
    value: Any
    base: Any
    difference: Difference
    gains: dict[int, float]  # by seed
    runs: tuple[CompactRun, ...]


def contrasts(runs: Runs, key: str, base: Any, context: Sequence[str], measure: Measure) -> list[Contrast]:
    """Every other value of the setting `key` against `base`, where the settings `context` agree."""
    found = []
    for words, cell in cells_of(runs, context).items():
        by_value: dict[Any, list[CompactRun]] = defaultdict(list)
        for run in cell:
            by_value[setting(run, key)].append(run)
        if base not in by_value:
            continue
        named = {str(value): group for value, group in by_value.items()}
        for value, group in by_value.items():
            if value != base:
                row = difference(str(value), str(base), named, measure)
                pair = (group, by_value[base])
                found.append(
                    Contrast(words, value, base, row, gains(*pair, measure), sum(map(tuple, pair), ()))
                )
    return found


def cells_of(runs: Runs, context: Sequence[str]) -> dict[str, list[CompactRun]]:
    """The runs by the settings `context`, named by those of them that vary."""
    varying = [name for name in context if len({str(setting(run, name)) for run in runs}) > 1]
    cells: dict[str, list[CompactRun]] = defaultdict(list)
    for run in runs:
        values = {name: setting(run, name) for name in varying}
        cells[", ".join(said(name, value) for name, value in values.items() if value is not None)].append(run)
    return cells


def compared(
    suite: str,
    claim: str,
    source: str,
    what: str,
    key: str,
    found: Sequence[Contrast],
    headline: bool = False,
) -> Iterator[Statement]:
    """A row for each contrast of one kind."""
    yield from tested(
        suite,
        [
            Tested(
                claim,
                source,
                f"{contrast.words + ': ' if contrast.words else ''}{what}, {said(key, contrast.value)} − "
                f"{said(key, contrast.base)}:",
                contrast.difference,
                ids(contrast.runs),
                headline=headline,
            )
            for contrast in found
        ],
    )


def apart(
    suite: str, claim: str, source: str, what: str, key: str, one: Contrast, others: Sequence[Contrast]
) -> Iterator[Statement]:
    """Whether a contrast is another in other cells, seed by seed; two tests side by side cannot say that."""
    yield from tested(
        suite,
        [
            Tested(
                claim,
                source,
                f"{what}, {said(key, one.value)} − {said(key, one.base)}, {one.words} "
                f"({shown_difference(one.difference)}) − {other.words} "
                f"({shown_difference(other.difference)}):",
                Difference(
                    one.words,
                    other.words,
                    paired_difference(one.gains, other.gains),
                    paired_test(one.gains, other.gains),
                ),
                ids(one.runs, other.runs),
                headline=True,
            )
            for other in others
        ],
    )
