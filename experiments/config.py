"""The typed schema behind `conf/`: a typo or a wrong type is one line, before anything runs."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from experiments.engine_config import EngineConfig
from moe_rl.models import ModelConfig
from moe_rl.objectives import OBJECTIVES, Objective, get_objective
from moe_rl.tasks import TASKS, Task, get_task
from moe_rl.tracking import TRACKERS, Tracker, get_tracker
from moe_rl.training.config import TrainConfig


@dataclass
class HardwareConfig:
    """The machines a dry run plans for; a run does not read it. GB are 1e9 bytes; null: what is here."""

    gpus: int = 1  # over which FSDP2 shards weights, gradients and moments
    gpu_memory_gb: float | None = None  # of one GPU; on a CPU, of the machine
    host_memory_gb: float | None = None  # of all nodes
    disk_gb: float | None = None  # free where `output` is

    def check(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"hardware.{name}={value}: must be above 0")


@dataclass
class Config(TrainConfig):
    """A whole run."""

    experiment: str = "single"  # first part of the run directory
    arm: str = "${arm:${objective.name},${replay.source}}"  # what the report compares
    advantages: str = "${advantages:${objective.name}}"  # the objective's own convention
    model: ModelConfig = field(default_factory=ModelConfig)
    task: Any = MISSING
    objective: Any = MISSING
    engine: EngineConfig = field(default_factory=EngineConfig)
    device: str = "cpu"
    threads: int = 1  # torch threads of this process; parallelism belongs to the sweep
    output: str = "outputs"  # where run directories go
    dry_run: bool = False  # check everything short of loading weights, write nothing
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    tracking: Any = None  # what shows the run beside its directory


def arm_name(objective: str, replay_source: str | None) -> str:
    """grpo, grpo+replay (of the old policy), grpo+rollout_replay, gspo, …"""
    return objective + {None: "", "old_policy": "+replay", "rollout": "+rollout_replay"}[replay_source]


def advantages_of(objective: str) -> str:
    """The convention of `group_advantages` that an objective's paper uses."""
    return "mean" if objective in ("dr_grpo", "minirl") else "paper"


EXECUTION_ONLY = ("hydra", "output", "checkpoint_every", "snapshot_every", "tracking", "dry_run", "hardware")


def run_config(cfg: DictConfig) -> dict[str, Any]:
    """The resolved config without what does not change a result."""
    plain: dict[str, Any] = OmegaConf.to_container(  # type: ignore[assignment]
        OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in EXECUTION_ONLY]), resolve=True
    )
    return plain


def run_id(_root_: DictConfig) -> str:
    """Eight hex digits of everything that names a run but its seed, so that seeds share a directory."""
    plain = run_config(_root_)
    del plain["seed"]
    return digest(plain)


def digest(plain: dict[str, Any]) -> str:
    """Eight hex digits of a resolved config."""
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=4).hexdigest()


def build_task(cfg: DictConfig) -> Task:
    options: dict[str, Any] = OmegaConf.to_container(cfg.task, resolve=True)  # type: ignore[assignment]
    try:
        return get_task(options.pop("name"), **options)
    except FileNotFoundError as error:
        raise ValueError(f"task.path: no such file: {error.filename or error}") from error
    except ValueError as error:
        raise ValueError(f"task: {error}") from error


def build_objective(cfg: DictConfig) -> Objective:
    options: dict[str, Any] = OmegaConf.to_container(cfg.objective, resolve=True)  # type: ignore[assignment]
    return get_objective(options.pop("name"), **options)


def build_tracker(cfg: DictConfig) -> Tracker | None:
    options: dict[str, Any] = OmegaConf.to_container(cfg.tracking, resolve=True)  # type: ignore[assignment]
    name = options.pop("name")
    return None if name is None else get_tracker(name, **options)


def train_config(cfg: DictConfig) -> Config:
    """The checked options as the dataclass that the loop takes."""
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, Config)
    for part in (config.model, config.cold_start):
        part.seed = config.seed if part.seed is None else part.seed
    if config.dry_run:  # which its callback takes away there
        raise ValueError("dry_run=true is an option of experiments.train")
    config.check()
    config.model.check()
    config.hardware.check()
    config.engine.check()
    require_finite(run_config(cfg))
    if config.threads < 1:
        raise ValueError(f"threads={config.threads}: must be at least 1")
    try:
        if (
            config.device == "cuda"
        ):  # a process of several makes its context on its own GPU, none on the first
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        torch.empty(1, device=config.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"device={config.device}: not usable here: {reason}") from error
    return config


def require_finite(value: Any, name: str = "") -> None:
    """Raise `ValueError` for an option that is NaN or infinite; a clip width or a bound may be infinite."""
    if isinstance(value, dict):
        for key, inner in value.items():
            require_finite(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            require_finite(inner, f"{name}[{index}]")
    elif isinstance(value, float):
        unbounded = name.startswith(("objective.", "mismatch.")) and not math.isnan(value)
        if not (math.isfinite(value) or unbounded):
            raise ValueError(f"{name}={value}: expected a finite number")


def _schema(name: str, cls: type) -> type:
    """The options of a task, objective or tracker class as a Hydra schema, its name in front."""
    hints = get_type_hints(cls)
    options: list[tuple[str, Any, Any]] = [("name", str, name)]
    for option in fields(cls):
        if not option.init:
            continue
        if option.default_factory is not NO_DEFAULT:
            default = field(default_factory=option.default_factory)
        else:
            default = field(default=MISSING if option.default is NO_DEFAULT else option.default)
        options.append((option.name, hints[option.name], default))
    return make_dataclass(f"{cls.__name__}Options", options)


def register() -> None:
    """Make the schemas and resolvers known to Hydra; safe to call twice."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for name, cls in TASKS.items():
        store.store(group="task", name=f"schema_{name}", node=_schema(name, cls))
    for name, objective in OBJECTIVES.items():
        store.store(group="objective", name=f"schema_{name}", node=_schema(name, objective))
    for name, tracker in TRACKERS.items():
        store.store(group="tracking", name=f"schema_{name}", node=_schema(name, tracker))
    OmegaConf.register_new_resolver("arm", arm_name, replace=True)
    OmegaConf.register_new_resolver("advantages", advantages_of, replace=True)
    OmegaConf.register_new_resolver("run_id", run_id, replace=True)
    OmegaConf.register_new_resolver("cores", lambda: os.cpu_count() or 1, replace=True)
