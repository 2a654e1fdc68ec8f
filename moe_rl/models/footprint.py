"""What a model weighs, from its config: the model is built without weights, on torch's meta device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from moe_rl.models.config import ModelError
from moe_rl.routing import RoutingError, find_routers, has_routers
from moe_rl.routing.trace_size import TraceSize

CACHED_IN_FULL = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class Footprint:
    """Sizes of a causal LM, in numbers, not bytes.

    parameters        all of them, tied ones once
    active            those that a token passes: of the routed experts K of E; embedding and head included
    root              those outside decoder layers: embedding, head, last norm
    block             those of the largest decoder layer, the unit in which FSDP2 gathers weights
    active_block      the most that a token passes in one decoder layer
    kv_per_token      keys and values cached for a token, all layers; None where `kv_cache` does not know
    kv_heads          among which they can be split
    layers, hidden, vocabulary   decoder layers, D and V
    trace             sizes of its routing; None for a dense model
    """

    parameters: int
    active: int
    root: int
    block: int
    active_block: int
    kv_per_token: int | None
    kv_heads: int | None
    layers: int
    hidden: int
    vocabulary: int
    trace: TraceSize | None


def footprint(config: PreTrainedConfig) -> Footprint:
    """The sizes of the causal LM that transformers builds from `config`.

    Raises ModelError when `without_weights` does, for routers of different sizes and for a MoE whose routed
    experts are not held as tensors [E, ...].
    """
    text = config.get_text_config()
    kv_per_token, kv_heads = kv_cache(text) or (None, None)
    model = without_weights(config)
    trace = _trace_size(model)
    blocks = _blocks(model)
    parameters = _count(model)
    active = _active(model, trace)
    if trace is not None and trace.top_k < trace.num_experts and active == parameters:
        raise ModelError(f"{type(model).__name__}: found no routed experts in tensors [E, ...]")
    return Footprint(
        parameters=parameters,
        active=active,
        root=parameters - sum(_count(block) for block in blocks),
        block=max(_count(block) for block in blocks),
        active_block=max(_active(block, trace) for block in blocks),
        kv_per_token=kv_per_token,
        kv_heads=kv_heads,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        trace=trace,
    )


def without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    """The causal LM of `config` on the meta device, which takes no memory. Raises ModelError where
    transformers builds no model of it."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # impossible sizes fail somewhere in the family's own code
        raise ModelError(f"transformers builds no model of this {type(config).__name__}: {error}") from error
    return model


def kv_cache(text: PreTrainedConfig) -> tuple[int, int] | None:
    """Numbers cached for a token, and the heads among which they can be split.

    Grouped-query attention: 2 · heads · width a layer, also where a window would drop some. Multi-head latent
    attention (DeepSeek-V2, arXiv 2405.04434, 2.1.4): the compressed latent and the rotary key, one for all
    heads, which is what vLLM keeps; transformers keeps the expanded keys and values. None where some layers
    keep something else, such as the state of linear attention.
    """
    if set(getattr(text, "layer_types", None) or ()) - CACHED_IN_FULL:
        return None
    if getattr(text, "kv_lora_rank", None):
        return text.num_hidden_layers * (text.kv_lora_rank + text.qk_rope_head_dim), 1
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * width, heads


def _trace_size(model: nn.Module) -> TraceSize | None:
    if not has_routers(model):
        return None
    try:
        routers = find_routers(model)
    except RoutingError as error:
        raise ModelError(str(error)) from error
    sizes = {(router.num_experts, router.top_k) for router in routers}
    if len(sizes) > 1:
        raise ModelError(f"the routers differ in (experts, K): {sorted(sizes)}; a trace has one of each")
    return TraceSize(len(routers), *sizes.pop())


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, as the family itself names what must not be split."""
    names = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise ModelError(f"{type(model).__name__} does not say what its decoder layers are")
    return found


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _active(module: nn.Module, trace: TraceSize | None) -> int:
    """Parameters that a token passes."""
    if trace is None:
        return _count(module)
    return sum(
        parameter.numel() * trace.top_k // trace.num_experts
        if _is_routed(name, parameter, trace.num_experts)
        else parameter.numel()
        for name, parameter in module.named_parameters()
    )


def _is_routed(name: str, parameter: Tensor, num_experts: int) -> bool:
    """Whether a parameter holds the E routed experts, one after the other."""
    return "experts" in name.split(".")[:-1] and parameter.dim() > 1 and len(parameter) == num_experts
