"""The noise floor: the same weights on the same tokens by another path, where every change is rounding's.

Drift is compared with the floor of its own path. The laboratory measures drift by the reference forward
before and after the updates, whose floor is `repeated`; a trainer that compares its forward with the
sampler's decoding, or with another precision, sees the floors of these paths on top.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_rl.laboratory.observe import RoutedPass, observe
from moe_rl.routing import record_routing
from moe_rl.training.batch import RolloutBatch, filler
from moe_rl.training.passes import Plan, flat

PADDING = 8  # columns on either side, enough to move every row and every tile


@dataclass(frozen=True, eq=False)
class FloorPath:
    """The reference forward and the same weights by another path, on the same sequences.

    `what` says in which one thing the path differs from the reference.
    """

    name: str
    what: str
    reference: RoutedPass
    other: RoutedPass


PATHS = {
    "repeated": "the same forward again",
    "batch_half": "half as many responses a forward",
    "batch_one": "one response a forward",
    "padding": f"{PADDING} more columns of padding on either side",
    "decode": "cached decoding, a token at a time, against the full forward",
    "bfloat16_autocast": "bfloat16 matrix products (autocast) against the reference",
    "bfloat16_weights": "bfloat16 weights and activations against the reference",
    "bfloat16_decode": "cached decoding against the full forward, both with bfloat16 weights",
}


def noise_floor(
    model: PreTrainedModel, batch: RolloutBatch, plan: Plan, temperature: float, reference: RoutedPass
) -> Iterator[FloorPath]:
    """Every path of PATHS, one after the other; `reference` is `observe(model, batch, plan, temperature)`.

    Tables of the paths are `measure_change(path.reference, path.other, rows_BT)`. Inside an autocast region
    of the caller, the reference's own precision is that region's.
    """

    def again(name: str, other: RoutedPass, against: RoutedPass = reference) -> FloorPath:
        return FloorPath(name, PATHS[name], against, other)

    yield again("repeated", observe(model, batch, plan, temperature))
    yield again("batch_half", observe(model, batch, regrouped(plan, lambda n: -(-n // 2)), temperature))
    yield again("batch_one", observe(model, batch, regrouped(plan, lambda n: 1), temperature))
    yield again("padding", _narrowed(observe(model, widened(batch), plan, temperature)))
    yield again("decode", cached_decode(model, batch, plan, temperature))
    with torch.autocast(batch.input_ids_BT.device.type, dtype=torch.bfloat16, cache_enabled=False):
        yield again("bfloat16_autocast", observe(model, batch, plan, temperature))
    narrow = copy.deepcopy(model)
    narrow.to(dtype=torch.bfloat16)  # type: ignore[call-arg]  # transformers' wrapper hides nn.Module.to
    in_narrow = observe(narrow, batch, plan, temperature)
    yield again("bfloat16_weights", in_narrow)
    yield again("bfloat16_decode", cached_decode(narrow, batch, plan, temperature), in_narrow)


def regrouped(plan: Plan, size_of: Callable[[int], int]) -> Plan:
    """The same rows in forwards of `size_of(n)` responses where the plan has n."""
    return [
        [
            slice(start, min(start + size_of(rows.stop - rows.start), rows.stop))
            for rows in minibatch
            for start in range(rows.start, rows.stop, size_of(rows.stop - rows.start))
        ]
        for minibatch in plan
    ]


def widened(batch: RolloutBatch, columns: int = PADDING) -> RolloutBatch:
    """The same sequences with more padding on either side."""
    tensors: dict[str, Any] = {
        name: nn.functional.pad(tensor, (columns, columns), value=filler(name, pad_id=0))
        for name, tensor in batch.tensors().items()
        if name.endswith("_BT")
    }
    return replace(batch, **tensors, prompt_length=batch.prompt_length + columns)


def _narrowed(passed: RoutedPass, columns: int = PADDING) -> RoutedPass:
    """A pass over `widened` sequences in the columns of the original ones."""
    inner = slice(columns, passed.trace.valid.shape[1] - columns)
    tensors = {
        field.name: value[:, inner]
        for field in fields(passed)
        if isinstance(value := getattr(passed, field.name), Tensor)
    }
    return RoutedPass(passed.trace.columns(inner.start, inner.stop), **tensors)


@torch.no_grad()
def cached_decode(model: PreTrainedModel, batch: RolloutBatch, plan: Plan, temperature: float) -> RoutedPass:
    """What `observe` gives, by the sampler's path: the prompt, then one token a forward on a key-value cache.

    The tokens are the batch's own (teacher forcing), so that both paths route the same rows. Without the
    routers' log-softmax: asked for it, transformers computes the auxiliary loss, which fails on a cache.
    """
    return RoutedPass.cat([_decode(model, batch[rows], temperature) for rows in flat(plan)])


def _decode(model: PreTrainedModel, batch: RolloutBatch, temperature: float) -> RoutedPass:
    ids_BT, positions_BT = batch.input_ids_BT, batch.position_ids_BT
    first, T = batch.prompt_length, ids_BT.shape[1]
    logp_BT = torch.zeros(ids_BT.shape, device=ids_BT.device)
    # transformers is renaming the argument, and the field of the output
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    held: dict[str, Any] = {}
    with record_routing(model, weights=True, scores=True) as recorder:
        for start, stop in [(0, first), *((t, t + 1) for t in range(first, T))]:
            output = model(
                input_ids=ids_BT[:, start:stop],
                attention_mask=batch.attention_mask_BT[:, :stop],
                position_ids=positions_BT[:, start:stop],
                use_cache=True,
                logits_to_keep=1,
                **held,
            )
            held = {name: output[name]}
            if stop < T:
                logp_BV = torch.log_softmax(output.logits[:, -1].float() / temperature, dim=-1)
                logp_BT[:, stop] = logp_BV.gather(-1, ids_BT[:, stop, None]).squeeze(-1)
    trace = recorder.trace(mask=batch.attention_mask_BT).to("cpu")
    return RoutedPass(trace, logp_BT.cpu(), recorder.weights().cpu(), recorder.scores().cpu())
