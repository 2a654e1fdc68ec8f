"""The state of a run as flat tensor dictionaries: weights and AdamW moments by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moe_rl.models import LanguageModel
from moe_rl.store import RunStore, whole_directory
from moe_rl.training.ahead import PREFIX, ahead_tensors, restore_ahead
from moe_rl.training.sampler import Sampled

if TYPE_CHECKING:  # the border, which a learner passes, reads this module
    from moe_rl.training.learner import Learner


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once) and persistent buffers, by name."""
    kept = model.state_dict().keys()
    named = chain(model.named_parameters(), model.named_buffers())
    return {name: tensor.detach() for name, tensor in named if name in kept}


@torch.no_grad()
def restore_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into the model; `ValueError` where names or shapes differ."""
    own = model_tensors(model)
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())
        raise ValueError(f"checkpoint is of another model: {len(odd)} tensors differ, first {odd[0]!r}")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise ValueError(
                f"checkpoint is of another model: {name} has shape {tuple(tensors[name].shape)}, "
                f"expected {tuple(tensor.shape)}"
            )
        tensor.copy_(tensors[name])


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's per-parameter state as `<parameter name>|<key>`."""
    return {
        f"{name}|{key}": value.detach()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Put `optimizer_tensors` back."""
    parameters = dict(model.named_parameters())
    for full_name, value in tensors.items():
        name, key = full_name.split("|")
        parameter = parameters[name]
        optimizer.state[parameter][key] = value.to(parameter.device)


def save(
    learner: Learner, lm: LanguageModel, store: RunStore, step: int, ahead: Sampled | None = None
) -> None:
    """What is due at the end of `step`: a checkpoint to resume from, a snapshot that stays.

    `ahead` is what was sampled for the next step already.
    """
    config = learner.config
    if config.checkpoint_due(step):
        moments = optimizer_tensors(learner.trained, learner.optimizer)
        state = moments | ahead_tensors(ahead)
        store.save_checkpoint(step, model_tensors(learner.trained), state, {"step": step})
    if config.snapshot_due(step):
        with whole_directory(store.path / "snapshots" / f"step_{step}") as folder:
            lm.save(folder)


def resume(
    model: nn.Module, optimizer: torch.optim.Optimizer, store: RunStore, device: torch.device
) -> tuple[int, Sampled | None]:
    """Put the last good checkpoint back and drop what was logged after it.

    Returns the steps done, 0 if none, and what was sampled ahead for the next.
    """
    checkpoint = store.latest_checkpoint()
    if checkpoint is None:
        store.rewind(-1)
        return 0, None
    restore_model(model, checkpoint.model())
    state = checkpoint.optimizer()
    moments = {name: tensor for name, tensor in state.items() if not name.startswith(PREFIX)}
    restore_optimizer(model, optimizer, moments)
    store.rewind(checkpoint.step)
    store.event("resumed", step=checkpoint.step)
    return checkpoint.step, restore_ahead(state, device)
