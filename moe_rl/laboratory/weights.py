"""Points on the line from the old weights to the new ones, and how long that line is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Weights = Mapping[str, Tensor]  # the entries of a state_dict


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer of `model`, by its name in the state_dict."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def along(old: Weights, new: Weights, step: float) -> dict[str, Tensor]:
    """old + step (new - old) for floating-point entries, those of `new` for the others."""
    return {
        name: torch.lerp(old[name], tensor, step) if tensor.is_floating_point() else tensor
        for name, tensor in new.items()
    }


def relative_update(old: Weights, model: nn.Module) -> float:
    """‖Δθ‖ / ‖θ_old‖ over the parameters of `model`, tied ones counted once."""
    moved = total = 0.0
    for name, parameter in model.named_parameters():
        before = old[name].double()
        moved += float((parameter.detach().double() - before).square().sum())
        total += float(before.square().sum())
    return (moved / total) ** 0.5


@contextmanager
def at_weights(model: nn.Module, weights: Weights) -> Iterator[None]:
    """`model` with other weights; leaving puts its own back, bit for bit."""
    own = snapshot(model)
    try:
        model.load_state_dict(weights)
        yield
    finally:
        model.load_state_dict(own)
