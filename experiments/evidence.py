"""The paper's claims from this repository's own runs: in blocks, resumable, and then as a table and figures.

    python -m experiments.evidence size=quick                   # every suite in small, about ten minutes
    python -m experiments.evidence size=full block=fig1_sort    # one block of at most 45 minutes on two cores
    python -m experiments.evidence size=full                    # all blocks, one after the other
    python -m experiments.evidence list                         # the blocks
    python -m experiments.evidence build                        # table, figures and the README's table again
    python -m experiments.evidence export runs=outputs/x suite=search

A block runs sweeps of `experiments.train`, below outputs/evidence/<size>/, and then writes the table of every
run that has ended to <results>/runs/<suite>/; those of `measure_noise` and `measure_cost` go to
<results>/measured/. What is there already is not run again, and a block that is stopped continues with the
same command, on another machine too: a sweep whose runs all have their tables is over. Results of size=full
are in experiments/results/, those of size=quick below outputs/. Claims and figures are made from the tables
alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from glob import glob
from importlib import import_module
from pathlib import Path

from experiments.blocks import SIZES, Block, Overrides, read_blocks, runs_of
from experiments.footprint import SUITE as PUBLISHED_SUITE
from experiments.footprint import published_statements
from moe_rl.analysis.claims import BOTH, COLD_STARTS
from moe_rl.analysis.claims_warning import SUITE as WARNING
from moe_rl.analysis.evidence_report import claim_table, insert_table, write_evidence
from moe_rl.analysis.measured_files import export_measured
from moe_rl.analysis.run_files import commands_in, export
from moe_rl.store import StoreError, find_runs
from moe_rl.training.config import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
LIMIT_S = 38 * 60.0  # no sweep of a block begins later, so that the block ends within 45 minutes
# How the runs of a command become small tables, and in which folder of the results these are.
EXPORTS = {
    "train": (export, "runs"),
    "measure_noise": (export_measured, "measured"),
    "measure_cost": (export_measured, "measured"),
}
DEFAULTS = asdict(TrainConfig())  # of options that tables may be older than
USAGE = (
    "expected: python -m experiments.evidence size=quick|full [block=NAME] | list | build | "
    "export runs=DIR[,DIR or GLOB...] suite=NAME"
)


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments name; the exit code, 1 where a sweep failed."""
    command = arguments[0] if arguments and "=" not in arguments[0] else "run"
    options = dict(word.partition("=")[::2] for word in arguments if "=" in word)
    allowed = {"run": {"size", "block"}, "list": set(), "build": set(), "export": {"runs", "suite"}}
    if command not in allowed or options.keys() - allowed[command]:
        raise SystemExit(USAGE)
    try:
        if command == "list":
            print(listing())
        elif command == "build":
            build()
        elif command == "export":
            export_runs(options)
        else:
            return run(options.get("size", ""), options.get("block"))
    except StoreError as error:
        raise SystemExit(str(error)) from error
    return 0


def run(size: str, name: str | None) -> int:
    """Run a block, or all of a size, and make table and figures from the tables of what has ended."""
    blocks = read_blocks(size) if size in SIZES else {}
    if not blocks or (name is not None and name not in blocks):
        names = ", ".join(blocks) if blocks else USAGE
        raise SystemExit(f"size={size} block={name}: {names}")
    output = Path("outputs") / "evidence" / size
    results = RESULTS if size == "full" else output / "results"
    failed = 0
    for block in blocks.values() if name is None else [blocks[name]]:
        try:
            failed += run_block(block, output, results / EXPORTS[block.entry][1] / block.suite)
        finally:
            if (output / block.suite).exists():
                write, folder = EXPORTS[block.entry]
                write(find_runs(output / block.suite), block.suite, results / folder)
    if size == "full":
        build()
    else:
        rows = write_evidence(results, commands(), defaults=DEFAULTS)
        print(f"{len(rows)} statements of no weight, from runs of seconds: {results / 'claims.md'}")
        if any(any((RESULTS / folder).glob("*/*.csv")) for _, folder in EXPORTS.values()):
            build()
    return min(failed, 1)


def run_block(block: Block, output: Path, tables: Path) -> int:
    """Run the sweeps of a block until its time is up; how many of them failed. A sweep of which every run has
    its table is over, wherever it ran."""
    started, failed, ended = time.monotonic(), 0, commands_in(tables)
    sweeps = list(block.commands(output))
    for number, overrides in enumerate(sweeps, start=1):
        if time.monotonic() - started > LIMIT_S:
            print(f"{block.name}: time is up after {number - 1} of {len(sweeps)} sweeps; give it again")
            break
        print(f"{block.name}, sweep {number} of {len(sweeps)}: {' '.join(overrides)}", flush=True)
        if all(tuple(run) in ended for run in runs_of(overrides)):
            print(f"the tables of its runs are in {tables}; what is removed there is run again")
            continue
        failed += not sweep(block.entry, overrides)
    if not sweeps:
        print(f"{block.name}: nothing to start from, no run of {block.from_suite} collapsed")
    return failed


def sweep(entry: str, overrides: Overrides) -> bool:
    """`python -m experiments.<entry> -m` here, whose workers stay for the next one; whether it went well."""
    main_of_entry = import_module(f"experiments.{entry}").main
    before = sys.argv
    sys.argv = [f"experiments.{entry}", "-m", *overrides]
    try:
        main_of_entry()
    except SystemExit as error:
        return not error.code
    finally:
        sys.argv = before
    return True


def export_runs(options: dict[str, str]) -> None:
    """Write the tables of finished runs anywhere to experiments/results/runs/<suite>."""
    if not {"runs", "suite"} <= options.keys():
        raise SystemExit(USAGE)
    paths = [path for pattern in options["runs"].split(",") for path in sorted(glob(pattern)) or [pattern]]
    written = export(find_runs(*paths), options["suite"], RESULTS / "runs")
    print(f"{len(written)} tables in {RESULTS / 'runs' / options['suite']}")


def build() -> None:
    """Table, figures and the README's table from the committed tables of runs."""
    rows = write_evidence(RESULTS, commands(), published_statements(), DEFAULTS)
    claims = list(dict.fromkeys(row.claim for row in rows))
    shown = sorted((row for row in rows if row.headline), key=lambda row: claims.index(row.claim))
    more = f"\n{len(rows) - len(shown)} further rows: [claims.md](experiments/results/claims.md).\n"
    insert_table(ROOT / "README.md", claim_table(shown, commands()) + more)
    print(f"{len(rows)} statements: {RESULTS / 'claims.md'}, figures beside it, and the table in README.md")


def commands() -> dict[str, str]:
    """How the runs of each suite are made."""
    found = {
        WARNING: "python -m experiments.evidence build",  # made of the runs of all suites
        PUBLISHED_SUITE: "python -m experiments.footprint",
    }
    for block in read_blocks("full").values():
        more = f"make evidence size=full block={block.name}"
        found[block.suite] = f"{found[block.suite]} && {more}" if block.suite in found else more
    found[BOTH] = " && ".join(found[suite] for suite in COLD_STARTS if suite in found)
    return found


def listing() -> str:
    """One line a block: runs, estimated minutes."""
    lines = []
    for block in read_blocks("full").values():
        runs = len(block.seeds) * sum(len(runs_of(sweep)) for sweep in block.sweeps)
        what = (
            f"{runs} runs"
            if runs
            else f"from up to {block.at_most} collapsed, as many other runs of {block.from_suite}"
        )
        lines.append(f"{block.name:16} {block.suite:16} {what:48} about {block.minutes} minutes")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
