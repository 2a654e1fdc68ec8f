"""What a dry run found: lines of its table, and what does not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Findings:
    """rows: (what, found) of the table; problems: what has to be mended, a line each."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, what: str, found: str) -> None:
        self.rows.append((what, found))

    def problem(self, reason: object) -> None:
        self.problems.append(" ".join(str(reason).split()))

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Turns what the user can mend into a problem, and goes on behind the block."""
        try:
            yield
        except (ValueError, OSError, ModuleNotFoundError) as error:
            self.problem(error)

    def weigh(self, what: str, parts: dict[str, int], limit: float) -> None:
        """Add parts in bytes with their sum, and a problem where it is above `limit` bytes."""
        total = sum(parts.values())
        for part, held in parts.items():
            self.add(f"  {part}", size(held))
        self.add("  sum", f"{size(total)} of {size(limit)}" + (": does not fit" if total > limit else ""))
        if total > limit:
            self.problem(f"{what}: takes {size(total)}, there are {size(limit)}")

    def __str__(self) -> str:
        width = max((len(what) for what, _ in self.rows), default=0)
        lines = [f"{what:<{width}}  {found}" for what, found in self.rows]
        if self.problems:
            return "\n".join([*lines, "", "does not fit:", *(f"  {problem}" for problem in self.problems)])
        return "\n".join([*lines, "", "dry run: everything fits; nothing was written"])


def size(count: float) -> str:
    """Bytes as people say them: units of 1000, three digits."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.1f} GB" if count < 1000 else f"{count:,.0f} GB"
