"""Time of an RL step by phase, and its memory, against layers, experts, response length and group size.

    python -m experiments.benchmarks.scaling

The loop with everything measured (replay of the old experts, drift after every mini-batch) on
`conf/model/tiny.yaml` with one thing changed at a time, each in a process of its own: random weights, every
response of full length, half of the rewards 1. Seconds of wall clock, the median of a few steps after one
that warms up; memory is how far the peak of resident memory during the steps passes what the process held
with its model loaded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.benchmarks.fresh import in_fresh_process
from experiments.benchmarks.memory import rise_mib
from experiments.benchmarks.pairs import Ratio
from experiments.benchmarks.results import Report, Table, arguments, publish
from experiments.benchmarks.scene import CoinFlips, Enough, make_scene, run_loop

PHASES = ("rollout", "old_policy", "update", "drift", "total")
AXES: dict[str, tuple[str, tuple[int, ...]]] = {
    "layers": ("model.config.num_hidden_layers", (4, 8, 16, 32)),
    "experts": ("model.config.num_experts", (8, 16, 32, 64)),
    "response length": ("rollout.max_new_tokens", (14, 32, 64, 128)),
    "responses a group": ("rollout.responses", (4, 8, 16, 32)),
}
QUICK_AXES = {"layers": ("model.config.num_hidden_layers", (1, 2))}
SOME_STEPS = "experiments.benchmarks.scaling:some_steps"
COLUMNS = ("", *(f"{phase}, s" for phase in PHASES), "response tokens a second", "extra memory, MiB")


def main() -> None:
    """Print the tables."""
    options = arguments(__doc__).parse_args()
    publish(measure(quick=options.quick), options)


def measure(*, quick: bool) -> Report:
    base = ("rollout.prompts=4", "rollout.responses=2") if quick else ("rollout.prompts=16",)
    steps = 2 if quick else 4
    report = Report(
        "scaling",
        "Step time and memory against size",
        f"`conf/model/tiny.yaml` and the demo's sizes ({', '.join(base)}) with one thing changed at a time, "
        f"everything measured; one thread, median of {steps - 1} steps.",
    )
    for axis, (key, values) in (QUICK_AXES if quick else AXES).items():
        rows: list[list[str | float]] = []
        for value in values:
            records, memory = in_fresh_process(SOME_STEPS, [*base, f"{key}={value}"], steps)
            rows.append([str(value), *summary(records), memory])
        report.tables.append(Table(f"Against {axis}", (axis, *COLUMNS[1:]), rows))
    return report


def some_steps(overrides: Sequence[str], steps: int) -> tuple[list[dict[str, Any]], float]:
    """The records of some steps, and the memory they took in MiB."""
    scene = make_scene("arm=grpo_replay", *overrides, cold=False)
    # An id that the model does not have: no response stops before its last token.
    lm = replace(scene.lm, stop_ids=(scene.lm.model.config.vocab_size,))
    scene = replace(scene, lm=lm, task=CoinFlips(scene.task))
    tokens = scene.config.rollout.prompts * scene.config.rollout.responses
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        records.append(record | {"tokens": tokens * record["response/length"]})
        if len(records) == steps:
            raise Enough

    def work() -> None:
        with tempfile.TemporaryDirectory() as directory:
            run_loop(scene, Path(directory) / "run", keep)

    memory = rise_mib(work)
    return records[1:], memory


def summary(records: list[dict[str, Any]]) -> list[float]:
    """Median seconds by phase, and tokens per second."""
    times = [Ratio.of([record[f"time/{phase}"] for record in records]).median for phase in PHASES]
    return [*times, Ratio.of([record["tokens"] / record["time/total"] for record in records]).median]


if __name__ == "__main__":
    main()
