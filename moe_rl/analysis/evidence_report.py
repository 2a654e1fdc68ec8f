"""Writes what the tables of finished runs show: claims, one row a run, figures, the README's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from moe_rl.analysis.claims import statements
from moe_rl.analysis.claims_cost import cost_statements
from moe_rl.analysis.claims_noise import noise_statements
from moe_rl.analysis.cost_figures import cost_figures
from moe_rl.analysis.evidence import Statement, final_greedy, final_reward, mean_of
from moe_rl.analysis.evidence_figures import draw_all
from moe_rl.analysis.measured_files import Measured, read_measured
from moe_rl.analysis.noise_figures import noise_figures
from moe_rl.analysis.report import write_csv, write_png
from moe_rl.analysis.run_files import CompactRun, read_all
from moe_rl.store import StoreError, write_atomic
from moe_rl.store.files import writing

BEGIN, END = "<!-- evidence: begin -->", "<!-- evidence: end -->"
HEAD = "| claim | what we measured | interval | n | command |\n|---|---|---|---|---|\n"


# What is made of measurements, by the command that made them.
STATEMENTS = {"measure_noise": noise_statements, "measure_cost": cost_statements}
FIGURES = {"measure_noise": noise_figures, "measure_cost": cost_figures}


def write_evidence(
    results: Path,
    commands: Mapping[str, str],
    computed: Sequence[Statement] = (),
    defaults: Mapping[str, Any] | None = None,
) -> list[Statement]:
    """Make claims.md, claims.csv, runs.csv and figures/*.png in `results` from results/runs and
    results/measured.

    `commands`: how the runs of each suite are made, for the table. `computed`: statements that need no run,
    for its end. `defaults`: see `read_all`. Raises StoreError without any file.
    """
    runs, measured = read_all(results / "runs", defaults), read_measured(results / "measured")
    if not runs and not measured:
        raise StoreError(f"{results / 'runs'} holds no tables of runs: run a block first")
    by_command = {
        name: [one for one in measured if made_by(one) == f"experiments.{name}"] for name in STATEMENTS
    }
    rows = [*statements(runs)]
    figures = draw_all(runs)
    for name, group in by_command.items():
        rows += STATEMENTS[name](group)
        figures |= FIGURES[name](group)
    rows += computed
    with writing(results):
        (results / "figures").mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        write_png(figure, results / "figures" / f"{name}.png")
    write_csv(claim_frame(rows, commands), results / "claims.csv")
    write_csv(run_frame(runs), results / "runs.csv")
    write_atomic(results / "claims.md", claims_page(rows, commands))
    return rows


def made_by(measured: Measured) -> str:
    """The module of the command behind a measurement."""
    return str((measured.header.get("command") or ["", "", ""])[2])


def claim_table(rows: Sequence[Statement], commands: Mapping[str, str]) -> str:
    """The table as Markdown."""
    lines = [
        f"| {row.claim} ({row.source}) | {row.suite}: {row.measured} | {row.interval} | {row.n} | "
        f"`{commands.get(row.suite, row.suite)}` |\n"
        for row in rows
    ]
    return HEAD + "".join(lines)


def claims_page(rows: Sequence[Statement], commands: Mapping[str, str]) -> str:
    """The table with how it is to be read."""
    return (
        "# Claims, and what came out\n\n"
        "Generated from `runs/` and `measured/` by `python -m experiments.evidence build`; do not edit. "
        "Differences are paired by seed; intervals are 95 % bootstraps of the mean, percentiles expanded "
        "for the number of seeds, from five on, each for itself and not adjusted, else the range of the "
        "seeds, and say so; p values are two-sided and exact, by the sign-flip test or the log-rank test, "
        "adjusted by Holm over the comparisons of one kind in a suite. So an interval may leave 0 out where "
        "its p value does not separate: the p value is the test. `claims.csv` has the ids of the runs "
        "behind each row.\n\n" + claim_table(rows, commands)
    )


def claim_frame(rows: Sequence[Statement], commands: Mapping[str, str]) -> pd.DataFrame:
    """One row a statement, with the ids of its runs, separated by spaces."""
    return pd.DataFrame(
        [
            {
                "claim": row.claim,
                "source": row.source,
                "suite": row.suite,
                "measured": row.measured,
                "interval": row.interval,
                "n": row.n,
                "command": commands.get(row.suite, row.suite),
                "runs": " ".join(row.runs),
            }
            for row in rows
        ]
    )


def run_frame(runs: Sequence[CompactRun]) -> pd.DataFrame:
    """One row a run: how it ended, and the numbers that statements are made of."""
    return pd.DataFrame(
        [
            {
                "run": run.id,
                "suite": run.suite,
                "arm": run.arm,
                "seed": run.seed,
                "status": run.header["status"],
                "steps": len(run.steps),
                "collapse": str(run.collapse),
                "final_reward": final_reward(run),
                "final_greedy": final_greedy(run),
                "clip_token": mean_of("clip_frac/token")(run),
                "drift_first": mean_of("drift/first")(run),
                "kl_k3": mean_of("kl/k3")(run),
                "command": " ".join(run.header.get("command") or []),
            }
            for run in runs
        ]
    ).round(6)


def insert_table(readme: Path, table: str) -> None:
    """Put the table between the markers of a README. Raises StoreError for one without them."""
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise StoreError(f"{readme} has no lines {BEGIN} and {END} for the table to go between")
    write_atomic(readme, f"{before}{BEGIN}\n{table}{END}{after}")
