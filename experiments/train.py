"""Train one arm, or sweep several with `-m`:

    python -m experiments.train objective=gspo seed=0
    python -m experiments.train -m experiment=demo

A run directory that is done, or that ended as collapsed, is left alone; an unfinished or failed one continues
from its last checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path

import hydra
from omegaconf import DictConfig

from experiments.config import build_objective, build_task, build_tracker, run_config, train_config
from experiments.engines import engine_of, first_process
from experiments.launch import (
    CONF,
    attempt,
    command,
    interruptible,
    set_up_process,
    starting_model,
    terminal_line,
)
from experiments.sweep import lists_failures
from moe_rl.analysis.comparison import collapse_of
from moe_rl.models import LanguageModel
from moe_rl.routing.routers import find_routers, has_routers
from moe_rl.store import Run, environment
from moe_rl.tracking import Tracking
from moe_rl.training.border import check_together, check_turns, require_gradable


@lists_failures
@hydra.main(version_base="1.3", config_path=CONF, config_name="config")
def main(cfg: DictConfig) -> None:
    path = attempt(cfg, run)
    if path is None or not first_process():
        return
    evals = Run(path).evals()
    first, last = evals.iloc[0], evals.iloc[-1]
    print(
        f"{os.path.relpath(path)}: done, held-out greedy accuracy {first['eval/greedy']:.3f} -> "
        f"{last['eval/greedy']:.3f} at step {last['step']:.0f}; "
        "metrics, checkpoints and the final model are there"
    )


def run(cfg: DictConfig, path: Path) -> None:
    """One run from config to DONE; what goes wrong after the config check leaves FAILED."""
    config = train_config(cfg)
    task, objective, tracker = build_task(cfg), build_objective(cfg), build_tracker(cfg)
    engine = engine_of(config)
    check_together(objective, config)
    check_turns(task, config)
    engine.check(config, objective, task)
    require_gradable(task, config.rollout.grading_timeout)
    set_up_process(config)
    bar = terminal_line()
    with engine.open_store(
        path, run_config(cfg), environment() | {"command": command("experiments.train")}
    ) as store:
        if tracker is not None and first_process():
            store.follow(Tracking(store, tracker, cfg.tracking.name))
        lm, warm = starting_model(config, cfg, path, task, objective, bar)
        title = f"{config.arm} seed {config.seed}"
        engine.train(lm, task, objective, config, store, title=title, bar=bar)
        engine.save_final(lm, path / "final")
        store.finish(summary(path, lm) | warm)


def summary(path: Path, lm: LanguageModel) -> dict[str, object]:
    """What DONE says: how far the run came, whether it collapsed, and its layers."""
    done = Run(path)
    steps = done.steps()
    collapse = collapse_of(done, steps)
    layers = [router.layer_id for router in find_routers(lm.model)] if has_routers(lm.model) else []
    return {
        "steps": len(steps),
        "collapse_step": collapse.step,
        "collapse_reason": collapse.reason,
        "censored_at": collapse.censored_at,
        "layer_ids": layers,
        "final_model": "final",
    }


if __name__ == "__main__":
    with interruptible():
        main()
