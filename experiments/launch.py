"""What the commands that write run directories share: one job from its config to DONE, and its errors."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from experiments.config import Config, register, run_config
from experiments.sweep import note_of
from moe_rl.models import LanguageModel, load_model
from moe_rl.objectives import Objective
from moe_rl.store import StoreError
from moe_rl.store.files import write_atomic, writing
from moe_rl.tasks import Task
from moe_rl.training.border import (
    check_model,
    content_digest,
    require_encodable,
    require_finite_weights,
    require_room,
    require_same_content,
    weights_digest,
)
from moe_rl.training.cold_start import ColdStartError, cold_start
from moe_rl.training.grading import GuardedTask
from moe_rl.training.nonfinite import CollapseError, NonFinitePolicyError

# What the user can mend: one line, no traceback on the screen (FAILED has it where the run had begun).
USER_ERRORS = (
    ValueError,
    ColdStartError,
    CollapseError,
    NonFinitePolicyError,
    StoreError,
    OSError,
    ModuleNotFoundError,
    OmegaConfBaseException,
)
CONF = str(Path(__file__).resolve().parents[1] / "conf")
register()


class WritableOutput(Callback):
    """Refuses an output folder that cannot be written: Hydra would fail in it with a traceback."""

    def on_run_start(self, config: DictConfig, **_: object) -> None:
        output = Path(config.output)
        try:
            with writing(output):
                output.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=output).close()
        except StoreError as error:
            print(f"failed: {error}", file=sys.stderr)
            sys.exit(1)

    on_multirun_start = on_run_start


def attempt(cfg: DictConfig, run: Callable[[DictConfig, Path], None]) -> Path | None:
    """Run one job in the directory Hydra gave it: that directory, or None where it was done already.

    An error is one line on stderr. It ends the process; in a sweep, where it must not stop the other runs, it
    is noted for the end (`experiments.sweep`) and None returned.
    """
    hydra_config = HydraConfig.get()
    path = Path(hydra_config.runtime.output_dir)
    shown = os.path.relpath(path)
    sweeping = hydra_config.mode == RunMode.MULTIRUN
    note = note_of(Path(hydra_config.sweep.dir), path) if sweeping else None
    if note is not None:
        note.unlink(missing_ok=True)
    if (path / "DONE").exists():
        print(f"{shown}: done already")
        return None
    try:
        refuse_collapsed(path)
        run(cfg, path)
    except KeyboardInterrupt:
        print(f"\n{shown}: stopped; the same command continues it", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"{shown}: failed: {reason}", file=sys.stderr)
        if not (path / "config.yaml").exists():
            remove_empty(path)  # refused before it began
        if note is not None:
            if not isinstance(error, USER_ERRORS):
                traceback.print_exc()
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(reason, encoding="utf-8")
            return None
        if isinstance(error, USER_ERRORS):
            sys.exit(1)  # the line above says it all
        raise
    return path


def refuse_collapsed(path: Path) -> None:
    """Raise `CollapseError` for a run that ended as collapsed: the same command would only repeat it."""
    failed = path / "FAILED"
    first = failed.read_text(encoding="utf-8").partition("\n")[0] if failed.exists() else ""
    if first.startswith("collapsed:"):
        raise CollapseError(f"{first} (in an earlier try; remove {failed} to repeat it from its checkpoint)")


def remove_empty(path: Path) -> None:
    """Take away the directory that Hydra made for a run, and its parent, where nothing is in them."""
    with contextlib.suppress(OSError):
        path.rmdir()
        path.parent.rmdir()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Around a command's `main`: a sweep's launcher that is interrupted, whose runs have said their own."""
    try:
        yield
    except KeyboardInterrupt:
        print("stopped; the same command continues it", file=sys.stderr)
        sys.exit(130)


def command(module: str) -> list[str]:
    """What starts this run alone: a sweep's worker process was started by its launcher."""
    return ["python", "-m", module, *HydraConfig.get().overrides.task]


def terminal_line() -> int:
    """The line of this run's progress bar: runs of a parallel sweep share one terminal."""
    hydra_config = HydraConfig.get()
    jobs = hydra_config.launcher.get("n_jobs", 1)
    if hydra_config.mode != RunMode.MULTIRUN or jobs == 1:
        return 0
    return hydra_config.job.num % (jobs if jobs > 0 else os.cpu_count() or 1)


def write_tables(path: Path, tables: Mapping[str, Sequence[dict[str, Any]]], columns: Sequence[str]) -> None:
    """Write the rows of each table to <run directory>/tables/<name>.csv."""
    (path / "tables").mkdir(exist_ok=True)
    for name, rows in tables.items():
        text = pd.DataFrame(rows, columns=list(columns)).to_csv(index=False)
        write_atomic(path / "tables" / f"{name}.csv", text)


def versions() -> dict[str, str]:
    """The libraries that decide what the same weights and tokens give."""
    return {name: metadata.version(name) for name in ("torch", "transformers")}


def set_up_process(config: Config) -> None:
    """Threads, and transformers' advice off: it is for callers of generate(), and ours is fixed."""
    torch.set_num_threads(config.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def starting_model(
    config: Config, cfg: DictConfig, path: Path, task: Task, objective: Objective, bar: int
) -> tuple[LanguageModel, dict[str, object]]:
    """The model, checked against task and objective, at its cold start; and what DONE says of that: the
    digest of its weights, since another CPU comes to another cold start, whose runs are not to be paired.

    A run directory that began with other weights, tokenizer or problems is refused.
    """
    lm = load_model(config.model, task.default_tokenizer, config.device)
    check_model(lm.model, objective, config)
    require_finite_weights(lm.model)
    require_encodable(lm, task)
    require_room(lm, task, config)
    content = content_digest(lm, task)
    require_same_content(path, content)
    warm = start(lm, task, config, cfg, content, bar)
    return lm, warm | {"starting_weights": weights_digest(lm.model)}


def start(
    lm: LanguageModel, task: Task, config: Config, cfg: DictConfig, content: str, bar: int
) -> dict[str, object]:
    """The cold start, shared by every run with the same model, task and warm-up options."""
    if not config.cold_start.enabled:
        return {}
    whole = run_config(cfg)
    temperature, max_new_tokens = config.rollout.temperature, config.rollout.max_new_tokens
    identity = {key: whole[key] for key in ("task", "device", "threads")}
    identity |= {"model": asdict(config.model), "cold_start": asdict(config.cold_start)}  # seeds as numbers
    identity |= {"rollout": [temperature, max_new_tokens], "content": content, "versions": versions()}
    guarded = GuardedTask(task, config.rollout.grading_timeout)
    warm = cold_start(
        lm,
        guarded,
        config.cold_start,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        identity=identity,
        cache=Path(config.output) / "cold_starts",
        bar=bar,
    )
    failed, first = guarded.take_errors()
    if failed:
        print(
            f"cold start: the grader failed on {failed} responses, reward 0: {first[0]['error']}",
            file=sys.stderr,
        )
    return {"cold_start_steps": warm.steps, "cold_start_accuracy": warm.accuracy}
