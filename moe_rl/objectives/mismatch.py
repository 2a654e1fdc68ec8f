"""Corrections for rollouts sampled by an engine mu that differs from the trainer's old policy.

With w = pi_old / mu per token, a correction is a level (whose ratio is looked at), an action (what happens
outside [low, high]) and the bounds. It returns weights and a mask for an objective:

    correction = get_mismatch_correction("icepop")(old_logp_BT, sampler_logp_BT, mask_BT)
    loss, metrics = objective(
        logp_BT, old_logp_BT, advantages, correction.mask, weights_BT=correction.weights
    )
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from moe_rl.objectives.aggregation import masked, sequence_mean
from moe_rl.objectives.base import token_mean
from moe_rl.objectives.batch import check_mask, masked_float
from moe_rl.objectives.metrics import effective_share, to_floats
from moe_rl.objectives.options import check_option_types

LEVELS = ("token", "sequence", "geometric")
ACTIONS = ("truncate", "zero", "reject")


@dataclass(frozen=True)
class Correction:
    """What to hand to an objective: detached weights, the mask that is left, and metrics."""

    weights: Tensor  # [B, T], factors of each token's objective; 0 at padding
    mask: Tensor  # bool [B, T], the response tokens that are left
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class MismatchCorrection:
    """One correction; calling it with (old_logp_BT, sampler_logp_BT, mask_BT) gives a Correction.

    level: "token" looks at w_t, "sequence" at the product of a response's w_t, "geometric" at their
    geometric mean. action: "truncate" multiplies by the ratio held within the bounds, "zero" by the ratio
    where it lies within them and by 0 elsewhere (the token still counts in the loss's divisor), "reject"
    takes the tokens or responses outside off the mask and weights the rest by 1. high may be infinite; a call
    whose weights then overflow raises ValueError.
    Raises ValueError on an unknown level or action, or bounds that are not 0 <= low < high; TypeError on
    options of another type.
    """

    level: str = "token"
    action: str = "truncate"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        check_option_types(self)
        if self.level not in LEVELS or self.action not in ACTIONS:
            raise ValueError(
                f"level must be one of {', '.join(LEVELS)} and action one of {', '.join(ACTIONS)}, "
                f"got {self.level!r} and {self.action!r}"
            )
        if not 0 <= self.low < self.high:
            raise ValueError(f"bounds of the ratio must be 0 <= low < high, got {self.low} and {self.high}")

    @torch.no_grad()
    def __call__(self, old_logp_BT: Tensor, sampler_logp_BT: Tensor, mask_BT: Tensor) -> Correction:
        """Weights, mask and metrics for log-probabilities [B, T] in nats under pi_old and the sampler mu.

        Bounds are compared in log space, so that products of 32,768 ratios neither overflow nor need a clamp.
        Raises ValueError where a weight below an infinite bound overflows.
        """
        mask_BT = check_mask(mask_BT, old_logp_BT.shape)
        log_ratio_BT = _log_ratio(old_logp_BT, sampler_logp_BT, mask_BT)
        log_weight_BT = self._at_level(log_ratio_BT, mask_BT)
        log_low = math.log(self.low) if self.low > 0 else -math.inf
        log_high = math.log(self.high)
        inside_BT = (log_weight_BT >= log_low) & (log_weight_BT <= log_high)
        kept_BT = mask_BT
        if self.action == "truncate":
            weights_BT = log_weight_BT.clamp(log_low, log_high).exp()
        elif self.action == "zero":
            weights_BT = log_weight_BT.exp().masked_fill(~inside_BT, 0)
        else:
            weights_BT, kept_BT = torch.ones_like(log_weight_BT), mask_BT & inside_BT
        if not bool(weights_BT.isfinite().all()):
            raise ValueError(
                f"a weight of exp({float(log_weight_BT.max()):.4g}) overflows under high = {self.high}: "
                "give a finite bound"
            )
        metrics = {}
        if self.action != "reject":
            # A response without tokens has the weight 1 of an empty product here, as in TRL.
            of_units = weights_BT[mask_BT] if self.level == "token" else weights_BT[:, :1]
            metrics = to_floats(
                {"mismatch/weight_mean_unit": of_units.double().sum() / max(of_units.numel(), 1)}
            )
        weights_BT = masked(weights_BT, kept_BT)
        metrics |= _correction_metrics(weights_BT, ~inside_BT, mask_BT)
        return Correction(weights_BT, kept_BT, metrics)

    def _at_level(self, log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Log of the ratio that is compared with the bounds, at every token."""
        if self.level == "token":
            return log_ratio_BT
        if self.level == "sequence":
            return log_ratio_BT.sum(dim=1, keepdim=True).expand_as(log_ratio_BT)
        return sequence_mean(log_ratio_BT, mask_BT)[:, None].expand_as(log_ratio_BT)


MISMATCH_CORRECTIONS: dict[str, MismatchCorrection] = {
    "token_tis": MismatchCorrection(level="token", action="truncate", high=2.0),  # verl's cap; MiniRL uses 5
    "sequence_tis": MismatchCorrection(level="sequence", action="truncate", high=2.0),
    "icepop": MismatchCorrection(level="token", action="zero", low=0.5, high=5.0),
    "sequence_mis": MismatchCorrection(level="sequence", action="zero", high=3.0),  # TRL's default
    "sequence_rejection": MismatchCorrection(level="sequence", action="reject", low=0.5, high=2.0),
    "geometric_rejection": MismatchCorrection(level="geometric", action="reject", low=0.999, high=1.002),
}


def get_mismatch_correction(name: str, **options: Any) -> MismatchCorrection:
    """The named correction, its bounds replaced by `options`; ValueError on an unknown name or option."""
    if name not in MISMATCH_CORRECTIONS:
        raise ValueError(f"unknown mismatch correction {name!r}; known: {', '.join(MISMATCH_CORRECTIONS)}")
    known = {
        option.name: getattr(MISMATCH_CORRECTIONS[name], option.name) for option in fields(MismatchCorrection)
    }
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise ValueError(f"correction {name!r} has no option {', '.join(unknown)}; known: {', '.join(known)}")
    return MismatchCorrection(**{**known, **options})


@torch.no_grad()
def off_policy_sequence_mask(
    logp_BT: Tensor, sampler_logp_BT: Tensor, advantages: Tensor, mask_BT: Tensor, *, threshold: float
) -> Correction:
    """Zero the responses with A < 0 that have drifted from their sampler (DeepSeek-V3.2, 2512.02556 Eq. 9).

    A response is dropped when its mean of log mu - log pi exceeds threshold (nats per token), pi being the
    policy in training. advantages: [B] or [B, T]. The response still counts in the loss's divisor.
    """
    mask_BT = check_mask(mask_BT, logp_BT.shape)
    drift_B = -sequence_mean(_log_ratio(logp_BT, sampler_logp_BT, mask_BT), mask_BT)
    advantages_BT = advantages[:, None].expand_as(mask_BT) if advantages.ndim == 1 else advantages
    dropped_BT = (drift_B > threshold)[:, None] & (masked_float("advantages", advantages_BT, mask_BT) < 0)
    weights_BT = (mask_BT & ~dropped_BT).to(drift_B.dtype)
    return Correction(weights_BT, mask_BT, _correction_metrics(weights_BT, dropped_BT, mask_BT))


@torch.no_grad()
def mismatch_metrics(old_logp_BT: Tensor, sampler_logp_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """How far the trainer's pi_old is from the sampler mu on mu's samples, as Python floats.

    KL(mu || pi_old) in nats per token by k1 = log mu - log pi_old and k3 = w - 1 - log w; mean and largest
    |log-ratio|; chi-squared divergence E[w²] - 1 by token. 0 for all where there are no response tokens.
    """
    mask_BT = check_mask(mask_BT, old_logp_BT.shape)
    log_ratio_BT = _log_ratio(old_logp_BT, sampler_logp_BT, mask_BT).double()
    values = {
        "mismatch/kl_k1": token_mean(-log_ratio_BT, mask_BT),
        "mismatch/kl_k3": token_mean(torch.expm1(log_ratio_BT) - log_ratio_BT, mask_BT),
        "mismatch/logp_abs_diff_mean": token_mean(log_ratio_BT.abs(), mask_BT),
        "mismatch/logp_abs_diff_max": log_ratio_BT.abs().amax(),
        "mismatch/chi2_token": token_mean(torch.expm1(2 * log_ratio_BT), mask_BT),
    }
    return to_floats(values)


def _log_ratio(logp_BT: Tensor, sampler_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log w = logp - sampler_logp, detached, 0 at padding."""
    sampler_logp_BT = masked_float("sampler_logp_BT", sampler_logp_BT.detach(), mask_BT)
    return masked_float("logp_BT", logp_BT.detach(), mask_BT) - sampler_logp_BT


def _correction_metrics(weights_BT: Tensor, changed_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """Mean weight, effective sample size as a fraction, and the share of tokens and responses changed."""
    weights_N = weights_BT[mask_BT].double()
    share = effective_share(weights_N.log()) if bool((weights_N > 0).any()) else weights_N.new_zeros(())
    return to_floats(
        {
            "mismatch/weight_mean": token_mean(weights_BT.double(), mask_BT),
            "mismatch/weight_ess": share,
            "mismatch/changed_frac_token": token_mean(changed_BT.double(), mask_BT),
            "mismatch/changed_frac_sequence": (changed_BT & mask_BT).any(dim=1).double().mean(),
        }
    )
