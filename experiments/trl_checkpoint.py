"""Checkpoints of a trainer that may be sharded, in the loop's own format: whole tensors by parameter name.

A run continues from them on any number of processes. Every process takes part in gathering; the first writes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moe_rl.models import LanguageModel
from moe_rl.store import RunStore, whole_directory
from moe_rl.training.checkpoint import model_tensors, optimizer_tensors


def process() -> tuple[int, int]:
    """(rank, processes) that `accelerate launch` or torchrun says, (0, 1) without them."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Follower(RunStore):
    """The run directory as the other processes see it: they read what the first writes."""

    def __init__(self, path: Any) -> None:
        super().__init__(path, FileLock(path / "follower.lock"))  # never taken

    def log(self, stream: Any, record: dict[str, Any]) -> None:
        """Nothing: the first process has the same record."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Nothing, as well."""

    def fail(self, error_text: str) -> None:
        """Nothing: the first process fails too, or its launcher ends it."""


def gathered(tensors: Mapping[str, Tensor], first: bool) -> dict[str, Tensor]:
    """Whole tensors on the CPU, kept by the first process alone; all must call."""
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if first:
            kept[name] = whole.cpu()
    return kept


def save_checkpoint(
    store: RunStore, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, first: bool
) -> None:
    """As the loop saves: `model` holds the policy under the name that it has there."""
    weights = gathered(model_tensors(model), first)
    moments = gathered(optimizer_tensors(model, optimizer), first)
    if first:
        store.save_checkpoint(step, weights, moments, {"step": step})


@torch.no_grad()
def restore_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Put saved moments back, to every process its shards."""
    parameters = dict(model.named_parameters())
    for full_name, value in tensors.items():
        name, key = full_name.split("|")
        parameter = parameters[name]
        value = value.to(parameter.device)
        if isinstance(parameter, DTensor) and value.shape == parameter.shape:
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        optimizer.state[parameter][key] = value


def save_model(lm: LanguageModel, path: Any, first: bool) -> None:
    """A directory that `model=checkpoint` reads."""
    state = gathered(lm.model.state_dict(), first)
    if first:
        with whole_directory(path) as folder:
            lm.model.save_pretrained(folder, state_dict=state)
            lm.tokenizer.save_pretrained(folder)
