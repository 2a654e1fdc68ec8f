"""What every objective reports about its ratios: one function, the same names whatever the objective.

Shares are fractions in [0, 1], KL values nats per token, ratios new policy / old policy. Every mean is over
all response tokens (or all responses) of the tensors given, so a batch's metrics come from one call on the
whole batch, never from averaging the metrics of its parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_rl.objectives.aggregation import sequence_mean
from moe_rl.objectives.batch import Batch


@torch.no_grad()
def policy_metrics(batch: Batch, clipped_BT: Tensor, outside_BT: Tensor) -> dict[str, float]:
    """Clip fractions, ratio statistics and KL(old || new) of a batch, as Python floats.

    clipped_BT: bool, the token's gradient is clipped away (sign-aware). outside_BT: bool, its ratio lies
    outside the interval, whatever the sign of its advantage. For a sequence objective every token of a
    response carries the response's flag, which makes `clip_frac/token` verl's and the paper's token-weighted
    count. `clip_frac/sequence` is the mean over responses of each one's share of clipped tokens: for sequence
    objectives the share of clipped responses (TRL's count), for token objectives slime's per-sample mean.
    A response without tokens counts as one with nothing clipped, and is left out of the ratio statistics.
    A batch without response tokens reports ratios of 1 and 0 for all else.
    """
    mask_BT, log_ratio_BT = batch.mask, batch.log_ratio
    log_ratio_N = log_ratio_BT[mask_BT].double()
    log_ratio_S = sequence_mean(log_ratio_BT, mask_BT)[mask_BT.any(dim=1)].double()
    if log_ratio_N.numel() == 0:
        log_ratio_N = log_ratio_S = log_ratio_BT.new_zeros(1, dtype=torch.float64)
    share_B = sequence_mean(clipped_BT.double(), mask_BT)
    tokens = mask_BT.sum().clamp(min=1)
    ratio_N = log_ratio_N.exp()
    values = {
        "clip_frac/token": (clipped_BT & mask_BT).sum() / tokens,
        "clip_frac/sequence": share_B.sum() / max(len(share_B), 1),
        "clip_frac/token_signblind": (outside_BT & mask_BT).sum() / tokens,
        "ratio/token_log_sq": log_ratio_N.square().mean(),
        # Samples come from the old policy, so both estimate KL(old || new); k3 >= 0 term by term.
        "kl/k1": -log_ratio_N.mean(),
        "kl/k3": (ratio_N - 1 - log_ratio_N).mean(),
        **_spread("ratio/token", ratio_N),
        **_spread("ratio/sequence", log_ratio_S.exp()),
    }
    return to_floats(values)


def _spread(name: str, ratio_N: Tensor) -> dict[str, Tensor]:
    """Mean, population standard deviation and extremes of one kind of ratio."""
    return {
        f"{name}_mean": ratio_N.mean(),
        f"{name}_std": ratio_N.std(correction=0),
        f"{name}_min": ratio_N.min(),
        f"{name}_max": ratio_N.max(),
    }


def to_floats(values: dict[str, Tensor]) -> dict[str, float]:
    """Detached Python floats, fetched from the device in one transfer."""
    numbers = torch.stack([value.detach().double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))
