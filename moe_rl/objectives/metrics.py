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

QUANTILES = (1, 50, 99)  # per cent


@torch.no_grad()
def policy_metrics(batch: Batch, clipped_BT: Tensor, outside_BT: Tensor) -> dict[str, float]:
    """Clip fractions, ratio statistics and KL(old || new) of a batch, as Python floats.

    clipped_BT: bool, the token's gradient is clipped away (sign-aware). outside_BT: bool, its ratio lies
    outside the interval, whatever the sign of its advantage. For a sequence objective every token of a
    response carries the response's flag, which makes `clip_frac/token` verl's token-weighted count, and that
    of the paper's Figure 2 ("fractions of clipped tokens"; it prints no formula). `clip_frac/sequence` is the
    mean over responses of each one's share of clipped tokens: for sequence objectives the share of clipped
    responses (TRL's count), for token objectives slime's per-sample mean.
    A response without tokens counts as one with nothing clipped, and is left out of the ratio statistics.
    A batch without response tokens reports ratios and effective shares of 1, and 0 for all else.
    Effective sample sizes are shares of the number of tokens or responses; `product` is the sequence ratio
    without length normalisation, whose spread is the standard deviation of its log, in nats.
    """
    mask_BT, log_ratio_BT = batch.mask, batch.log_ratio
    log_ratio_N = log_ratio_BT[mask_BT].double()
    present_B = mask_BT.any(dim=1)
    log_mean_S = sequence_mean(log_ratio_BT, mask_BT)[present_B].double()
    log_sum_S = log_ratio_BT.double().sum(dim=1)[present_B]
    if log_ratio_N.numel() == 0:
        log_ratio_N = log_mean_S = log_sum_S = log_ratio_BT.new_zeros(1, dtype=torch.float64)
    share_B = sequence_mean(clipped_BT.double(), mask_BT)
    tokens = mask_BT.sum().clamp(min=1).double()
    values = {
        "clip_frac/token": (clipped_BT & mask_BT).sum() / tokens,
        "clip_frac/sequence": share_B.sum() / max(len(share_B), 1),
        "clip_frac/token_signblind": (outside_BT & mask_BT).sum() / tokens,
        "ratio/token_log_sq": log_ratio_N.square().mean(),
        # Samples come from the old policy, so both estimate KL(old || new); k3 >= 0 term by term.
        "kl/k1": -log_ratio_N.mean(),
        "kl/k3": (torch.expm1(log_ratio_N) - log_ratio_N).mean(),
        **_spread("ratio/token", log_ratio_N),
        **_spread("ratio/sequence", log_mean_S),
        # What sequence weights would be without the length normalisation: products, kept in log space.
        "ratio/product_log_std": log_sum_S.std(correction=0),
        "ratio/product_ess": effective_share(log_sum_S),
    }
    return to_floats(values)


def _spread(name: str, log_ratio: Tensor) -> dict[str, Tensor]:
    """Moments, extremes, quantiles and effective sample size of one kind of ratio, from its logs."""
    ratio = log_ratio.sort().values.exp()
    return {
        f"{name}_mean": ratio.mean(),
        f"{name}_std": ratio.std(correction=0),
        f"{name}_min": ratio[0],
        f"{name}_max": ratio[-1],
        **{f"{name}_q{percent:02d}": _quantile(ratio, percent / 100) for percent in QUANTILES},
        f"{name}_ess": effective_share(log_ratio),
    }


def _quantile(ascending: Tensor, share: float) -> Tensor:
    """Quantile by linear interpolation of sorted values (torch.quantile refuses more than 2^24 of them)."""
    position = share * (len(ascending) - 1)
    below = int(position)
    above = min(below + 1, len(ascending) - 1)
    return torch.lerp(ascending[below], ascending[above], position - below)


def effective_share(log_weight: Tensor) -> Tensor:
    """(sum w)² / (n sum w²) in (0, 1], from log w, finite however large the weights."""
    log_size = 2 * log_weight.logsumexp(0) - (2 * log_weight).logsumexp(0)
    return log_size.exp() / len(log_weight)


def to_floats(values: dict[str, Tensor]) -> dict[str, float]:
    """Detached Python floats, fetched from the device in one transfer."""
    numbers = torch.stack([value.detach().double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))
