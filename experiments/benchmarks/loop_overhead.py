"""A step of the loop beside the sum of its bare model calls.

    python -m experiments.benchmarks.loop_overhead

The loop is `moe_rl.training.loop.train`, routing measurement off, with its task, rewards, metrics and run
directory; `bare.py` says what the bare calls are. Both sample from the demo's cold start, 32 prompts x 8
responses, 4 mini-batches, and take turns; CPU time of one thread. The learning rate is 1e-6, so both stay
what they are.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.bare import BareStep, Shape
from experiments.benchmarks.pairs import Ratio, rounds, seconds
from experiments.benchmarks.results import Bound, Report, Row, Table, arguments, publish
from experiments.benchmarks.scene import Scene, make_scene, run_loop
from experiments.benchmarks.stepper import Stepper
from moe_rl.tasks.encode import prompt_ids

BOUND = Bound("at most", 1.25)


def main() -> None:
    """Print the table."""
    options = arguments(__doc__).parse_args()
    publish(measure(quick=options.quick), options)


def measure(*, quick: bool) -> Report:
    sizes = ["rollout.prompts=4", "rollout.responses=2"] if quick else []
    scenes = [make_scene("drift_every=0", *sizes, cold=not quick) for _ in range(3)]
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        loop = Stepper(lambda pause: run_loop(scenes[0], Path(directory) / "loop", pause))
        with loop:
            sides = [
                partial(seconds, lambda: records.append(loop.advance())),
                partial(seconds, bare_step(scenes[1], shared=False)),
                partial(seconds, bare_step(scenes[2], shared=True)),
            ]
            ours, repeated, shared = rounds(sides, 3 if quick else 24)
    rollout = scenes[0].config.rollout
    report = Report(
        "loop_overhead",
        "The loop beside its bare model calls",
        f"`conf/model/tiny.yaml`, {rollout.prompts} prompts x {rollout.responses} responses, "
        f"{scenes[0].config.optim.minibatches} mini-batches, routing measurement off; CPU seconds a step, "
        f"one thread, {len(ours)} rounds in turn.",
    )
    for name, bare in (("prompts repeated", repeated), ("prompts run once a group", shared)):
        value = Ratio.of([a / b for a, b in zip(ours, bare, strict=True)])
        beside = f"bare calls, {name}: {Ratio.of(bare)} s"
        report.rows.append(Row("RL step", f"loop: {Ratio.of(ours)} s", beside, value, "x", BOUND))
    phases = [name for name in records[-1] if name.startswith("time/")]
    medians = [Ratio.of([record[name] for record in records[2:]]).median for name in phases]
    report.tables.append(
        Table("The loop's phases, median wall-clock seconds", ["", *phases], [["s", *medians]])
    )
    return report


def bare_step(scene: Scene, *, shared: bool, **options: Any) -> BareStep:
    """The bare calls in the shapes of a scene, on prompts of its task."""
    rollout = scene.config.rollout
    ids = [prompt_ids(scene.lm.tokenizer, scene.task.train(i)) for i in range(rollout.prompts)]
    prompt_bS = torch.tensor(ids)  # the demo's prompts are of one length
    shape = Shape(rollout.responses, rollout.max_new_tokens, scene.config.optim.minibatches)
    scene.lm.model.eval()
    lr, (stop_id,) = scene.config.optim.lr, scene.lm.stop_ids
    return BareStep(
        scene.lm.model, prompt_bS, torch.ones_like(prompt_bS), stop_id, shape, shared=shared, lr=lr, **options
    )


if __name__ == "__main__":
    main()
