"""Finds the routers of a live model, and says which of them can learn."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_rl.routing.trace import RoutingError

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
_PEFT_COPY = re.compile(r"^(.*)\.(?:original_module|modules_to_save\.([^.]+))(?:\.|$)")
_MTP = re.compile(r"(?:^|\.)(?:mtp|nextn)\w*\.", re.IGNORECASE)

# Routers that no family declares in `_can_record_outputs`: of DeepSeek-V4, and of MegaBlocks.
_UNDECLARED = ("DeepseekV4HashRouter", "LearnedRouter")
# Families whose declared router returns logits only; the module above it selects.
_SELECTED_BY_PARENT = ("DbrxRouter",)
# Blocks whose routers see a part of the tokens each, so that no row of a trace belongs to every token.
_MODALITY_ISOLATED = ("Ernie4_5_VLMoeMoeBlock",)
# The E columns a router selects over. More specific names come first: LongCat's `num_experts` leaves out its
# zero experts, Zaya's its skip expert.
_NUM_EXPERTS_NAMES = ("num_router_classes", "n_routed_experts", "num_experts", "moe_num_experts")
_TOP_K_NAMES = ("top_k", "top_k_experts", "moe_top_k")
# Where probing must know more of a router: the submodule that is its gate, which output depends on the gate
# weights, and the shape of its tokens.
_PROBES: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "AfmoeTokenChoiceRouter": ("", 1, (1, 64)),
    "DbrxFFN": ("router", 0, (1, 64)),
    "DogeCDMoE": ("router_gate", 0, (1, 64)),
    "JetMoeTopKGating": ("", 2, (64,)),
    "Llama4Router": ("", 0, (64,)),
    "ZayaRouter": ("", 1, (1, 64)),
}


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
            f"{type(model).__name__} was loaded with use_kernels=True, whose fused MoE layers read the "
            "weight of the router and skip its forward: load it with use_kernels=False"
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


def common_sizes(routers: list[Router]) -> tuple[int, int]:
    """(E, K) of all routers. Raises RoutingError when they differ, since a trace has one E and one K."""
    sizes = {(router.num_experts, router.top_k) for router in routers}
    if len(sizes) > 1:
        raise RoutingError(f"the routers of one trace must agree on (E, K), this model has {sorted(sizes)}")
    return sizes.pop()


def router_gets_gradient(router: Router) -> bool:
    """Whether the loss can reach the router's parameters through its gate weights.

    With K > 1 it always can. With K = 1 a weight normalised over the selected experts (`norm_topk_prob`, or a
    softmax after the top-k) is 1 whatever the scores are, so its gradient is 0 everywhere. Found by probing:
    a float32 copy of the router, with random parameters and tokens, is differentiated.
    """
    if router.top_k > 1:
        return True
    probe = copy.deepcopy(router.module).float().cpu().requires_grad_()
    gate, weights_at, shape = _probe_of(probe)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    matrices = [parameter for parameter in probe.get_submodule(gate).parameters() if parameter.dim() == 2]
    inputs: dict[str, Tensor] = {}
    for argument in inspect.signature(probe.forward).parameters:
        if argument.endswith("bias"):
            inputs[argument] = torch.zeros(router.num_experts)
        elif argument == "input_ids":
            inputs[argument] = torch.zeros(shape, dtype=torch.long)
    output = probe(torch.randn(*shape, matrices[0].shape[-1], generator=generator), **inputs)
    weights = output if isinstance(output, Tensor) else output[weights_at]
    loss = weights.square().sum()
    rounding = 1e-5 * loss.detach()
    gradients = torch.autograd.grad(loss, matrices, allow_unused=True)
    return any(gradient is not None and bool(gradient.abs().max() > rounding) for gradient in gradients)


def router_parameters(router: Router) -> list[nn.Parameter]:
    """The parameters by which the router scores experts, without those of experts in the same module."""
    gate, _, _ = _probe_of(router.module)
    return list(router.module.get_submodule(gate).parameters())


def _probe_of(module: nn.Module) -> tuple[str, int, tuple[int, ...]]:
    name = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _PROBES), "")
    return _PROBES.get(name, ("", 1, (64,)))


def _find_routers(model: nn.Module) -> list[Router]:
    modules = dict(model.named_modules())
    classes = _router_classes(modules.values())
    found = []
    for name, module in modules.items():
        if _is_named(module, _MODALITY_ISOLATED):
            raise RoutingError(
                f"{name} ({type(module).__name__}) routes text tokens and image tokens by routers of their "
                "own, among experts of their own: a trace has one router for all rows of a layer, so this "
                "model can be neither recorded nor replayed"
            )
        inside = list(module.modules())[1:] if isinstance(module, classes) else []
        # Of a declared block and a router within it, the router.
        around = any(isinstance(m, classes) or _named_top_k_router(m) for m in inside)
        declared = isinstance(module, classes) and not around
        if not (declared or _is_named(module, _UNDECLARED) or _named_top_k_router(module)):
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


def _named_top_k_router(module: nn.Module) -> bool:
    """Whether a module is a router by its name and `top_k`: some families of transformers before 5.24 declare
    none, or the block around it."""
    return _class_is_top_k_router(type(module)) and hasattr(module, "top_k")  # type: ignore[arg-type]


@functools.cache
def _class_is_top_k_router(cls: Any) -> bool:
    return any(base.__name__.lower().endswith("topkrouter") for base in cls.__mro__)


def _is_idle_copy(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether peft keeps this module beside the copy that runs: the original, or another adapter's."""
    copied = _PEFT_COPY.match(name)
    if copied is None:
        return False
    wrapper: Any = modules[copied[1]]
    running = None if wrapper.disable_adapters else next(iter(wrapper.active_adapters), None)
    return copied[2] != running


def _is_named(module: nn.Module, names: tuple[str, ...]) -> bool:
    return _class_is_named(type(module), names)  # type: ignore[arg-type]


@functools.cache
def _class_is_named(cls: Any, names: tuple[str, ...]) -> bool:
    return any(base.__name__ in names for base in cls.__mro__)


def _router_classes(modules: Iterable[nn.Module]) -> tuple[type[nn.Module], ...]:
    """What the modeling files of the modules declare as the source of `router_logits`."""
    models = {type(module) for module in modules if isinstance(module, PreTrainedModel)}
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
    owners = [module] + [getattr(module, name, None) for name in ("experts", "config", "args")]
    num_experts = next(
        (getattr(owner, key) for owner in owners for key in _NUM_EXPERTS_NAMES if hasattr(owner, key)), None
    )
    top_k = next(
        (getattr(owner, key) for owner in owners for key in _TOP_K_NAMES if hasattr(owner, key)),
        None,
    )
    if num_experts is None or top_k is None:
        raise RoutingError(
            f"{name} ({type(module).__name__}) does not say how many experts it has and selects"
        )
    return int(num_experts), int(top_k)
