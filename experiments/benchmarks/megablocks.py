"""MegaBlocks on a GPU: its kernels against PyTorch, then experts by implementation, checked and timed.

    python -m experiments.benchmarks.megablocks          # on a GPU
    python -m experiments.benchmarks.megablocks --device cpu --dtype float32 \\
        --width 64 --inner 32 --experts 16 --top-k 2 --sequences 4 --length 32   # a dry run

What every row says, on a transformers model of two Qwen3-MoE layers with random weights:

error       |logits - eager| / |eager| in norm, same dtype: rounding, about 1e-2 in bfloat16
replay      whether replaying the model's own trace gives bitwise its plain logits
follows     whether a foreign trace reaches the experts, id by id
decode      share of experts that change between generate and a teacher-forced pass over the same tokens
forward, training   tokens per second of a forward, and of forward + backward
memory      peak MiB of the training pass

Exits with 1 when a check fails. docs/megablocks.md says how to install MegaBlocks and what has run where.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moe_rl.models.experts import set_experts
from moe_rl.models.megablocks import load_megablocks, replace_with_dmoe
from moe_rl.models.megablocks_standins import extensions_in_torch
from moe_rl.routing import expert_change, record_routing, replay_routing

IMPLEMENTATIONS = ("eager", "grouped_mm", "megablocks", "dMoE layers")
# Between a layer on the GPU and the same layer in PyTorch on the CPU, in norm: float32 products may be TF32.
LAYER_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
LAYERS: dict[str, dict[str, Any]] = {
    "dMoE glu": dict(mlp_type="glu"),
    "dMoE mlp": dict(mlp_type="mlp"),
    "dMoE glu, memory-optimised": dict(mlp_type="glu", memory_optimized_mlp=True),
    "MoE, no token dropped": dict(moe_capacity_factor=0),
    "MoE, capacity 1": dict(moe_capacity_factor=1),
}


@dataclass(frozen=True)
class Row:
    experts: str
    error: float
    replay: bool
    follows: bool
    decode: float
    forward: float
    training: float
    memory: float


def main() -> None:
    """Print both tables; the exit status says whether every check held."""
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device: --device cpu makes a dry run, on which speeds mean nothing")
    load_megablocks()
    print(f"torch {torch.__version__}, {device_name(options)}, {options.dtype}")
    print("in PyTorch instead of compiled:", ", ".join(extensions_in_torch()) or "nothing")

    layers = pd.DataFrame([check_layer(name, options) for name in LAYERS])
    print("\nMegaBlocks layers: this device against PyTorch on the CPU\n" + layers.to_string(index=False))
    rows = pd.DataFrame([asdict(measure(name, options)) for name in IMPLEMENTATIONS])
    print("\nExperts by implementation\n" + rows.to_string(index=False))
    if options.csv:
        rows.to_csv(options.csv, index=False)
    if not (layers["holds"].all() and rows["replay"].all() and rows["follows"].all()):
        sys.exit("a check failed: see False above")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m experiments.benchmarks.megablocks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    sizes = dict(
        width=2048, inner=768, experts=128, top_k=8, sequences=8, length=1024, new_tokens=32, repeats=10
    )
    for name, default in sizes.items():  # the sizes of a layer of Qwen3-30B-A3B
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--csv", help="write the second table to this file")
    return parser.parse_args()


def device_name(options: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if options.device == "cuda" else "CPU"


def check_layer(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One layer of MegaBlocks, forward and backward, here and on the CPU; both get the CPU's routing."""
    layers, dtype = load_megablocks().layers, getattr(torch, options.dtype)
    arguments = layers.arguments.Arguments(
        hidden_size=options.width, ffn_hidden_size=options.inner, moe_num_experts=options.experts,
        moe_top_k=options.top_k, moe_loss_weight=0, bias=False, return_bias=False, mlp_impl="grouped",
        fp16=False, device="cpu", **LAYERS[name],
    )  # fmt: skip
    torch.manual_seed(0)
    layer = getattr(layers, name.split(" ")[0].rstrip(","))(arguments).to(dtype)
    hidden_TBD = torch.randn(64, 2, options.width).to(dtype)
    scores, weights, experts = layer.router(hidden_TBD)

    def run(device: str) -> tuple[Tensor, ...]:
        mlp = copy.deepcopy(layer.experts).to(device)
        inputs = [
            x.detach().to(device).requires_grad_(x is not scores) for x in (hidden_TBD, scores, weights)
        ]
        out = mlp(*inputs, experts.to(device))
        grads = torch.autograd.grad(out.float().square().sum(), [inputs[0], inputs[2], *mlp.parameters()])
        return tuple(x.detach().float().cpu() for x in (out, *grads))

    errors = [relative(a, b) for a, b in zip(run(options.device), run("cpu"), strict=True)]
    holds = max(errors) <= LAYER_TOLERANCE[dtype]
    return {"layer": name, "output": errors[0], "worst gradient": max(errors[1:]), "holds": holds}


def measure(name: str, options: argparse.Namespace) -> Row:
    """The checks and speeds of one implementation."""
    eager = build(options)
    set_experts(eager, "eager")
    model = copy.deepcopy(eager)
    if name == "dMoE layers":
        replace_with_dmoe(model)
    else:
        set_experts(model, name)
    generator = torch.Generator().manual_seed(1)
    shape = (options.sequences, options.length)
    ids = torch.randint(3, 1024, shape, generator=generator).to(options.device)

    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with record_routing(model) as recorder:
            model(input_ids=ids)
        trace = recorder.trace()
        with replay_routing(model, trace):
            again = model(input_ids=ids).logits
        foreign = replace(
            trace, experts=((trace.experts.long() + 1) % options.experts).to(trace.experts.dtype)
        )
        with replay_routing(model, foreign), record_routing(model) as recorder:
            model(input_ids=ids)
        followed = recorder.trace()
        error = relative(plain, eager(input_ids=ids).logits)
    del eager
    training, memory = time_training(model, ids, options)
    return Row(
        experts=name,
        error=error,
        replay=torch.equal(plain, again),
        follows=torch.equal(followed.experts, foreign.experts),
        decode=decode_change(model, ids[:, : min(64, options.length)], options.new_tokens),
        forward=ids.numel() / seconds(lambda: forward_only(model, ids), options),
        training=ids.numel() / training,
        memory=memory,
    )


def build(options: argparse.Namespace) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=1024, num_hidden_layers=2, hidden_size=options.width, num_attention_heads=8,
        num_key_value_heads=2, head_dim=options.width // 8, num_experts=options.experts,
        num_experts_per_tok=options.top_k, moe_intermediate_size=options.inner, norm_topk_prob=True,
        max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    return model.to(options.device).eval()


def decode_change(model: Any, prompts: Tensor, new_tokens: int) -> float:
    """Experts that differ between the decode steps of generate and one forward over prompt and response."""
    mask = torch.ones_like(prompts)
    with torch.no_grad():
        with record_routing(model) as recorder:
            tokens = model.generate(
                input_ids=prompts, attention_mask=mask, max_new_tokens=new_tokens, do_sample=True
            )
        rollout = recorder.trace()
        with record_routing(model) as recorder:
            model(input_ids=tokens)
    response = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
    response[:, prompts.shape[1] :] = True
    return expert_change(rollout.fit(tokens.shape[1]), recorder.trace().where(response)).experts


def forward_only(model: nn.Module, ids: Tensor) -> None:
    with torch.no_grad():
        model(input_ids=ids)


def time_training(model: nn.Module, ids: Tensor, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds and peak MiB of a forward and backward pass."""
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    duration = seconds(step, options)
    return duration, torch.cuda.max_memory_allocated() / 2**20 if options.device == "cuda" else float("nan")


def seconds(work: Callable[[], None], options: argparse.Namespace) -> float:
    """Mean wall time of one call, after two calls that compile and tune kernels."""
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    for _ in range(2):
        work()
    synchronize()
    start = time.perf_counter()
    for _ in range(options.repeats):
        work()
    synchronize()
    return (time.perf_counter() - start) / options.repeats


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


if __name__ == "__main__":
    main()
