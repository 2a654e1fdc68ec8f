"""Where the time of an RL step goes: phases, and operators by their own time.

    python -m experiments.benchmarks.step_profile

The demo's loop (GRPO with replay, everything measured) from its cold start. Phases are medians of steps
without the profiler; operators are of the steps after them, as shares of the time of those steps. What
no operator accounts for is Python: transformers' modules, the loop, the task.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from experiments.benchmarks.pairs import Ratio
from experiments.benchmarks.results import Report, Table, arguments, publish
from experiments.benchmarks.scene import Enough, make_scene, run_loop

SHOWN = 15


class Watch:
    """Called after every step: some warm up, some are timed, some profiled."""

    def __init__(self, timed: int, profiled: int) -> None:
        self.start_at, self.stop_at = 2 + timed, 2 + timed + profiled
        self.records: list[dict[str, Any]] = []
        self.profiler = profile(activities=[ProfilerActivity.CPU])
        self.seconds = 0.0

    def __call__(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if len(self.records) == self.start_at:
            self.profiler.start()
            self.seconds -= time.perf_counter()
        if len(self.records) == self.stop_at:
            self.seconds += time.perf_counter()
            self.profiler.stop()
            raise Enough


def main() -> None:
    """Print the tables."""
    options = arguments(__doc__).parse_args()
    publish(measure(quick=options.quick), options)


def measure(*, quick: bool) -> Report:
    sizes = ["rollout.prompts=4", "rollout.responses=2"] if quick else []
    scene = make_scene("arm=grpo_replay", *sizes, cold=not quick)
    watch = Watch(timed=1 if quick else 8, profiled=1 if quick else 2)
    with tempfile.TemporaryDirectory() as directory:
        run_loop(scene, Path(directory) / "run", watch)
    rollout = scene.config.rollout
    return Report(
        "step_profile",
        "Where the time of a step goes",
        f"`conf/model/tiny.yaml`, {rollout.prompts} prompts x {rollout.responses} responses, GRPO with "
        "replay, everything measured; wall clock, one thread.",
        tables=[phases(watch), operators(watch)],
    )


def phases(watch: Watch) -> Table:
    records = watch.records[2 : watch.start_at]
    names = [name for name in records[-1] if name.startswith("time/")]
    seconds = {name: Ratio.of([record[name] for record in records]).median for name in names}
    rows = [(name, value, f"{value / seconds['time/total']:.0%}") for name, value in seconds.items()]
    return Table("Phases", ("phase", "seconds", "share"), rows)


def operators(watch: Watch) -> Table:
    """Those with the most time of their own, then the other operators, then what is outside of all."""
    steps = watch.stop_at - watch.start_at
    events = sorted(watch.profiler.key_averages(), key=lambda event: event.self_cpu_time_total, reverse=True)
    total = watch.seconds
    rows: list[tuple[str, float, int, str]] = []

    def add(name: str, seconds: float, calls: int) -> None:
        rows.append((name, seconds / steps, calls // steps, f"{seconds / total:.0%}"))

    for event in events[:SHOWN]:
        add(f"`{event.key}`", event.self_cpu_time_total / 1e6, event.count)
    rest = events[SHOWN:]
    add(
        f"{len(rest)} other operators",
        sum(e.self_cpu_time_total for e in rest) / 1e6,
        sum(e.count for e in rest),
    )
    add("Python between operators", total - sum(e.self_cpu_time_total for e in events) / 1e6, 0)
    return Table(
        "Operators, seconds of their own under the profiler",
        ("operator", "seconds", "calls", "share"),
        rows,
    )


if __name__ == "__main__":
    main()
