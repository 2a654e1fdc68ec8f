"""Measure what Routing Replay costs (GSPO §5.3 names memory and communication) against response length:

    python -m experiments.measure_cost seed=0
    python -m experiments.measure_cost -m experiment=cost seed=0,1,2,3,4

Steps of the training loop without replay, with the old policy's experts (R2) and with the sampler's (R3) take
turns at every length; drift is not measured. Weights are random, every response has the full length, half of
the rewards are 1. A run directory gets tables/cost.csv; claims and figures are made of it by
`python -m experiments.evidence` (docs/open_questions.md). One that is done is left alone.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.benchmarks.fresh import in_fresh_process
from experiments.benchmarks.memory import rise_mib
from experiments.benchmarks.pairs import Ratio, rounds
from experiments.benchmarks.scene import NEVER, CoinFlips, Enough, Scene, run_loop
from experiments.benchmarks.stepper import Stepper
from experiments.config import build_objective, build_task, run_config
from experiments.cost_config import CostConfig, cost_config, register_cost
from experiments.launch import (
    CONF,
    attempt,
    command,
    interruptible,
    set_up_process,
    terminal_line,
    write_tables,
)
from moe_rl.models import load_model
from moe_rl.routing import record_routing
from moe_rl.routing.trace_size import TraceSize
from moe_rl.store import Run, RunStore, environment
from moe_rl.training.border import check_model
from moe_rl.training.progress import phases_bar

SOURCES = {"none": None, "replay": "old_policy", "rollout_replay": "rollout"}
PHASES = ("rollout", "old_policy", "update")
COLUMNS = ("subject", "metric", "at", "value", "low", "high", "n", "unit")
SEQUENCES = 4  # of the trace whose bytes are counted
MEMORY_OF = "experiments.measure_cost:memory_of"
LEARNING_RATE = 1e-6  # all sides stay the policy that they are
Row = dict[str, Any]
Record = dict[str, Any]

register_cost()


@hydra.main(version_base="1.3", config_path=CONF, config_name="measure_cost")
def main(cfg: DictConfig) -> None:
    path = attempt(cfg, run)
    if path is None:
        return
    summary = Run(path).summary
    print(
        f"{os.path.relpath(path)}: done, a step with replay takes {summary['ratio_longest']:.3f} times one "
        f"without at {summary['longest']} tokens; tables/cost.csv has the rest"
    )


def run(cfg: DictConfig, path: Path) -> None:
    """One measurement, from its config to DONE."""
    config = cost_config(cfg)
    set_up_process(config)
    lengths = sorted(config.cost.lengths)
    with RunStore.open(
        path, run_config(cfg), environment() | {"command": command("experiments.measure_cost")}
    ) as store:
        rows: list[Row] = []
        title = f"cost seed {config.seed}"
        with phases_bar(title, 3 * len(lengths), terminal_line()) as done:
            for length in lengths:
                rows += step_rows(cfg, config, length)
                done(f"{length} tokens: steps")
                rows += memory_rows([str(word) for word in HydraConfig.get().overrides.task], length)
                done(f"{length} tokens: memory")
                rows += trace_rows(cfg, length)
                done(f"{length} tokens: trace")
        write_tables(path, {"cost": rows}, COLUMNS)
        ratios = [one["value"] for one in rows if (one["subject"], one["metric"]) == ("replay", "step/ratio")]
        store.finish({"longest": lengths[-1], "ratio_longest": ratios[-1]})


def scene_of(cfg: DictConfig, source: str | None, length: int) -> Scene:
    """The scene of `cfg` with replay from `source` and responses of exactly `length` tokens."""
    config, task = cost_config(cfg), build_task(cfg)
    lm = load_model(config.model, task.default_tokenizer, config.device)
    limit = lm.model.config.get_text_config().max_position_embeddings
    config.replay.source = source
    check_model(lm.model, build_objective(cfg), config)
    prompt = max(len(lm.tokenizer(task.train(i).prompt)["input_ids"]) for i in range(64))
    if prompt + length > limit:
        raise ValueError(
            f"cost.lengths has {length}, and prompts have up to {prompt} tokens: "
            f"model.config.max_position_embeddings={limit} must be at least {prompt + length}"
        )
    config.rollout.max_new_tokens = length
    config.rollout.grading_timeout = (
        None  # its signal is the main thread's alone, and the loops run in others
    )
    config.optim.lr, config.optim.warmup_updates = LEARNING_RATE, 0
    config.drift_every, config.steps = 0, NEVER
    config.evaluation.every, config.evaluation.prompts, config.checkpoint_every = NEVER, 1, NEVER
    # An id that the model does not have: no response stops before its last token.
    lm = replace(lm, stop_ids=(lm.model.config.get_text_config().vocab_size,))
    return Scene(lm, CoinFlips(task), build_objective(cfg), config)


def silent() -> redirect_stdout[io.StringIO]:
    """Around loops, whose lines say nothing here."""
    return redirect_stdout(io.StringIO())


def step_rows(cfg: DictConfig, config: CostConfig, length: int) -> list[Row]:
    """Milliseconds of a step and of its phases, and ratios to the step without replay of the same round."""
    with tempfile.TemporaryDirectory() as directory, silent(), ExitStack() as stack:
        loops = {
            name: stack.enter_context(
                Stepper(partial(run_loop, scene_of(cfg, source, length), Path(directory) / name))
            )
            for name, source in SOURCES.items()
        }
        sides = [partial(timed, loop) for loop in loops.values()]
        found = dict(zip(loops, rounds(sides, config.cost.rounds, warm=1), strict=True))
    rows = []
    for name, records in found.items():
        for metric in ("step", *PHASES):
            times = [1e3 * record[metric] for record in records]
            beside = [1e3 * record[metric] for record in found["none"]]
            rows.append(row(name, f"{metric}/ms", length, Ratio.of(times), len(times), "round"))
            if name != "none":
                ratio = Ratio.of([a / b for a, b in zip(times, beside, strict=True)])
                rows.append(row(name, f"{metric}/ratio", length, ratio, len(times), "round"))
    return rows


def timed(loop: Stepper[Record]) -> Record:
    """Seconds of the next step: `step` of CPU time, its phases of wall clock."""
    started = time.process_time()
    record = loop.advance()
    return {phase: record[f"time/{phase}"] for phase in PHASES} | {"step": time.process_time() - started}


def memory_rows(words: Sequence[str], length: int) -> list[Row]:
    """MiB by which a first step's peak passes what the process held with its model, each in a fresh one."""
    return [
        row(
            name,
            "memory/mib",
            length,
            Ratio.exactly(in_fresh_process(MEMORY_OF, list(words), source, length)),
            1,
        )
        for name, source in SOURCES.items()
    ]


def memory_of(words: Sequence[str], source: str | None, length: int) -> float:
    """That of one kind of replay; `words` are the overrides of this measurement, since a config of dynamic
    classes does not travel between processes."""
    with initialize_config_dir(CONF, version_base="1.3"):
        cfg = compose("measure_cost", overrides=list(words))
    set_up_process(cost_config(cfg))
    scene = scene_of(cfg, source, length)

    def enough(record: Record) -> None:
        raise Enough

    with tempfile.TemporaryDirectory() as directory, silent():
        return rise_mib(lambda: run_loop(scene, Path(directory) / "run", enough))


def trace_rows(cfg: DictConfig, length: int) -> list[Row]:
    """Bytes of a trace per token, in memory, in a file in the router's order and as sets, and as computed."""
    scene = scene_of(cfg, None, length)
    vocabulary = scene.lm.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(scene.config.seed)
    ids = torch.randint(vocabulary, (SEQUENCES, length), generator=generator).to(scene.lm.model.device)
    with torch.no_grad(), record_routing(scene.lm.model) as recorder:
        scene.lm.model(input_ids=ids, use_cache=False)
    trace, tokens = recorder.trace(), SEQUENCES * length
    size = TraceSize(len(trace.layer_ids), trace.num_experts, trace.top_k)
    found = {"memory": float(trace.nbytes), "memory_computed": float(tokens * size.bytes_per_token)}
    with tempfile.TemporaryDirectory() as directory:
        for name, ordered in (("ordered", True), ("sets", False)):
            file = Path(directory) / name
            trace.save(file, ordered=ordered)
            found[name] = float(file.stat().st_size)
            found[f"{name}_computed"] = float(size.file_bytes([length] * SEQUENCES, length, ordered))
    return [
        row("trace", f"bytes/{name}", length, Ratio.exactly(total / tokens), tokens, "token")
        for name, total in found.items()
    ]


def row(subject: str, metric: str, length: int, value: Ratio, n: int, unit: str = "") -> Row:
    """A line of the table; the interval is that of the median."""
    return dict(
        zip(COLUMNS, (subject, metric, length, value.median, value.low, value.high, n, unit), strict=True)
    )


if __name__ == "__main__":
    with interruptible():
        main()
