"""engine=trl: the same run, with TRL's GRPOTrainer making the updates, in one process or under accelerate.

What differs from the loop is in docs/trl.md: mini-batches are drawn from the shuffled rollout batch rather
than whole groups, responses come from TRL's own generation, the entropy is the current policy's, and updates
that are not finite end the run without a file of their batch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from torch import Tensor, nn
from transformers import TrainerCallback

from experiments.config import Config
from experiments.trl_checkpoint import Follower, process, restore_moments, save_model
from experiments.trl_options import grpo_settings, require_honoured, require_no_noise
from experiments.trl_trainer import Scene, StoredTrainer
from moe_rl.integrations.cpu import fsdp_on_cpu
from moe_rl.integrations.trl import GRPOConfig
from moe_rl.models import LanguageModel
from moe_rl.objectives import Objective
from moe_rl.routing import (
    find_routers,
    has_routers,
)
from moe_rl.routing.routers import router_parameters
from moe_rl.store import RunStore, whole_directory
from moe_rl.tasks import Task
from moe_rl.training.checkpoint import restore_model
from moe_rl.training.grading import GuardedTask, grade
from moe_rl.training.groups import PROMPTS_PER_SEED, first_prompt, overlong_penalty


class Moments(TrainerCallback):
    """Puts saved moments back once the optimiser is there."""

    def __init__(self, trained: nn.Module, tensors: dict[str, Tensor]) -> None:
        self.trained, self.tensors = trained, tensors

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        optimizer = given["optimizer"]
        restore_moments(self.trained, getattr(optimizer, "optimizer", optimizer), self.tensors)
        self.tensors = {}


def check(config: Config, objective: Objective, task: Task) -> None:
    """Raise `ValueError` for what TRL cannot honour."""
    _, processes = process()
    require_honoured(config, objective, task, processes)
    require_whole_parameters()
    if config.engine.vllm and find_spec("vllm") is None:
        raise ValueError("engine.vllm=true needs vLLM, which is not installed here: pip install 'trl[vllm]'")
    if processes > 1 and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ValueError("-m sweeps runs of one process each: accelerate launch takes one run at a time")


def require_whole_parameters() -> None:
    """Raise `ValueError` where accelerate shards weights in a way that checkpoints here cannot gather.

    DeepSpeed's ZeRO and the first FSDP leave parameters empty or flattened, and would be saved as that.
    """
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    first_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true" and os.environ.get("FSDP_VERSION") != "2"
    if deepspeed or first_fsdp:
        given = "DeepSpeed" if deepspeed else "FSDP of version 1"
        raise ValueError(
            f"engine=trl under {given}: run directories hold whole tensors, which can be gathered from one "
            "process, DDP or FSDP2 (conf/accelerate/fsdp2.yaml) alone; with DeepSpeed use "
            "RoutingReplayGRPOTrainer in a script of your own, whose checkpoints are TRL's"
        )


def open_store(path: Path, config: dict[str, Any], environment: dict[str, Any]) -> RunStore:
    """The run directory, which the first process writes and the others read."""
    return RunStore.open(path, config, environment) if process()[0] == 0 else Follower(path)


def train(
    lm: LanguageModel,
    task: Task,
    objective: Objective,
    config: Config,
    store: RunStore,
    *,
    title: str = "train",
    bar: int = 0,
) -> None:
    """As the loop's `train`, by TRL: from the run directory's last checkpoint on."""
    scene = Scene(lm, GuardedTask(task, config.rollout.grading_timeout), objective, config, store, title, bar)
    with fsdp_on_cpu() if config.device == "cpu" else contextlib.nullcontext():
        train_scene(scene)


def train_scene(scene: Scene) -> None:
    """`train` with what it needs."""
    config, lm, store = scene.config, scene.lm, scene.store
    require_no_noise(lm.model.config)
    first, processes = process()[0] == 0, process()[1]
    if config.optim.freeze_routers:
        for router in find_routers(lm.model):
            for parameter in router_parameters(router):
                parameter.requires_grad_(False)
    checkpoint = store.latest_checkpoint()
    scene.done = 0 if checkpoint is None else checkpoint.step
    if first:
        store.rewind(-1 if checkpoint is None else scene.done)
    if scene.done == config.steps:
        assert checkpoint is not None
        restore_model(scene.trained, checkpoint.model())
        return
    output = str(store.path / "trl")
    args = GRPOConfig(**grpo_settings(config, scene.objective, output, scene.done, processes))
    name_starting_point(scene, args)
    callbacks: list[TrainerCallback] = []
    if checkpoint is None:
        scene.evaluate(0)
    else:
        restore_model(scene.trained, checkpoint.model())
        callbacks.append(Moments(scene.trained, checkpoint.optimizer()))
        store.event("resumed", step=scene.done)
    if config.device.startswith("cuda"):
        # TRL starts vLLM before weights are sharded: it finds an empty GPU, and accelerate places the shards.
        lm.model.to("cpu")  # type: ignore[arg-type]  # transformers' wrapper hides nn.Module.to
        torch.cuda.empty_cache()
    StoredTrainer(
        scene,
        model=lm.model,
        args=args,
        reward_funcs=reward_functions(scene),
        train_dataset=prompts(scene),
        processing_class=lm.tokenizer,
        callbacks=callbacks,
        replay=config.replay.source,
        advantages=config.advantages,
        drift=config.drift_every > 0 and has_routers(lm.model),
    ).train()


def name_starting_point(scene: Scene, args: Any) -> None:
    """Save the model where TRL reads it again by its name: as the reference policy, and for vLLM.

    A checkpoint is there already; vLLM gets the weights of a cold start before it first samples.
    """
    config = scene.config
    built = config.model.source != "checkpoint"
    if not ((args.beta and (built or config.cold_start.enabled)) or (args.use_vllm and built)):
        return
    folder = scene.store.path / "start"
    with args.main_process_first(local=False, desc="saving the starting model"):
        if not folder.exists():
            with whole_directory(folder) as filling:
                scene.lm.save(filling)
    scene.lm.model.config._name_or_path = scene.lm.model.name_or_path = str(folder)


def prompts(scene: Scene) -> Any:
    """The data set of the steps to come, in the loop's order; `item` is the problem's index."""
    from datasets import Dataset  # comes with TRL

    config = scene.config
    items = [
        config.seed * PROMPTS_PER_SEED + first_prompt(config.rollout, step) + i
        for step in range(scene.done + 1, config.steps + 1)
        for i in range(config.rollout.prompts)
    ]
    return Dataset.from_dict({"prompt": [scene.task.train(item).prompt for item in items], "item": items})


def reward_functions(scene: Scene) -> list[Callable[..., list[float]]]:
    """The task's reward, and the soft overlong punishment where it is on; TRL adds them."""
    rollout = scene.config.rollout

    def graded(completion_ids: list[list[int]], item: list[int], **_: Any) -> list[float]:
        problems = [scene.task.train(index) for index in item]
        return [
            grade(scene.lm, scene.task, problem, ids)
            for problem, ids in zip(problems, completion_ids, strict=True)
        ]

    def overlong(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths_B = torch.tensor([len(ids) for ids in completion_ids])
        return overlong_penalty(lengths_B, rollout.max_new_tokens, rollout.overlong_cache or 0).tolist()

    return [graded] if rollout.overlong_cache is None else [graded, overlong]


def save_final(lm: LanguageModel, path: Path) -> None:
    """The final model, gathered from all processes."""
    save_model(lm, path, first=process()[0] == 0)
