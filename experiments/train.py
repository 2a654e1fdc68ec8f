"""Train one arm, or sweep several with `-m`:

    python -m experiments.train objective=gspo seed=0
    python -m experiments.train -m experiment=demo

A run directory that is done is left alone; an unfinished or failed one continues from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import metadata
from pathlib import Path

import hydra
import torch
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from experiments.config import Config, build_objective, build_task, register, run_config, train_config
from moe_rl.analysis.collapse import detect_collapse
from moe_rl.models import LanguageModel, load_model
from moe_rl.routing.routers import find_routers, has_routers
from moe_rl.store import Run, RunStore, StoreError, environment
from moe_rl.tasks import Task
from moe_rl.training.border import (
    check_together,
    content_digest,
    require_encodable,
    require_same_content,
)
from moe_rl.training.cold_start import ColdStartError, cold_start
from moe_rl.training.loop import train

# What the user can mend: one line, no traceback on the screen (FAILED has it where the run had begun).
USER_ERRORS = (ValueError, ColdStartError, StoreError, OSError, ModuleNotFoundError, OmegaConfBaseException)
CONF = str(Path(__file__).resolve().parents[1] / "conf")
register()


@hydra.main(version_base="1.3", config_path=CONF, config_name="config")
def main(cfg: DictConfig) -> None:
    path = Path(HydraConfig.get().runtime.output_dir)
    shown = os.path.relpath(path)
    if (path / "DONE").exists():
        print(f"{shown}: done already")
        return
    try:
        run(cfg, path)
    except KeyboardInterrupt:
        print(f"\n{shown}: stopped; the same command continues it", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        print(f"{shown}: failed: {' '.join(str(error).split())}", file=sys.stderr)
        if not (path / "config.yaml").exists():
            remove_empty(path)  # refused before it began
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise  # Hydra runs the other jobs, then exits with 1
        if isinstance(error, USER_ERRORS):
            sys.exit(1)  # the line above says it all
        raise
    evals = Run(path).evals()
    first, last = evals.iloc[0], evals.iloc[-1]
    print(
        f"{shown}: done, held-out greedy accuracy {first['eval/greedy']:.3f} -> {last['eval/greedy']:.3f} "
        f"at step {last['step']:.0f}; metrics, checkpoints and the final model are there"
    )


def remove_empty(path: Path) -> None:
    """Take away the directory that Hydra made for a run, and its parent, where nothing is in them."""
    with contextlib.suppress(OSError):
        path.rmdir()
        path.parent.rmdir()


def run(cfg: DictConfig, path: Path) -> None:
    """One run from config to DONE; what goes wrong after the config check leaves FAILED."""
    config = train_config(cfg)
    task, objective = build_task(cfg), build_objective(cfg)
    check_together(objective, config)
    torch.set_num_threads(config.threads)
    transformers.logging.set_verbosity_error()  # its advice is for callers of generate(); ours is fixed
    transformers.logging.disable_progress_bar()
    bar = terminal_line()
    with RunStore.open(path, run_config(cfg), environment() | {"command": command()}) as store:
        lm = load_model(config.model, task.default_tokenizer, config.device)
        require_encodable(lm, task)
        content = content_digest(lm, task)
        require_same_content(path, content)
        warm = start(lm, task, config, cfg, content, bar)
        title = f"{config.arm} seed {config.seed}"
        train(lm, task, objective, config, store, title=title, bar=bar)
        lm.save(path / "final")
        store.finish(summary(path, lm, config) | warm)


def command() -> list[str]:
    """What starts this run alone: a sweep's worker process was started by its launcher."""
    return ["python", "-m", "experiments.train", *HydraConfig.get().overrides.task]


def terminal_line() -> int:
    """The line of this run's progress bar: runs of a parallel sweep share one terminal."""
    hydra_config = HydraConfig.get()
    jobs = hydra_config.launcher.get("n_jobs", 1)
    if hydra_config.mode != RunMode.MULTIRUN or jobs == 1:
        return 0
    return hydra_config.job.num % (jobs if jobs > 0 else os.cpu_count() or 1)


def versions() -> dict[str, str]:
    """The libraries that decide what the same weights and tokens give."""
    return {name: metadata.version(name) for name in ("torch", "transformers")}


def start(
    lm: LanguageModel, task: Task, config: Config, cfg: DictConfig, content: str, bar: int
) -> dict[str, object]:
    """The cold start, shared by every run with the same model, task and warm-up options."""
    if not config.cold_start.enabled:
        return {}
    whole = run_config(cfg)
    temperature, max_new_tokens = config.rollout.temperature, config.rollout.max_new_tokens
    identity = {key: whole[key] for key in ("model", "task", "cold_start", "device", "threads")}
    identity |= {"rollout": [temperature, max_new_tokens], "content": content, "versions": versions()}
    warm = cold_start(
        lm,
        task,
        config.cold_start,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        identity=identity,
        cache=Path(config.output) / "cold_starts",
        bar=bar,
    )
    return {"cold_start_steps": warm.steps, "cold_start_accuracy": warm.accuracy}


def summary(path: Path, lm: LanguageModel, config: Config) -> dict[str, object]:
    """What DONE says: how far the run came, whether it collapsed, and its layers."""
    steps = Run(path).steps()
    rule = config.collapse
    collapse = detect_collapse(
        steps["reward/mean"], steps["loss"], steps["grad_norm"],
        window=rule.window, fraction=rule.fraction, patience=rule.patience,
    )  # fmt: skip
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
    try:
        main()
    except KeyboardInterrupt:  # a sweep's launcher, whose runs have said their own
        print("stopped; the same command continues it", file=sys.stderr)
        sys.exit(130)
