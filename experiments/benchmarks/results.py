"""What a benchmark reports: both sides, the value with its interval, the bound, and whether it is met."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from experiments.benchmarks.pairs import Ratio
from moe_rl.analysis.markdown import markdown_table

NUMBERS = (int, float)


@dataclass(frozen=True)
class Bound:
    """`limit` that a value must stay at or below, reach, or not be seen to pass."""

    sense: Literal["at most", "at least", "not measurably above"]
    limit: float

    def verdict(self, value: Ratio) -> str:
        """`met` when the whole interval keeps the bound, `met by the median` when the median alone does."""
        if self.sense == "not measurably above":
            return "met" if value.low <= self.limit else "missed"
        sign = 1 if self.sense == "at most" else -1
        limit = sign * self.limit
        if max(sign * value.low, sign * value.high) <= limit:
            return "met"
        return "met by the median" if sign * value.median <= limit else "missed"

    def __str__(self) -> str:
        sign = {"at most": "≤", "at least": "≥"}.get(self.sense, self.sense)
        return f"{sign} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """One comparison: `measured` and `beside` say both sides in words and numbers, `value` is the result."""

    what: str
    measured: str
    beside: str
    value: Ratio
    unit: str
    bound: Bound | None = None

    @property
    def verdict(self) -> str:
        return self.bound.verdict(self.value) if self.bound else ""


@dataclass(frozen=True)
class Table:
    """Figures without a bound."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]


@dataclass
class Report:
    """One benchmark. `about` says what was run; `notes` follow the tables, one paragraph each."""

    name: str
    title: str
    about: str
    rows: list[Row] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        parts = [f"## {self.title}", self.about]
        if self.rows:
            shown = [
                (r.what, r.measured, r.beside, f"{r.value} {r.unit}".strip(), str(r.bound or ""), r.verdict)
                for r in self.rows
            ]
            parts.append(markdown_table(("what", "measured", "beside", "value", "bound", "verdict"), shown))
        for table in self.tables:
            parts.append(f"**{table.title}**\n\n{table_of(table.columns, table.rows)}")
        return "\n\n".join([*parts, *self.notes]) + "\n"

    def records(self) -> list[dict[str, Any]]:
        """Every row, and every number of every table, as a line of the CSV."""
        lines = [
            {
                "benchmark": self.name,
                "what": row.what,
                "measured": row.measured,
                "beside": row.beside,
                "value": row.value.median,
                "low": row.value.low,
                "high": row.value.high,
                "unit": row.unit,
                "bound": str(row.bound or ""),
                "verdict": row.verdict,
            }
            for row in self.rows
        ]
        for table in self.tables:
            for first, *cells in table.rows:
                lines += [
                    {
                        "benchmark": self.name,
                        "what": f"{table.title}: {first}",
                        "measured": name,
                        "value": cell,
                    }
                    for name, cell in zip(table.columns[1:], cells, strict=True)
                    if isinstance(cell, NUMBERS)
                ]
        return lines

    def dump(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Report:
        plain = json.loads(path.read_text(encoding="utf-8"))
        rows = [
            Row(
                **{
                    **row,
                    "value": Ratio(**row["value"]),
                    "bound": Bound(**row["bound"]) if row["bound"] else None,
                }
            )
            for row in plain.pop("rows")
        ]
        return Report(**{**plain, "rows": rows, "tables": [Table(**table) for table in plain["tables"]]})


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> str:
    """A Markdown table whose cells are text or numbers."""
    shown = [[cell if isinstance(cell, str) else number(cell) for cell in row] for row in rows]
    return markdown_table(columns, shown)


def number(value: float) -> str:
    """Whole numbers in full, others to three digits at least."""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, no figures")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    return parser


def publish(report: Report, options: argparse.Namespace) -> None:
    """Print the report, and write it where the command line asks for it; quick sizes are held to no bound."""
    if options.quick:
        report.rows = [replace(row, bound=None) for row in report.rows]
    print(report.markdown())
    if options.json is not None:
        report.dump(options.json)


def machine() -> str:
    """Processor, cores and platform in one line."""
    name = platform.processor()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name or platform.machine()}, {os.cpu_count()} cores, {platform.platform()}"
