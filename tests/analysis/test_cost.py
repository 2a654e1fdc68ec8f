"""Statements and figures of what replay costs, from numbers that can be worked out by hand."""

import math
from typing import Any

import pandas as pd

from moe_rl.analysis.claims_cost import cost_statements, lengths_of
from moe_rl.analysis.cost_figures import cost_figures
from moe_rl.analysis.evidence_report import write_evidence
from moe_rl.analysis.measured_files import COLUMNS, Measured, export_measured
from moe_rl.analysis.run_files import config_hash
from moe_rl.store import Run, RunStore

# milliseconds and MiB at 16 and 1,024 tokens
PLAIN = {16: (100.0, 30.0), 1024: (1000.0, 400.0)}


def cost_rows(seed: int) -> list[dict[str, Any]]:
    """R2 takes 1.1 and 1.02 times the time, R3 0.2 more, and 2 MiB more memory; ratios rise by seed/100."""
    found = []

    def add(subject: str, metric: str, at: int, value: float) -> None:
        cells = ("cost", subject, metric, at, value, math.nan, math.nan, 5, "round")
        found.append(dict(zip(COLUMNS, cells, strict=True)))

    for length, (ms, mib) in PLAIN.items():
        ratio = (1.1 if length == 16 else 1.02) + seed / 100
        sides = (("none", 1.0, 0), ("replay", ratio, 2), ("rollout_replay", ratio + 0.2, 2))
        for subject, factor, more in sides:
            add(subject, "step/ms", length, factor * ms)
            add(subject, "memory/mib", length, mib + more)
            for phase in ("step", "rollout", "old_policy", "update"):
                add(subject, f"{phase}/ratio", length, factor)
        for kind, size in (("memory", 17), ("ordered", 8.2), ("sets", 7.2)):
            add("trace", f"bytes/{kind}", length, size + 0.05)
            add("trace", f"bytes/{kind}_computed", length, size)
    return found


def measured(seed: int, experts: int = 16) -> Measured:
    config = {"arm": "grpo", "model": {"num_experts": experts}}
    header = {
        "suite": "cost", "arm": "grpo", "seed": seed, "config_hash": config_hash(config), "config": config,
        "command": ["python", "-m", "experiments.measure_cost", f"seed={seed}"],
    }  # fmt: skip
    return Measured(header, pd.DataFrame(cost_rows(seed)))


def test_ratios_by_length_and_what_is_held():
    group = [measured(seed) for seed in range(5)]
    assert lengths_of(group) == [16, 1024]
    time, memory = cost_statements(group)
    # the mean over seeds of 1.1 + seed/100 is 1.12
    assert "the old policy's experts (R2): 1.120, 1.040" in time.measured
    assert (
        "the sampler's (R3): 1.320, 1.240" in time.measured and "without: 1e+03 ms at 1024" in time.measured
    )
    assert time.interval.startswith("95 %: ") and time.n == "5 seeds" and len(time.runs) == 5
    assert "17.05 in memory (computed 17), 8.25 in a file (computed 8.2)" in memory.measured
    assert "R2 +2 MiB, with R3 +2, of 400" in memory.measured
    assert list(cost_figures(group)) == ["cost"]


def test_topologies_are_apart():
    both = [measured(0), measured(0, experts=64)]
    assert [s.measured.partition(":")[0] for s in cost_statements(both)][::2] == [
        "model.num_experts=16", "model.num_experts=64",
    ]  # fmt: skip
    assert list(cost_figures(both)) == ["cost_1", "cost_2"]


def test_only_measurements_of_cost_make_its_rows(tmp_path):
    """A directory of `measure_cost` through its file to the table; another command's makes no such row."""
    for name, command in (("a", "measure_cost"), ("b", "measure_noise")):
        path = tmp_path / "out" / name
        words = ["python", "-m", f"experiments.{command}"]
        with RunStore.open(path, {"arm": "grpo", "seed": 0, "name": name}, {"command": words}) as store:
            (path / "tables").mkdir()
            rows = pd.DataFrame(cost_rows(0)).drop(columns="table")
            rows.to_csv(path / "tables" / "cost.csv", index=False)
            store.finish({})
        export_measured([Run(path)], name, tmp_path / "results" / "measured")
    rows = write_evidence(tmp_path / "results", {})
    assert [row.suite for row in rows] == ["a", "a"]
    assert [path.name for path in (tmp_path / "results" / "figures").iterdir()] == ["a.png"]
