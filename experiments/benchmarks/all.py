"""Run every benchmark, one after the other and each in a process of its own, and write the results.

    make bench          # about 20 minutes on a quiet machine; writes experiments/results/benchmarks.*
    python -m experiments.benchmarks.all --quick --results DIR

benchmarks.md has a section a benchmark, with both sides, value, bound and verdict; benchmarks.csv the same
in lines. A benchmark that cannot run (TRL is not installed) has a section that says why, and makes the exit
status 1.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from experiments.benchmarks.results import Report, Row, machine
from moe_rl.analysis.markdown import markdown_table

# the quick ones first, so that what fails early is seen early
BENCHMARKS = (
    "drift_speed",
    "trace_size",
    "trace_stream",
    "routing_overhead",
    "loop_overhead",
    "against_trl",
    "step_profile",
    "scaling",
)
PACKAGES = ("torch", "transformers", "numpy", "trl")
RESULTS = Path(__file__).resolve().parents[1] / "results"
FIELDS = (
    "benchmark",
    "what",
    "measured",
    "beside",
    "value",
    "low",
    "high",
    "unit",
    "bound",
    "verdict",
    "versions",
    "machine",
)


def main() -> None:
    """Write both files; the exit status says whether every benchmark ran."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that all run, no figures")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the two files")
    options = parser.parse_args()
    ran: list[tuple[str, Report | str, float]] = []
    for name in BENCHMARKS:
        print(f"{name} …", file=sys.stderr, flush=True)
        start = time.monotonic()
        ran.append((name, run(name, quick=options.quick), time.monotonic() - start))
    write(options.results, ran, quick=options.quick)
    print(f"{options.results / 'benchmarks.md'} and benchmarks.csv are written")
    failed = [name for name, report, _ in ran if isinstance(report, str)]
    if failed:
        sys.exit(f"did not run: {', '.join(failed)}; the reasons are in benchmarks.md")


def run(name: str, *, quick: bool) -> Report | str:
    """The report of one benchmark, or the last line of what it said instead."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        command = [sys.executable, "-m", f"experiments.benchmarks.{name}", "--json", str(path)]
        done = subprocess.run(
            command + ["--quick"] * quick,
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if done.returncode == 0:
            return Report.load(path)
    print(done.stderr, file=sys.stderr, flush=True)
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"exit status {done.returncode}"


def write(directory: Path, ran: list[tuple[str, Report | str, float]], *, quick: bool) -> None:
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    python = f"Python {sys.version.split()[0]}"
    took = sum(seconds for *_, seconds in ran) / 60
    reports = [report for _, report, _ in ran if isinstance(report, Report)]
    parts = [
        "# Benchmarks",
        f"`make bench`{' --quick, too small for figures' if quick else ''}, {took:.0f} minutes. "
        f"{python}, {versions}; {machine()}; one torch thread. Values with an interval are medians with the "
        "95 % interval of the median. Both sides of a comparison take turns in one process. `met`: the whole "
        "interval keeps the bound; `met by the median`: the median does, the interval reaches past it.",
        summary(ran),
        *(report.markdown() for report in reports),
    ]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "benchmarks.md").write_text(
        "\n\n".join(part.strip() for part in parts) + "\n", encoding="utf-8"
    )
    with (directory / "benchmarks.csv").open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, FIELDS, restval="")
        lines.writeheader()
        for report in reports:
            for record in report.records():
                lines.writerow(record | {"versions": f"{python}, {versions}", "machine": machine()})


def summary(ran: list[tuple[str, Report | str, float]]) -> str:
    """One line a benchmark: how many bounds are met, which are not, how long it took."""
    lines = []
    for name, report, seconds in ran:
        said = f"did not run: {report}" if isinstance(report, str) else verdicts(report.rows)
        lines.append((name, said, f"{seconds:.0f} s"))
    return markdown_table(("benchmark", "bounds", "took"), lines)


def verdicts(rows: list[Row]) -> str:
    bounded = [row for row in rows if row.bound is not None]
    if not bounded:
        return "none: figures only"
    counts = {
        name: sum(row.verdict == name for row in bounded) for name in ("met", "met by the median", "missed")
    }
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    missed = [
        f"{row.what}, {row.measured}: {row.value} for {row.bound}"
        for row in bounded
        if row.verdict == "missed"
    ]
    return said + "".join(f"<br>missed: {line}" for line in missed)


def version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
