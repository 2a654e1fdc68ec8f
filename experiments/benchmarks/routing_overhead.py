"""What recording and replay cost, beside a plain forward and beside transformers' own router logits.

    python -m experiments.benchmarks.routing_overhead               # CPU, one thread, about five minutes
    python -m experiments.benchmarks.routing_overhead --device cuda --layers 12 --width 1024

Every figure is a ratio of two neighbours in time: a plain pass and one with the context opened and closed
around it, in alternating order. Printed: the median of the ratios and the 95 % interval of the median. On
the CPU a pass is timed by the process's CPU time, on a GPU by wall time between synchronisations.

On the CPU also the effect of recording on a whole training step, where the loop records: in the old-policy
pass.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from experiments.benchmarks.loop_overhead import bare_step
from experiments.benchmarks.pairs import Clock, Ratio, compare
from experiments.benchmarks.results import Bound, Report, Row, arguments, publish
from experiments.benchmarks.scene import make_scene
from moe_rl.routing import RoutingTrace, Threshold, record_routing, replay_routing

QUICK = dict(layers=1, width=16, inner=8, experts=4, top_k=2, sequences=1, length=4, pairs=2)
SIZES = dict(layers=6, width=128, inner=64, experts=32, top_k=4, sequences=32, length=64, pairs=40)


@dataclass(frozen=True)
class Arm:
    """One way to run a pass: a context around it, arguments of the model, and the bound on its time."""

    name: str
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    router_logits: bool = False
    bound: Bound | None = None


def main() -> None:
    """Print the table."""
    options = parse()
    publish(measure(options), options)


def measure(options: argparse.Namespace) -> Report:
    if options.device == "cpu":
        torch.set_num_threads(1)
    model = build(options)
    generator = torch.Generator().manual_seed(1)
    shape = (options.sequences, options.length)
    ids = torch.randint(3, 64, shape, generator=generator).to(options.device)
    arms = arms_of(model, own_trace(model, ids))
    forward = {arm.name: against_plain(model, ids, arm, options, train=False) for arm in arms}
    training = {arm.name: against_plain(model, ids, arm, options, train=True) for arm in arms}
    where = f", {torch.cuda.get_device_name()}" if options.device == "cuda" else ""
    report = Report(
        "routing_overhead",
        "What recording and replay cost",
        f"Qwen3-MoE, {options.layers} layers, width {options.width}, {options.experts} experts top-"
        f"{options.top_k}, {options.sequences} x {options.length} tokens, {options.dtype}{where}; "
        f"{options.pairs} pairs.",
    )
    report.rows = [
        Row(kind, arm.name, "plain", times[arm.name], "x", arm.bound)
        for kind, times in (("forward, no_grad", forward), ("forward + backward", training))
        for arm in arms
    ]
    if options.device == "cpu":
        report.rows.append(step_with_recording(options))
    return report


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    for name, default in SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    return options


def build(options: argparse.Namespace) -> PreTrainedModel:
    config: Any = Qwen3MoeConfig(
        vocab_size=64, num_hidden_layers=options.layers, hidden_size=options.width, num_attention_heads=4,
        num_key_value_heads=2, head_dim=options.width // 4, num_experts=options.experts,
        num_experts_per_tok=options.top_k, moe_intermediate_size=options.inner, norm_topk_prob=True,
        max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(config)
    return model.to(options.device, getattr(torch, options.dtype)).eval()


def own_trace(model: PreTrainedModel, ids: Tensor) -> RoutingTrace:
    with torch.no_grad(), record_routing(model) as recorder:
        model(input_ids=ids, use_cache=False)
    return recorder.trace()


def arms_of(model: PreTrainedModel, trace: RoutingTrace) -> list[Arm]:
    same, little = Bound("at most", 1.00), Bound("at most", 1.03)
    return [
        Arm("plain"),  # against itself: the error of the method
        Arm("output_router_logits=True", router_logits=True),
        Arm("record_routing", lambda: record_routing(model), bound=little),
        Arm("replay_routing", lambda: replay_routing(model, trace), bound=little),
        Arm("replay_routing, native=False", lambda: replay_routing(model, trace, native=False), bound=same),
        Arm("replay_routing, Threshold(0.5)", lambda: replay_routing(model, trace, variant=Threshold(0.5))),
    ]


def against_plain(
    model: PreTrainedModel, ids: Tensor, arm: Arm, options: argparse.Namespace, *, train: bool
) -> Ratio:
    """Time of the arm over time of plain passes next to it."""
    side, plain = (functools.partial(run, model, ids, one, train) for one in (arm, Arm("plain")))
    return compare(side, plain, options.pairs, clock_of(options.device))


def run(model: PreTrainedModel, ids: Tensor, arm: Arm, train: bool) -> None:
    model.zero_grad()
    with torch.set_grad_enabled(train), arm.context():
        logits = model(input_ids=ids, use_cache=False, output_router_logits=arm.router_logits).logits
        if train:
            logits.float().log_softmax(-1)[..., 5].sum().backward()


def clock_of(device: str) -> Clock:
    """CPU time, or wall time at which the GPU has nothing left to do."""
    if device == "cpu":
        return time.process_time

    def synchronised() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return synchronised


def step_with_recording(options: argparse.Namespace) -> Row:
    """The model calls of a training step, recording where the loop records, over the same without."""
    sizes = ["rollout.prompts=4", "rollout.responses=2"] if options.quick else []
    plain, recording = (make_scene(*sizes, cold=not options.quick) for _ in range(2))
    step = compare(
        bare_step(recording, shared=False, records=record_routing),
        bare_step(plain, shared=False),
        max(options.pairs // 2, 2),
    )
    beside = "the same without: rollout, old policy, updates"
    return Row(
        "training step",
        "record_routing in the old-policy pass",
        beside,
        step,
        "x",
        Bound("not measurably above", 1.0),
    )


if __name__ == "__main__":
    main()
