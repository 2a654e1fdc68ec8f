"""From one value per token to one loss: the four ways in print, exact under micro-batching."""

from __future__ import annotations

import math

import torch
from torch import Tensor

AGGREGATIONS = (
    "token-mean",  # every response token of the mini-batch weighs the same (DAPO, 2503.14476)
    "seq-mean-token-mean",  # every response weighs the same (GRPO, 2402.03300; GSPO Eq. 2 and 5)
    "seq-mean-token-sum",  # a response weighs its length
    "seq-mean-token-sum-norm",  # the same over a constant length (Dr.GRPO, 2503.20783)
)


def sequence_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the response tokens of each sequence, [B]; 0 for a sequence without any."""
    return masked(values_BT, mask_BT).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)


def masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Values with zeros at padding, whatever padding held."""
    return torch.where(mask_BT, values_BT, torch.zeros_like(values_BT))


def aggregate(
    values_BT: Tensor,
    mask_BT: Tensor,
    mode: str,
    *,
    sequences: float | None = None,
    tokens: float | None = None,
    length_divisor: float | None = None,
) -> Tensor:
    """Reduce per-token values [B, T] to a scalar by one of AGGREGATIONS.

    mask_BT is bool. `sequences` and `tokens` are the counts of the whole mini-batch when this is one
    micro-batch of it: the results of the micro-batches then add up to the mini-batch's. A sequence without
    response tokens counts in `sequences` and contributes 0, as in TRL (verl leaves it out of the divisor).
    Nothing but padding gives 0, still attached to the graph. `length_divisor` is a number of tokens, used by
    seq-mean-token-sum-norm alone. Raises ValueError on an unknown mode, a missing divisor
    or a count that is not positive.
    """
    check_aggregation(mode, length_divisor)
    check_counts(sequences, tokens)
    if mode == "token-mean":
        divisor = mask_BT.sum().clamp(min=1) if tokens is None else tokens
        return masked(values_BT, mask_BT).sum() / divisor
    if mode == "seq-mean-token-mean":
        per_sequence_B = sequence_mean(values_BT, mask_BT)
    else:
        per_sequence_B = masked(values_BT, mask_BT).sum(dim=1)
    if length_divisor is not None:
        per_sequence_B = per_sequence_B / length_divisor
    return per_sequence_B.sum() / (max(values_BT.shape[0], 1) if sequences is None else sequences)


def check_aggregation(mode: str, length_divisor: float | None) -> None:
    """ValueError unless the mode is known and has a positive length_divisor exactly when it uses one."""
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}; known: {', '.join(AGGREGATIONS)}")
    if mode == "seq-mean-token-sum-norm":
        if length_divisor is None or not length_divisor > 0:
            raise ValueError(
                f"aggregation seq-mean-token-sum-norm divides by length_divisor, got {length_divisor}: "
                "set it to a positive constant, usually the maximum response length in tokens"
            )
    elif length_divisor is not None:
        raise ValueError(
            f"length_divisor={length_divisor} has no use under aggregation {mode!r}: leave it out"
        )


def check_counts(sequences: float | None, tokens: float | None) -> None:
    """ValueError unless the counts of the mini-batch are positive and finite, where given."""
    for name, count in (("sequences", sequences), ("tokens", tokens)):
        if count is not None and not 0 < count < math.inf:  # NaN fails too
            raise ValueError(f"{name} counts the whole mini-batch and must be positive, got {count}")
