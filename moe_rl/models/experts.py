"""Which code runs the experts of a transformers model: its eager loop, a grouped kernel, or MegaBlocks."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from moe_rl.models.config import ModelError


def stacked_experts(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` whose forward transformers dispatches by its experts implementation."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def set_experts(model: PreTrainedModel, name: str) -> None:
    """Run the experts of `model` by `name`: eager, grouped_mm, batched_mm or megablocks.

    Unlike transformers' own setter, which then does nothing, raises `ModelError` for a model whose experts
    cannot be dispatched; also for experts that MegaBlocks cannot run. Raises `ModuleNotFoundError`, with the
    install line, where MegaBlocks is not installed.
    """
    modules = stacked_experts(model)
    if not modules:
        raise ModelError(
            f"model.experts={name}: {type(model).__name__} has no experts that can be run by another "
            "implementation than its own; leave model.experts=null"
        )
    if name == "megablocks":
        from moe_rl.models.megablocks import register_experts, require_supported

        for experts in modules:
            require_supported(experts)
        register_experts()
    model.set_experts_implementation(name)
    configs: list[Any] = [experts.config for experts in modules]
    if any(config._experts_implementation != name for config in configs):
        raise ModelError(f"model.experts={name}: transformers does not set it on {type(model).__name__}")
