"""The border of every objective: checks the caller's tensors once and hands on a clean record."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.objectives.aggregation import check_counts


@dataclass(frozen=True)
class Batch:
    """Tensors [B, T] of one (micro-)batch in float32 or wider, with zeros at padding.

    Replacing padding before any exp() keeps NaN and inf there out of the loss and out of the gradient:
    multiplying by the mask afterwards would not, because 0 * inf is NaN.
    """

    logp: Tensor  # log-probabilities under the policy in training, nats; the only tensor with a gradient
    old_logp: Tensor  # under the policy that the clipping is measured from, detached
    log_ratio: Tensor  # logp - old_logp, nats
    advantages: Tensor  # detached
    mask: Tensor  # bool, True on response tokens
    sequences: float | None  # responses of the whole mini-batch; None: the rows of this one
    tokens: float | None  # response tokens of the whole mini-batch; None: those of this one


def prepare_batch(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor,
    *,
    sequences: float | None = None,
    tokens: float | None = None,
) -> Batch:
    """Check the tensors of a batch and mask them.

    logp_BT, old_logp_BT: floating [B, T], nats. advantages: floating [B] or [B, T]. mask_BT: bool or 0/1.
    float16 and bfloat16 are computed in float32; float64 stays float64.
    Raises ValueError on a wrong shape or mask, TypeError on a tensor that is not floating.
    """
    if logp_BT.ndim != 2:
        raise ValueError(f"logp_BT must be [B, T] (sequences, tokens), got shape {tuple(logp_BT.shape)}")
    mask_BT = check_mask(mask_BT, logp_BT.shape)
    if advantages.ndim == 1:
        if advantages.shape[0] != logp_BT.shape[0]:
            raise ValueError(
                f"advantages must be [B] or [B, T] with logp_BT's [B, T] = {tuple(logp_BT.shape)}, "
                f"got {tuple(advantages.shape)}"
            )
        advantages = advantages[:, None].expand_as(logp_BT)
    check_counts(sequences, tokens)
    logp_BT = masked_float("logp_BT", logp_BT, mask_BT)
    old_logp_BT = masked_float("old_logp_BT", old_logp_BT.detach(), mask_BT).to(logp_BT.dtype)
    return Batch(
        logp=logp_BT,
        old_logp=old_logp_BT,
        log_ratio=logp_BT - old_logp_BT,
        advantages=masked_float("advantages", advantages.detach(), mask_BT).to(logp_BT.dtype),
        mask=mask_BT,
        sequences=sequences,
        tokens=tokens,
    )


def check_mask(mask_BT: Tensor, shape: torch.Size) -> Tensor:
    """Return a response mask as bool [B, T]; ValueError unless it has `shape` and holds only 0 and 1."""
    if mask_BT.shape != shape:
        raise ValueError(f"mask_BT must have logp_BT's shape {tuple(shape)}, got {tuple(mask_BT.shape)}")
    if mask_BT.dtype == torch.bool:
        return mask_BT
    if not bool(((mask_BT == 0) | (mask_BT == 1)).all()):
        raise ValueError(
            "mask_BT must hold only 0 (prompt, padding) and 1 (response token); got other values"
        )
    return mask_BT == 1


def masked_float(name: str, values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return [B, T] values in float32 or wider with zeros at padding; errors name the tensor."""
    if values_BT.shape != mask_BT.shape:
        raise ValueError(
            f"{name} must have logp_BT's shape {tuple(mask_BT.shape)}, got {tuple(values_BT.shape)}"
        )
    if not values_BT.is_floating_point():
        raise TypeError(f"{name} must be a floating tensor, got {values_BT.dtype}; call .float() on it")
    values_BT = values_BT.to(torch.promote_types(values_BT.dtype, torch.float32))
    return torch.where(mask_BT, values_BT, torch.zeros_like(values_BT))
