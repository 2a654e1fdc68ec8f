"""KL to a reference policy and entropy bonus: terms that any objective can carry."""

from __future__ import annotations

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(logp_BT: Tensor, ref_logp_BT: Tensor, estimator: str = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference) on the policy's own samples, nats, shape [B, T].

    With k = logp - ref_logp: k1 = k (unbiased, may be negative), k2 = k² / 2, k3 = exp(-k) - 1 + k
    (unbiased, never negative; Schulman, "Approximating KL divergence", 2020). As a loss term k1 has zero
    expected gradient, while k2's gradient is that of the KL; GRPO (2402.03300 Eq. 4) uses k3.
    """
    k_BT = logp_BT - ref_logp_BT
    if estimator == "k1":
        return k_BT
    if estimator == "k2":
        return 0.5 * k_BT.square()
    if estimator == "k3":
        return torch.expm1(-k_BT) + k_BT
    raise ValueError(f"unknown kl_estimator {estimator!r}; known: {', '.join(KL_ESTIMATORS)}")
