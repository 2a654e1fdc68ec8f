"""What all objectives share: the call, the aggregation, the regularisers and the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
from torch import Tensor

from moe_rl.objectives.aggregation import aggregate, check_aggregation, masked
from moe_rl.objectives.batch import Batch, masked_float, prepare_batch
from moe_rl.objectives.metrics import policy_metrics, to_floats
from moe_rl.objectives.options import check_option_types
from moe_rl.objectives.regularisers import KL_ESTIMATORS, kl_estimate


@dataclass(frozen=True)
class Surrogate:
    """What an objective says about each token, before aggregation."""

    objective: Tensor  # [B, T], to be maximised; carries the gradient
    clipped: Tensor  # bool [B, T]: clipping removes the gradient (CISPO: caps it), given the advantage's sign
    outside: Tensor  # bool [B, T]: the ratio is outside the interval, whatever the sign
    penalty: Tensor | None = (
        None  # [B, T], a loss of its own, which weights_BT leaves alone (PPO: the values)
    )
    metrics: dict[str, Tensor] = field(default_factory=dict)  # scalars of this objective alone


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Hyper-parameters of an objective; calling it gives (loss, metrics).

    aggregation: one of AGGREGATIONS. length_divisor: tokens, for seq-mean-token-sum-norm alone.
    kl_coef, kl_estimator: adds kl_coef * KL(policy || reference), estimated by k1, k2 or k3; the call then
    takes ref_logp_BT. entropy_coef: subtracts entropy_coef * entropy; the call then takes entropy_BT.
    """

    aggregation: str = "seq-mean-token-mean"
    length_divisor: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0

    needs: ClassVar[tuple[str, ...]] = ()  # keyword tensors [B, T] that the call must be given

    def __post_init__(self) -> None:
        check_option_types(self)
        check_aggregation(self.aggregation, self.length_divisor)
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ValueError(f"unknown kl_estimator {self.kl_estimator!r}; known: {', '.join(KL_ESTIMATORS)}")
        for option in fields(self):
            value = getattr(self, option.name)
            if value is not None and not isinstance(value, str) and not value >= 0:  # NaN fails too
                raise ValueError(f"{option.name} must be a number >= 0, got {value}")

    def surrogate(self, batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        """Per-token objective of a checked batch; `tensors` holds those named in `needs`, masked."""
        raise NotImplementedError

    def __call__(
        self,
        logp_BT: Tensor,
        old_logp_BT: Tensor,
        advantages: Tensor,
        mask_BT: Tensor,
        *,
        sequences: float | None = None,
        tokens: float | None = None,
        **tensors: Tensor | None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss (a scalar to minimise) and detached metrics of one batch or micro-batch.

        logp_BT, old_logp_BT: [B, T] log-probabilities in nats of the sampled tokens; only logp_BT gets a
        gradient. advantages: [B] or [B, T]. mask_BT: 1 on response tokens. sequences, tokens: counts of the
        whole mini-batch when this is a part of it; losses of the parts then add up to the mini-batch's.
        Keyword tensors, all [B, T]: those in `needs`; ref_logp_BT when kl_coef > 0 and entropy_BT when
        entropy_coef > 0 (either may be given without, and is then only reported); weights_BT, detached
        factors of each token's objective (train/inference mismatch, see moe_rl.objectives.mismatch).
        A row without response tokens counts as a response with zero loss. Finite for token log-ratios within
        +-20 nats at any length. Raises ValueError or TypeError on tensors that do not fit.
        """
        batch = prepare_batch(logp_BT, old_logp_BT, advantages, mask_BT, sequences=sequences, tokens=tokens)
        extra = self._checked(tensors, batch)
        surrogate = self.surrogate(batch, extra)
        objective_BT = surrogate.objective
        if "weights_BT" in extra:
            objective_BT = objective_BT * extra["weights_BT"].detach()
        loss = -self._aggregate(objective_BT, batch)
        if surrogate.penalty is not None:
            loss = loss + self._aggregate(surrogate.penalty, batch)
        metrics = dict(surrogate.metrics)
        if "ref_logp_BT" in extra:
            kl_BT = kl_estimate(batch.logp, extra["ref_logp_BT"].detach(), self.kl_estimator)
            loss = loss + self.kl_coef * self._aggregate(kl_BT, batch) if self.kl_coef else loss
            metrics[f"kl/reference_{self.kl_estimator}"] = token_mean(kl_BT, batch.mask)
            metrics["kl/reference_aggregated"] = self._aggregate(kl_BT, batch)
        if "entropy_BT" in extra:
            entropy_BT = extra["entropy_BT"]
            loss = (
                loss - self.entropy_coef * self._aggregate(entropy_BT, batch) if self.entropy_coef else loss
            )
            metrics["entropy/token_mean"] = token_mean(entropy_BT, batch.mask)
            metrics["entropy/aggregated"] = self._aggregate(entropy_BT, batch)
        shared = policy_metrics(batch, surrogate.clipped, surrogate.outside)
        return loss, {**shared, **(to_floats(metrics) if metrics else {})}

    def _aggregate(self, values_BT: Tensor, batch: Batch) -> Tensor:
        return aggregate(
            values_BT,
            batch.mask,
            self.aggregation,
            sequences=batch.sequences,
            tokens=batch.tokens,
            length_divisor=self.length_divisor,
        )

    def _checked(self, tensors: dict[str, Tensor | None], batch: Batch) -> dict[str, Tensor]:
        """The keyword tensors that were given, masked; ValueError if one is missing or has no use here."""
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        required = [*self.needs]
        required += ["ref_logp_BT"] if self.kl_coef else []
        required += ["entropy_BT"] if self.entropy_coef else []
        missing = [name for name in required if name not in given]
        known = {*required, "ref_logp_BT", "entropy_BT", "weights_BT"}
        unknown = sorted(given.keys() - known)
        if missing or unknown:
            raise ValueError(
                f"{type(self).__name__} takes the keyword tensors {sorted(known)} and here needs {required}: "
                f"missing {missing}, not taken {unknown}"
            )
        dtype = batch.logp.dtype
        return {name: masked_float(name, tensor, batch.mask).to(dtype) for name, tensor in given.items()}


def token_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Detached mean over all response tokens; 0 where there are none."""
    return masked(values_BT.detach(), mask_BT).sum() / mask_BT.sum().clamp(min=1)


def outside_interval(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(clipped, outside) of ratios against [low, high]: with and without regard to the advantage's sign.

    A ratio above the interval loses its gradient only under a positive advantage, one below only under a
    negative one: elsewhere min(r A, clip(r) A) keeps the unclipped branch (GSPO paper Eq. 2 and 5).
    """
    above, below = ratio > high, ratio < low
    return (above & (advantages > 0)) | (below & (advantages < 0)), above | below


def clipped_objective(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """min(r A, clip(r, low, high) A) with (clipped, outside), for token or sequence log-ratios in nats.

    dual_clip = c bounds the loss where A < 0: max(that, c A) (Ye et al., 1912.09729). Clipped entries leave
    the graph before exp(), so their gradient is exactly 0 even where r overflows.
    """
    ratio = log_ratio.detach().exp()
    clipped, outside = outside_interval(ratio, advantages, low, high)
    bound = torch.full_like(ratio, low).masked_fill(advantages > 0, high)
    if dual_clip is not None:
        capped = beyond_dual_clip(ratio, advantages, dual_clip)
        clipped, bound = clipped | capped, bound.masked_fill(capped, dual_clip)
    ratio = torch.where(clipped, torch.zeros_like(log_ratio), log_ratio).exp()
    return torch.where(clipped, bound, ratio) * advantages, clipped, outside


def beyond_dual_clip(ratio: Tensor, advantages: Tensor, dual_clip: float) -> Tensor:
    """Where the dual clip, and not the interval, bounds the objective."""
    return (ratio > dual_clip) & (advantages < 0)


def never(values_BT: Tensor) -> Tensor:
    """The clip flags of an objective that clips nothing."""
    return torch.zeros_like(values_BT, dtype=torch.bool)
