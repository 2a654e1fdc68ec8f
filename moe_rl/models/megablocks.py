"""MegaBlocks (arXiv 2211.15841): its grouped kernels under transformers' experts, and its dMoE layers.

MegaBlocks 0.10.0, the last release, pins torch 2.7 and cannot be resolved beside this project's torch, so it
is no extra: see docs/megablocks.md. This is the one file that imports it, when first needed. Where its CUDA
extensions are not built, `megablocks_standins` takes their place.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import logging
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from moe_rl.models import megablocks_standins as standins
from moe_rl.models.config import ModelError
from moe_rl.models.experts import stacked_experts
from moe_rl.routing.routers import Router, find_routers

INSTALL = "pip install --no-build-isolation --no-deps megablocks==0.10.0 stanford-stk==0.7.1 triton"


@functools.cache
def load_megablocks() -> Any:
    """The package `megablocks` with its ops and layers, imported when first needed.

    CPU tensors, and extensions that are not built, are computed in PyTorch; the latter is logged once. Raises
    ModuleNotFoundError with the install line when megablocks or what it imports is missing.
    """
    missing = [name for name in ("megablocks", "stk", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"MegaBlocks needs {', '.join(missing)}, in an environment with torch: {INSTALL}"
        )
    standins.add_missing_extensions()
    if "megablocks" not in sys.modules:
        # An import that failed for want of an extension leaves modules that go on taking it as missing.
        for name in [name for name in sys.modules if name.startswith("megablocks.")]:
            del sys.modules[name]
    import megablocks.backend.kernels
    import megablocks.layers
    import megablocks.ops

    standins.cover_cpu(megablocks.backend.kernels)
    if standins.extensions_in_torch():
        logging.getLogger(__name__).warning(
            "%s: not built, PyTorch computes what they would", " and ".join(standins.extensions_in_torch())
        )
    return megablocks


def register_experts() -> None:
    """Let transformers run experts by MegaBlocks: `model.set_experts_implementation("megablocks")`."""
    load_megablocks()
    ALL_EXPERTS_FUNCTIONS.register("megablocks", experts_forward)


def require_supported(experts: nn.Module) -> None:
    """Raise `ModelError` for experts of transformers that are more than two plain matrices per expert."""
    reasons = {
        "is_transposed": "stores its matrices transposed",
        "has_bias": "has biases",
        "has_post_expert_norm": "normalises the output of every expert",
        "_is_expert_parallel": "is split over processes",
    }
    found = [reason for flag, reason in reasons.items() if getattr(experts, flag)]
    if found:
        raise ModelError(
            f"MegaBlocks cannot run {type(experts).__name__}, which {' and '.join(found)}: use "
            "model.experts=eager, grouped_mm or batched_mm"
        )


def experts_forward(experts: nn.Module, hidden_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """The experts' output [N, D]: tokens grouped by expert, two grouped matrix products, weighted sum.

    The signature is that of transformers' experts interface; the steps are those of MegaBlocks' own
    ParallelDroplessMLP.grouped_forward_once. Gate weights keep their dtype: the kernel scales in float32.
    """
    require_supported(experts)
    ops, gmm = load_megablocks().ops, load_megablocks().grouped_gemm_util.ops.gmm
    module: Any = experts
    E, K = module.num_experts, experts_NK.shape[1]
    choices = experts_NK.reshape(-1).int().contiguous()  # the kernels read memory, not strides
    with torch.no_grad():
        bin_ids, indices = ops.sort(choices, max(math.ceil(math.log2(E)), 1))
        tokens_E = ops.histogram(choices, E)
        bins = ops.inclusive_cumsum(tokens_E, 0).view(-1)
        batch_sizes = tokens_E.cpu().long()
    grouped = ops.gather(hidden_ND.contiguous(), indices, bin_ids, bins, K)
    up = gmm(grouped, module.gate_up_proj if module.has_gate else module.up_proj, batch_sizes, trans_b=True)
    inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    out = gmm(inner.contiguous(), module.down_proj, batch_sizes, trans_b=True)
    return ops.scatter(out, indices, bin_ids, weights_NK.reshape(-1).contiguous(), bins, K)


def to_megablocks(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of stacked experts (transformers) as those of a grouped dMoE's `experts.mlp`.

    gate_up_proj [E, 2F, D] and down_proj [E, D, F] -> w1 (gate), v1 (up) and w2, each [E F, D], for
    mlp_type="glu"; up_proj [E, F, D] and down_proj -> w1 and w2, for mlp_type="mlp".
    """
    down_EDF = weights["down_proj"]
    if "gate_up_proj" in weights:
        gate_EFD, up_EFD = weights["gate_up_proj"].chunk(2, dim=1)
        first = {"w1": gate_EFD.flatten(0, 1), "v1": up_EFD.flatten(0, 1)}
    else:
        first = {"w1": weights["up_proj"].flatten(0, 1)}
    return first | {"w2": down_EDF.transpose(1, 2).flatten(0, 1)}


def from_megablocks(weights: Mapping[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """Weights of a grouped dMoE's `experts.mlp` as those of stacked experts; undoes `to_megablocks`."""
    stacked = {name: weight.unflatten(0, (num_experts, -1)) for name, weight in weights.items()}
    down = {"down_proj": stacked["w2"].transpose(1, 2).contiguous()}
    if "v1" in stacked:
        return {"gate_up_proj": torch.cat([stacked["w1"], stacked["v1"]], dim=1)} | down
    return {"up_proj": stacked["w1"]} | down


def replace_with_dmoe(model: PreTrainedModel) -> None:
    """Put a MegaBlocks dMoE with the same weights in place of every MoE block of `model`.

    For families whose block is a softmax router (gate weights normalised over the selected, or not) and
    gated or plain experts, such as Qwen3-MoE, OLMoE and Mixtral. Raises `ModelError`, before anything is
    replaced, for other routers, for shared experts, and for experts that MegaBlocks cannot run.
    """
    layers = {}
    for router in find_routers(model):
        name = router.name.rpartition(".")[0]
        layers[name] = _dmoe(name, model.get_submodule(name), router)
    for name, layer in layers.items():
        model.set_submodule(name, layer)


def _dmoe(name: str, block: Any, router: Router) -> nn.Module:
    router_name = router.name.rpartition(".")[2]
    others = {name.partition(".")[0] for name, _ in block.named_parameters()} - {router_name, "experts"}
    if others:
        raise ModelError(f"{name} also has {sorted(others)}, which a dMoE of MegaBlocks does not have")
    if block.experts not in stacked_experts(block):
        raise ModelError(
            f"{name}: {type(block.experts).__name__} are not stacked as transformers' experts are"
        )
    require_supported(block.experts)
    if block.experts.has_gate and type(block.experts)._apply_gate is not _default_apply_gate:
        raise ModelError(f"{name}: the gate of {type(block.experts).__name__} is not act(gate) * up")
    norm = _norm(name, router)
    weight_ED = router.module.get_parameter("weight").detach()
    mlp = to_megablocks(block.experts.state_dict())
    layers = load_megablocks().layers
    arguments = layers.arguments.Arguments(
        hidden_size=weight_ED.shape[1],
        ffn_hidden_size=len(mlp["w1"]) // router.num_experts,
        moe_num_experts=router.num_experts,
        moe_top_k=router.top_k,
        moe_normalize_expert_weights=norm,
        moe_loss_weight=0,  # else training forwards append to a list of the module, which somebody must clear
        activation_fn=block.experts.act_fn,
        bias=False,
        return_bias=False,
        mlp_type="glu" if "v1" in mlp else "mlp",
        mlp_impl="grouped",
        fp16=False,
        device=weight_ED.device,
    )
    layer = layers.dMoE(arguments).to(weight_ED.dtype).train(block.training)
    weights = {"router.layer.weight": weight_ED}
    layer.load_state_dict(weights | {f"experts.mlp.{key}": weight for key, weight in mlp.items()})
    return layer


def _norm(name: str, router: Router) -> int | None:
    """MegaBlocks' moe_normalize_expert_weights for a router: 1, None, or `ModelError` when neither fits.

    Found by probing a float32 copy with random parameters, so that a formula that only resembles softmax and
    top-k at the present weights is not taken for it.
    """
    refused = ModelError(
        f"{name}: {type(router.module).__name__} is not MegaBlocks' router, a softmax over all experts "
        "followed by a top-k, with or without normalisation; keep its layers and use model.experts=megablocks"
    )
    inputs = inspect.signature(router.module.forward).parameters
    if len(inputs) > 1 or [key for key, _ in router.module.named_parameters()] != ["weight"]:
        raise refused
    probe = copy.deepcopy(router.module).float().cpu().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*probe.parameters(), *probe.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        weight_ED = probe.get_parameter("weight")
        hidden_ND = torch.randn(64, weight_ED.shape[1], generator=generator)
        _, weights_NK, experts_NK, *_ = probe(hidden_ND)
        scores_NK, top_NK = (hidden_ND @ weight_ED.T).softmax(-1).topk(router.top_k)
    for norm, expected_NK in ((1, scores_NK / scores_NK.sum(-1, keepdim=True)), (None, scores_NK)):
        if torch.equal(top_NK, experts_NK) and torch.allclose(expected_NK, weights_NK):
            return norm
    raise refused
