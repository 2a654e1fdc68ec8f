"""What the benchmarks of training share: the demo's model, task and cold start, and its loop step by step."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments.config import Config, build_objective, build_task, register, train_config
from moe_rl.models import LanguageModel, load_model
from moe_rl.objectives import Objective
from moe_rl.store import RunStore
from moe_rl.tasks import Problem, Task
from moe_rl.training.cold_start import cold_start
from moe_rl.training.loop import train

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "outputs" / "benchmarks"  # cold starts, shared by the benchmarks of one checkout
NEVER = 1_000_000_000  # steps; between evaluations and checkpoints, which are no part of a step
# Small enough that both sides of a comparison keep sampling from the same policy, however long it runs.
LEARNING_RATE = 1e-6


class Watched:
    """A task that keeps the reward and the length, in tokens of text, of every response it grades."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._seen: list[tuple[float, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def reward(self, problem: Problem, response_text: str) -> float:
        reward = self._task.reward(problem, response_text)
        self._seen.append((reward, len(response_text)))  # a character is a token in the digit tasks
        return reward

    def take(self) -> list[tuple[float, int]]:
        """(reward, length) since the last call."""
        seen, self._seen = self._seen, []
        return seen


class CoinFlips:
    """The sorting task with rewards that a random policy earns too: there is something to learn from."""

    def __init__(self, task: Any) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def reward(self, problem: Problem, response_text: str) -> float:
        return float(zlib.crc32(response_text.encode()) % 2)


@dataclass(frozen=True)
class Scene:
    """A model of its own, the task and the options of a run."""

    lm: LanguageModel
    task: Task
    objective: Objective
    config: Config


def make_scene(*overrides: str, cold: bool = True) -> Scene:
    """The demo's scene with `overrides` of its config; `cold` brings the model to the demo's cold start."""
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose(
            "config",
            overrides=[
                "experiment=demo", f"optim.lr={LEARNING_RATE}", "optim.warmup_updates=0", f"steps={NEVER}",
                f"evaluation.every={NEVER}", "evaluation.prompts=1", f"checkpoint_every={NEVER}",
                "rollout.grading_timeout=null",  # loops run in threads here, its limit in the main one only
                *overrides,
            ],
        )  # fmt: skip
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    config, task = train_config(cfg), build_task(cfg)
    lm = load_model(config.model, task.default_tokenizer)
    if cold:
        plain: Any = OmegaConf.to_container(cfg, resolve=False)
        identity = {key: plain[key] for key in ("model", "task", "cold_start")}
        identity |= {"versions": [metadata.version(name) for name in ("torch", "transformers")]}
        temperature, limit = config.rollout.temperature, config.rollout.max_new_tokens
        identity |= {"rollout": [temperature, limit]}
        cold_start(
            lm, task, config.cold_start, temperature=temperature, max_new_tokens=limit, identity=identity,
            cache=CACHE / "cold_starts",
        )  # fmt: skip
    return Scene(lm, task, build_objective(cfg), config)


class Enough(Exception):
    """Ends a loop from its `after_step`."""


class HookedStore(RunStore):
    """A run directory that calls `after_step` with every step's record once it is written."""

    after_step: Callable[[dict[str, Any]], None]

    def log(self, stream: Any, record: dict[str, Any]) -> None:
        super().log(stream, record)
        if stream == "steps":
            self.after_step(record)


def run_loop(scene: Scene, directory: Path, after_step: Callable[[dict[str, Any]], None]) -> None:
    """moe_rl's own `train`, its run directory included; `after_step` gets every step's record.

    It returns when `after_step` raises `Enough`.
    """
    with suppress(Enough), HookedStore.open(directory, {"benchmark": directory.name}) as store:
        store.after_step = after_step
        train(scene.lm, scene.task, scene.objective, scene.config, store)
