"""The sampler's routing on TRL's padded batch, for rollout replay (R3, arXiv 2510.11370).

It comes from transformers' `generate`, recorded; from vLLM with `enable_return_routed_experts`; or from a
`rollout_func` that returns `routed_experts`, one payload a sequence in any form that `from_vllm` reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moe_rl.routing import Recorder, RoutingError, RoutingTrace
from moe_rl.routing.formats import ModelRouting, align_to_mask, from_vllm

ROUTED = "routed_experts"  # the field of vLLM's completions, and the key that a rollout_func returns
Sampled = Callable[[Tensor, int], RoutingTrace]  # (attention mask [B, T], C completion columns) -> its trace


def from_recorder(recorder: Recorder) -> Sampled:
    """What `generate` routed: one recording, its prompts padded on the left as TRL's batch has them."""
    return lambda mask_BT, columns: recorder.trace(mask_BT)


def from_engine(
    payloads: Sequence[Any],
    routing: ModelRouting,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
) -> Sampled:
    """What vLLM returned for each prompt and completion, given as token ids.

    Raises RoutingError for whatever `from_vllm` refuses: another number of rows than tokens, another model.
    """
    lengths = [(len(p), len(c)) for p, c in zip(prompts, completions, strict=True)]
    trace = from_vllm(payloads, routing, tokens=[prompt + completion for prompt, completion in lengths])

    def on(mask_BT: Tensor, columns: int) -> RoutingTrace:
        # Not align_to_mask on mask_BT itself: TRL may mask a truncated completion as a whole.
        tokens_BT, first = torch.zeros_like(mask_BT), mask_BT.shape[1] - columns
        for row, (prompt, completion) in enumerate(lengths):
            tokens_BT[row, first - prompt : first + completion] = 1
        return align_to_mask(trace, tokens_BT.cpu()).where(mask_BT.cpu())

    return on


def payloads_of(output: dict[str, Any]) -> list[Any]:
    """The payloads among a rollout_func's output. Raises RoutingError where there are none."""
    if ROUTED not in output:
        raise RoutingError(
            f"replay='rollout' replays the sampler's experts, and the rollout_func returned only "
            f"{sorted(output)}: add {ROUTED!r}, one vLLM payload [tokens - 1, layers, K] a sequence (engine "
            "started with enable_return_routed_experts=True), or use replay='old_policy'"
        )
    return list(output[ROUTED])


@contextmanager
def returning_routed_experts(module: Any) -> Iterator[None]:
    """Inside, the `LLM` that TRL's vLLM `module` builds is asked to return routed experts.

    TRL builds it with fixed arguments and has no option to pass others. Without vLLM there is none to build.
    """
    if not hasattr(module, "LLM"):
        yield
        return
    plain = module.LLM
    module.LLM = functools.partial(plain, enable_return_routed_experts=True)
    try:
        yield
    finally:
        module.LLM = plain


@contextmanager
def outputs_of(llm: Any) -> Iterator[list[Any]]:
    """Collects the RequestOutputs of the `llm.generate` calls inside, which TRL reduces to tokens."""
    outputs: list[Any] = []
    plain = llm.generate

    def generate(*arguments: Any, **options: Any) -> Any:
        made = plain(*arguments, **options)
        outputs.extend(made)
        return made

    llm.generate = generate
    try:
        yield outputs
    finally:
        del llm.generate  # the method of its class is back


def own_share(outputs: Sequence[Any], size: int, rank: int) -> list[Any]:
    """This process's payloads: under tensor parallelism a group's processes all get the group's outputs."""
    payloads = [completion.routed_experts for output in outputs for completion in output.outputs]
    return payloads[(rank % size) * len(payloads) // size : (rank % size + 1) * len(payloads) // size]
