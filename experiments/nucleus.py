"""Nucleus (top-p) sampling in front of the rollout, which itself samples from the whole distribution."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

OUT = -1e9  # a logit of probability 0; finite, as the rollout's check for overflow wants it


def outside_nucleus(logits_V: Tensor, top_p: float, temperature: float) -> Tensor:
    """bool [..., V]: the tokens beyond the smallest set of the most probable ones that holds at least `top_p`
    of the probability at `temperature` (Holtzman et al. 2020, 1904.09751, §3.1)."""
    probabilities, order = torch.softmax(logits_V.float() / temperature, -1).sort(-1, descending=True)
    before = probabilities.cumsum(-1) - probabilities
    return torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)


@contextmanager
def nucleus(model: PreTrainedModel, top_p: float, temperature: float) -> Iterator[None]:
    """Inside, the model's logits of the last position leave out what lies outside the nucleus."""

    def cut(module: torch.nn.Module, given: tuple[Any, ...], output: Any) -> None:
        last = output.logits[:, -1:]
        output.logits = torch.cat(
            [output.logits[:, :-1], last.masked_fill(outside_nucleus(last, top_p, temperature), OUT)], dim=1
        )

    if top_p == 1:
        yield
        return
    hook = model.register_forward_hook(cut)
    try:
        yield
    finally:
        hook.remove()
