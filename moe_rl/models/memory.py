"""GPU memory of RL on a model of given sizes under FSDP2: sums of what is held, in bytes of one GPU.

Weights, gradients and AdamW's two moments are exact. Activations and the head are estimates of the largest
tensors; the allocator's fragments, cuBLAS and NCCL buffers (a few GB) are not in the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.models.footprint import Footprint


@dataclass(frozen=True)
class Layout:
    """How training is spread over GPUs.

    gpus           N, over which FSDP2 shards every parameter, its gradient and its moments
    state_bytes    of a weight that AdamW updates, of its gradient and of each moment: 4, float32
    compute_bytes  of a number in forward and backward: 2, bfloat16
    reference      whether a reference policy is held, sharded as the weights are
    checkpointing  whether decoder layers are recomputed in backward
    fused_head     whether log-probabilities are computed without holding a micro-batch's logits
    """

    gpus: int = 1
    state_bytes: int = 4
    compute_bytes: int = 4
    reference: bool = False
    checkpointing: bool = False
    fused_head: bool = False

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"gpus must be at least 1, got {self.gpus}")


def training_memory(sizes: Footprint, layout: Layout, tokens: int, scored: int) -> dict[str, int]:
    """Bytes of one GPU at the peak of an update, by part.

    tokens  of a GPU's micro-batch, prompts and padding included
    scored  those of them whose logits are computed

    weights, gradients, AdamW  state_bytes x P / N, once, once and twice
    reference    as the weights
    gathered     FSDP2, N > 1: the root (embedding and head) and two decoder layers (at work, prefetched) in
                 full, and one layer's gradient before it is scattered, in compute_bytes
    activations  D numbers a token for each decoder layer, which checkpointing keeps, and `layer_activations`
                 of the one recomputed; without checkpointing those of all layers
    head         logits and their gradient, both float32; fused: the head's gradient [V, D] in float32
    """
    shard = layout.state_bytes * sizes.parameters // layout.gpus
    gathered = layout.compute_bytes * (sizes.root + 3 * sizes.block) if layout.gpus > 1 else 0
    inside = layer_activations(sizes)
    kept = sizes.layers * sizes.hidden + inside if layout.checkpointing else sizes.layers * inside
    logits = sizes.hidden if layout.fused_head else 2 * scored
    parts = {
        "weights": shard,
        "gradients": shard,
        "AdamW moments": 2 * shard,
        "reference policy": shard * layout.reference,
        "gathered layers": gathered,
        "activations": layout.compute_bytes * tokens * kept,
        "head": 4 * sizes.vocabulary * logits,
    }
    return {name: held for name, held in parts.items() if held}


def sampling_memory(sizes: Footprint, layout: Layout, tokens: int) -> dict[str, int]:
    """Bytes of one GPU while the model in training samples, with so many tokens in its KV cache, by part.

    Gradients are freed by then; FSDP2 gathers the root and two decoder layers. The KV cache is left out where
    the footprint does not know it.
    """
    gathered = layout.compute_bytes * (sizes.root + 2 * sizes.block) if layout.gpus > 1 else 0
    cache = layout.compute_bytes * (sizes.kv_per_token or 0) * tokens
    parts = resting_memory(sizes, layout) | {"gathered layers": gathered, "KV cache": cache}
    return {name: held for name, held in parts.items() if held}


def resting_memory(sizes: Footprint, layout: Layout) -> dict[str, int]:
    """Bytes of one GPU that stay between updates, by part: weights, moments and reference policy."""
    shard = layout.state_bytes * sizes.parameters // layout.gpus
    parts = {"weights": shard, "AdamW moments": 2 * shard, "reference policy": shard * layout.reference}
    return {name: held for name, held in parts.items() if held}


def sampler_memory(sizes: Footprint, layout: Layout, tokens: int, tensor_parallel: int) -> dict[str, int]:
    """Bytes of one GPU that a sampler with weights of its own needs (vLLM), by part, in compute_bytes.

    tokens           in its KV cache at once
    tensor_parallel  GPUs that share its weights, and its cache by heads; a latent that is shared by all heads
                     (multi-head latent attention) each of them keeps
    """
    parts = {
        "weights": layout.compute_bytes * sizes.parameters // tensor_parallel,
        "KV cache": layout.compute_bytes
        * (sizes.kv_per_token or 0)
        * tokens
        // min(tensor_parallel, sizes.kv_heads or 1),
    }
    return {name: held for name, held in parts.items() if held}


def layer_activations(sizes: Footprint) -> int:
    """Numbers a token leaves for backward in a decoder layer: an estimate.

    A linear map of a token from or to D numbers leaves as many at its other end as it has parameters over D:
    queries, keys, values and attention's outputs, gate, up and activation of the K experts. Half as many
    again for rotated queries and keys and the activation's two factors; 8 D for the inputs of the norms in
    both precisions and the residual; 2 D an expert, its input and its output. Scores of attention are not
    kept (flash or memory-efficient attention).
    """
    top_k = sizes.trace.top_k if sizes.trace is not None else 1
    return 3 * sizes.active_block // (2 * sizes.hidden) + (8 + 2 * top_k) * sizes.hidden
