"""Tables, figures and a page from run directories.

    python -m experiments.report runs=outputs/demo
    python -m experiments.report runs=outputs/demo,'outputs/sweep-*' out=outputs/both
    python -m experiments.report runs=outputs/drift_lr x=kl_k3

`runs` is a directory, a glob or a comma list of these; every run directory below is read.  The report goes
to <runs>/report, or to the nearest folder above several `runs`, unless `out` is given.  Runs of measure_drift
get a report of their drift, of a sweep against `x`: a key of the configuration such as optim.lr (default: the
one in which they differ), or the measured relative_update_norm, kl_k3 or log_ratio_sq.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from moe_rl.analysis.drift_report import write_drift_report
from moe_rl.analysis.drift_tables import is_drift_run
from moe_rl.analysis.report import write_report
from moe_rl.store import StoreError, find_runs

OPTIONS = ("runs", "out", "x")


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """key=value arguments; SystemExit with the usage for anything else."""
    options = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown or not options.get("runs"):
        problem = f"unknown option {unknown[0]!r}" if unknown else "runs= is missing"
        raise SystemExit(
            f"{problem}; expected: python -m experiments.report runs=DIR[,DIR or GLOB...] [out=DIR] [x=KEY]"
        )
    return options


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    paths = [path for pattern in options["runs"].split(",") for path in sorted(glob(pattern)) or [pattern]]
    above = paths[0] if len(paths) == 1 else os.path.commonpath([os.path.abspath(path) for path in paths])
    out = Path(options.get("out") or Path(above) / "report")
    command = shlex.join(["python", "-m", "experiments.report", *arguments])
    try:
        runs = find_runs(*paths)
        drift = [run for run in runs if is_drift_run(run)]
        if drift and len(drift) < len(runs):
            raise StoreError("these are runs of training and of measure_drift: report on one kind at a time")
        if not drift and "x" in options:
            raise StoreError("x= is for runs of measure_drift, and these are runs of training")
        if drift:
            page = write_drift_report(drift, out, command, options.get("x"))
        else:
            page = write_report(runs, out, command)
    except StoreError as error:
        raise SystemExit(str(error)) from error
    print(f"{len(runs)} runs: {page} (with figures/*.png and tables/*.csv beside it)")


if __name__ == "__main__":
    main(sys.argv[1:])
