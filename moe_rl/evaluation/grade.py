"""What the evaluation sets share: problems with names, and the grade of a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_rl.tasks import Problem


@dataclass(frozen=True)
class Grade:
    """Right or wrong, and in a few words why."""

    correct: bool
    detail: str


class EvaluationSet(Protocol):
    """A benchmark: `names[i]` identifies `problems[i]`, `ratings` is one difficulty a problem or empty.

    `in_process`: the grader runs in this process, and may need a limit on its time.
    """

    in_process: bool

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def problems(self) -> Sequence[Problem]: ...

    @property
    def ratings(self) -> Sequence[float]: ...

    def grade(self, index: int, response: str) -> Grade:
        """The grade of a response to `problems[index]`, given as text without special tokens."""
        ...


def unique_names(names: Sequence[str], path: object) -> tuple[str, ...]:
    """The names as they are; ValueError for a repeated one, whose problem would count twice."""
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{path}: {len(repeated)} problems are there more than once, first {repeated[0]!r}")
    if not names:
        raise ValueError(f"{path}: no problems")
    return tuple(names)
