"""Finds the routers of a live model, and says which of them can learn."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from moe_rl.routing.trace import RoutingError

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
_PEFT_COPY = re.compile(r"^(.*)\.(?:original_module|modules_to_save\.([^.]+))(?:\.|$)")
_MTP = re.compile(r"(?:^|\.)(?:mtp|nextn)\w*\.", re.IGNORECASE)

# Routers that their family does not declare in `_can_record_outputs`.
_UNDECLARED = ("DeepseekV4HashRouter",)
# Families whose declared router returns logits only; the module above it selects.
_SELECTED_BY_PARENT = ("DbrxRouter",)
# The E columns a router selects over. More specific names come first: LongCat's `num_experts` leaves out its
# zero experts, Zaya's its skip expert.
_NUM_EXPERTS_NAMES = ("num_router_classes", "n_routed_experts", "num_experts")


@dataclass(frozen=True)
class Router:
    """A module that selects K of E experts for every token it is called with."""

    name: str
    module: nn.Module
    layer_id: int
    num_experts: int
    top_k: int


def find_routers(model: nn.Module) -> list[Router]:
    """The routers of `model` in execution order, through wrappers (DDP, FSDP, peft).

    Finds what the model's own transformers family declares as the source of its router logits. Multi-token
    prediction heads are left out: their layer indices alias those of the decoder. Raises RoutingError for a
    model without MoE layers, and for one with fused kernels in their place.
    """
    if any(module.use_kernels for module in model.modules() if isinstance(module, PreTrainedModel)):
        raise RoutingError(
            f"{type(model).__name__} was loaded with use_kernels=True, whose fused MoE layers read the weight "
            "of the router and skip its forward: load it with use_kernels=False"
        )
    routers = _find_routers(model)
    if not routers:
        raise RoutingError(
            f"{type(model).__name__} has no MoE layer that transformers declares a router for "
            "(`_can_record_outputs['router_logits']`): a dense model has no routing to record or replay"
        )
    return routers


def has_routers(model: nn.Module) -> bool:
    """Whether `model` has MoE layers; False for the dense control of an experiment."""
    return bool(_find_routers(model))


def router_gets_gradient(router: Router) -> bool:
    """Whether the loss can reach the router's parameters through its gate weights.

    With K > 1 it always can. With K = 1 a weight normalised over the selected experts (`norm_topk_prob`, or a
    softmax after the top-k) is 1 whatever the scores are, so its gradient is 0 everywhere. Found by probing:
    a float32 copy of the router with random parameters scores random tokens; a gate weight that is the same
    for all of them carries no gradient.
    """
    if router.top_k > 1:
        return True
    probe = copy.deepcopy(router.module).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        tokens = torch.randn(64, _input_width(probe), generator=generator)
        weights = probe(tokens.to(next(probe.parameters()).device))[1]
    return bool(weights.max() - weights.min() > 1e-3)


def _find_routers(model: nn.Module) -> list[Router]:
    classes = _router_classes(model)
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        if not isinstance(module, classes) and not _is_named(module, _UNDECLARED):
            continue
        if _is_named(module, _SELECTED_BY_PARENT):
            name = name.rpartition(".")[0]
            module = modules[name]
        layer = _LAYER.search(name)
        if layer is None or _MTP.search(name) or _is_idle_copy(name, modules):
            continue
        found.append(Router(name, module, int(layer[1]), *_sizes(name, module)))
    # A decoder layer runs its attention first, whatever it registers first (JetMoe has a router in both).
    return sorted(found, key=lambda router: (router.layer_id, ".self_attention." not in router.name))


def _is_idle_copy(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether peft keeps this module beside the copy that runs: the original, or another adapter's."""
    copied = _PEFT_COPY.match(name)
    if copied is None:
        return False
    wrapper: Any = modules[copied[1]]
    running = None if wrapper.disable_adapters else next(iter(wrapper.active_adapters), None)
    return copied[2] != running


def _is_named(module: nn.Module, names: tuple[str, ...]) -> bool:
    return any(cls.__name__ in names for cls in type(module).__mro__)


def _router_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """What the modeling files of the model declare as the source of `router_logits`."""
    models = {type(module) for module in model.modules() if isinstance(module, PreTrainedModel)}
    # The file of a base class counts as well: FSDP2 and users derive from a family's classes.
    families = {base for cls in models for base in cls.__mro__ if issubclass(base, PreTrainedModel)}
    files = {family.__module__ for family in families} - {PreTrainedModel.__module__}
    return tuple({cls for file in files for cls in _declared_routers(file)})


def _declared_routers(modeling_file: str) -> Iterator[type[nn.Module]]:
    # The declaration may sit on another PreTrainedModel of the same file (CausalLM, base, text model).
    for value in vars(sys.modules[modeling_file]).values():
        if isinstance(value, type) and issubclass(value, PreTrainedModel):
            recorder = (vars(value).get("_can_record_outputs") or {}).get("router_logits")
            for spec in recorder if isinstance(recorder, list) else [recorder]:
                target = getattr(spec, "target_class", spec)
                if target is not None:
                    yield target


def _sizes(name: str, module: nn.Module) -> tuple[int, int]:
    """(E, K) of a router, from its attributes or its config's."""
    config = getattr(module, "config", None)
    owners = [module, getattr(module, "experts", None), config]
    num_experts = next(
        (getattr(owner, key) for owner in owners for key in _NUM_EXPERTS_NAMES if hasattr(owner, key)), None
    )
    top_k = next(
        (
            getattr(owner, key)
            for owner in owners
            for key in ("top_k", "top_k_experts")
            if hasattr(owner, key)
        ),
        None,
    )
    if num_experts is None or top_k is None:
        raise RoutingError(
            f"{name} ({type(module).__name__}) does not say how many experts it has and selects"
        )
    return int(num_experts), int(top_k)


def _input_width(router: nn.Module) -> int:
    return next(parameter.shape[-1] for parameter in router.parameters() if parameter.dim() == 2)
