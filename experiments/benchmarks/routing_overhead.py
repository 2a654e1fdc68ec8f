"""What recording and replay cost, beside a plain forward and beside transformers' own router logits.

    python -m experiments.benchmarks.routing_overhead               # CPU, one thread, about five minutes
    python -m experiments.benchmarks.routing_overhead --device cuda --layers 12 --width 1024

Every figure is a ratio of two neighbours in time: a plain pass and one with the context opened and closed
around it, in alternating order, so that a busy machine slows both. Printed: the median of the ratios and the
95 % interval of the median (order statistics, no distribution assumed). On the CPU a pass is timed by the
process's CPU time, on a GPU by wall time between synchronisations.
"""

from __future__ import annotations

import argparse
import functools
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from scipy.stats import binom
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.routing import RoutingTrace, Threshold, record_routing, replay_routing


@dataclass(frozen=True)
class Arm:
    """One way to run a pass: a context around it, and arguments of the model."""

    name: str
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    router_logits: bool = False


@dataclass(frozen=True)
class Ratio:
    """Time of an arm over time of the plain pass next to it."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(ratios: list[float]) -> Ratio:
        """Median and its 95 % interval from the order statistics of the sample."""
        ordered, n = sorted(ratios), len(ratios)
        below = max(int(binom.ppf(0.025, n, 0.5)) - 1, 0)
        middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
        return Ratio(middle, ordered[below], ordered[n - 1 - below])

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def main() -> None:
    """Print the table."""
    options = parse()
    if options.device == "cpu":
        torch.set_num_threads(1)
    model = build(options)
    generator = torch.Generator().manual_seed(1)
    shape = (options.sequences, options.length)
    ids = torch.randint(3, 64, shape, generator=generator).to(options.device)
    arms = arms_of(model, own_trace(model, ids))
    forward = {arm.name: compare(model, ids, arm, options, train=False) for arm in arms}
    training = {arm.name: compare(model, ids, arm, options, train=True) for arm in arms}
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "CPU"
    print(
        f"Qwen3-MoE, {options.layers} layers, width {options.width}, {options.experts} experts top-"
        f"{options.top_k}, {options.sequences} x {options.length} tokens, {options.dtype}, {where}; torch "
        f"{torch.__version__}, transformers {transformers.__version__}; {options.pairs} pairs\n"
    )
    print("| time / plain | forward, no_grad | forward + backward |\n|---|---|---|")
    for arm in arms:
        print(f"| {arm.name} | {forward[arm.name]} | {training[arm.name]} |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    sizes = dict(layers=6, width=128, inner=64, experts=32, top_k=4, sequences=32, length=64, pairs=40)
    for name, default in sizes.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    return parser.parse_args()


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
    return [
        Arm("plain"),  # against itself: the error of the method
        Arm("output_router_logits=True", router_logits=True),
        Arm("record_routing", lambda: record_routing(model)),
        Arm("replay_routing", lambda: replay_routing(model, trace)),
        Arm("replay_routing, native=False", lambda: replay_routing(model, trace, native=False)),
        Arm("replay_routing, Threshold(0.5)", lambda: replay_routing(model, trace, variant=Threshold(0.5))),
    ]


def compare(
    model: PreTrainedModel, ids: Tensor, arm: Arm, options: argparse.Namespace, *, train: bool
) -> Ratio:
    """The arm against plain passes, in pairs of alternating order, after two pairs that warm up."""
    ratios = []
    for pair in range(options.pairs + 2):
        order = [Arm("plain"), arm] if pair % 2 else [arm, Arm("plain")]
        seconds = [timed(functools.partial(run, model, ids, one, train), options.device) for one in order]
        ratios.append(seconds[1] / seconds[0] if pair % 2 else seconds[0] / seconds[1])
    return Ratio.of(ratios[2:])


def run(model: PreTrainedModel, ids: Tensor, arm: Arm, train: bool) -> None:
    model.zero_grad()
    with torch.set_grad_enabled(train), arm.context():
        logits = model(input_ids=ids, use_cache=False, output_router_logits=arm.router_logits).logits
        if train:
            logits.float().log_softmax(-1)[..., 5].sum().backward()


def timed(work: Callable[[], None], device: str) -> float:
    """Seconds of one pass."""
    if device == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
