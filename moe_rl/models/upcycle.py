"""Dense → MoE: every expert a copy of the dense MLP, in front of it a router that has yet to learn.

Sparse upcycling (arXiv 2212.05055): gate weights that sum to 1 over identical experts give what the dense MLP
gave, so the model is the same function until `noise` makes its experts differ.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from moe_rl.models.config import ModelError, UpcycleConfig


@dataclass(frozen=True)
class MoEFamily:
    """The MoE with a dense family's attention: its model_type, and what sets its sizes and its gate."""

    model_type: str
    experts: str  # name of the config field for E
    width: str  # ... and for the width of an expert
    fixed: dict[str, Any]  # gate weights that sum to 1, no dense layers


QWEN = {"norm_topk_prob": True, "decoder_sparse_step": 1, "use_sliding_window": False}
# No field switches Qwen2-MoE's shared expert off: at width 0 it has no weights and adds exact zeros.
FAMILIES = {
    "llama": MoEFamily("mixtral", "num_local_experts", "intermediate_size", {}),
    "mistral": MoEFamily("mixtral", "num_local_experts", "intermediate_size", {}),
    "qwen2": MoEFamily(
        "qwen2_moe", "num_experts", "moe_intermediate_size",
        QWEN | {"shared_expert_intermediate_size": 0},
    ),
    "qwen3": MoEFamily("qwen3_moe", "num_experts", "moe_intermediate_size", QWEN),
}  # fmt: skip

# Weights that only the MoE has; the router keeps transformers' initialisation.
NEW_WEIGHTS = (".mlp.gate.weight", ".mlp.shared_expert")


def upcycle(dense: PreTrainedModel, config: UpcycleConfig, seed: int = 0) -> PreTrainedModel:
    """A MoE with the weights of `dense`, in its dtype; with `config.noise` 0, the same function to rounding.

    Router weights are normal with the standard deviation `initializer_range` of the dense config. `noise` is
    the standard deviation of what is added to each weight of each expert, as a fraction of that of its
    matrix. `seed` draws both.

    Raises `ModelError` for a family without a counterpart, and for a model with weights or a kind of
    attention that its counterpart does not have.
    """
    family = FAMILIES.get(dense.config.model_type)
    if family is None:
        raise ModelError(
            f"a dense model of type {dense.config.model_type!r} cannot be upcycled: no MoE with its "
            f"attention is known here; supported: {', '.join(FAMILIES)}"
        )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # the shared expert of width 0
        torch.manual_seed(seed)
        moe = AutoModelForCausalLM.from_config(_moe_config(dense.config, family, config), dtype=dense.dtype)
        _copy_weights(dense, moe)
        if config.noise:
            _add_noise(moe, config.noise)
    moe.generation_config = dense.generation_config
    return moe.eval()


def _moe_config(dense: PreTrainedConfig, family: MoEFamily, config: UpcycleConfig) -> PreTrainedConfig:
    kinds = set(getattr(dense, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ModelError(
            f"upcycling a {dense.model_type} with {', '.join(sorted(kinds))}: {family.model_type} has one "
            "kind of attention in all layers; choose a checkpoint with full attention"
        )
    own = AutoConfig.for_model(family.model_type)
    # What both classes declare; a field that only one of them reads would change what the model computes.
    both = AutoConfig.for_model(dense.model_type).to_dict().keys() & own.to_dict().keys()
    both -= {"model_type", "layer_types", "transformers_version"}
    shared = {key: value for key, value in dense.to_dict().items() if key in both | {"head_dim"}}
    sizes = {
        family.experts: config.num_experts,
        family.width: dense.intermediate_size,
        "num_experts_per_tok": config.top_k,
    }
    return type(own)(**shared | family.fixed | sizes)


@torch.no_grad()
def _copy_weights(dense: PreTrainedModel, moe: PreTrainedModel) -> None:
    """Fill the MoE from the dense model; `ModelError` unless every weight of either is accounted for."""
    old, new = dense.state_dict(), moe.state_dict()
    used: set[str] = set()

    def take(name: str) -> Tensor:
        used.add(name)
        return old[name]

    for name, weight in new.items():
        if name.endswith(".experts.gate_up_proj"):
            mlp = name.removesuffix("experts.gate_up_proj")
            gate_up = [take(f"{mlp}gate_proj.weight"), take(f"{mlp}up_proj.weight")]
            weight.copy_(torch.cat(gate_up).expand_as(weight))
        elif name.endswith(".experts.down_proj"):
            mlp = name.removesuffix("experts.down_proj")
            weight.copy_(take(f"{mlp}down_proj.weight").expand_as(weight))
        elif name in old:
            weight.copy_(take(name))
        elif not any(part in name for part in NEW_WEIGHTS):
            raise ModelError(f"upcycling: {type(dense).__name__} has no weight for {name}")
    left = sorted(old.keys() - used)
    if left:
        raise ModelError(
            f"upcycling: {type(moe).__name__} has no place for {len(left)} weights of this "
            f"{type(dense).__name__}, first {left[0]}: attention or MLP biases are not supported there"
        )


@torch.no_grad()
def _add_noise(moe: PreTrainedModel, noise: float) -> None:
    for name, weight in moe.state_dict().items():
        if ".experts." not in name:
            continue
        for expert in weight:
            parts = expert.chunk(2) if name.endswith("gate_up_proj") else (expert,)
            for matrix in parts:
                matrix.add_(torch.randn_like(matrix), alpha=noise * matrix.std().item())
