"""Measure the noise of ratios and gradients between two policies: the sampler's error in clip units, variance
against response length up to 10,000 tokens, and how alike the gradients of mini-batches are:

    python -m experiments.measure_noise seed=0
    python -m experiments.measure_noise -m seed=0,1,2,3

A run directory gets tables/{clip_units,length,gradients}.csv; claims and figures are made of them by
`python -m experiments.evidence` (docs/open_questions.md). One that is done is left alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import hydra
from omegaconf import DictConfig

from experiments.config import build_objective, build_task, run_config
from experiments.launch import (
    CONF,
    attempt,
    command,
    interruptible,
    set_up_process,
    starting_model,
    terminal_line,
    write_tables,
)
from experiments.noise_config import noise_config, register_noise
from moe_rl.laboratory.long_responses import InRounds
from moe_rl.laboratory.noise_protocol import measure_noise, noise_phases
from moe_rl.laboratory.rows import COLUMNS
from moe_rl.store import Run, RunStore, environment
from moe_rl.training.border import check_one_batch, check_together, require_gradable
from moe_rl.training.progress import phases_bar

register_noise()


@hydra.main(version_base="1.3", config_path=CONF, config_name="measure_noise")
def main(cfg: DictConfig) -> None:
    path = attempt(cfg, run)
    if path is None:
        return
    summary = Run(path).summary
    print(
        f"{os.path.relpath(path)}: done, variance of the sequence log-ratio at {summary['longest']} tokens "
        f"{summary['inflation_longest']:.3g} times that of independent tokens; tables/ has the rest"
    )


def run(cfg: DictConfig, path: Path) -> None:
    """One measurement from config to DONE; what goes wrong after the config check leaves FAILED."""
    config = noise_config(cfg)
    task = InRounds(build_task(cfg), config.noise.rounds)
    objective = build_objective(cfg)
    check_together(objective, config)
    check_one_batch(config)
    require_gradable(task, config.rollout.grading_timeout)
    set_up_process(config)
    bar = terminal_line()
    found = environment() | {"command": command("experiments.measure_noise")}
    with RunStore.open(path, run_config(cfg), found) as store:
        lm, warm = starting_model(config, cfg, path, task, objective, bar)
        with phases_bar(f"noise seed {config.seed}", noise_phases(config.noise), bar) as done:
            measured = measure_noise(lm, task, objective, config, config.noise, done)
        write_tables(path, measured.tables, COLUMNS)
        store.finish(measured.summary | warm)


if __name__ == "__main__":
    with interruptible():
        main()
