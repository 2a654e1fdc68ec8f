"""How alike the gradients of mini-batches are: their cosines, their shared part and its noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_rl.objectives import Objective
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.forward import Forced, Native
from moe_rl.training.learner import Learner
from moe_rl.training.policy import score
from moe_rl.training.signal import Signal

Routing = Native | Forced


@dataclass(frozen=True)
class GradientNoise:
    """Of N mini-batch gradients g_i.

    n               how many they are
    cosine_pairs    mean cosine of two different ones
    cosine_full     mean cosine of g_i and the mean of all, in which it has a part of 1/N itself
    cosine_rest     mean cosine of g_i and the mean of the others
    signal          |G|², of the gradient that all mini-batches share: the mean product of two different ones.
                    Unbiased, so that noise can make it negative.
    noise           tr Σ, the variance of one mini-batch's gradient: the mean square less `signal`. Unbiased.
    norm            root of the mean square of |g_i|

    tr Σ / |G|² is the noise scale in mini-batches: how many must be averaged before noise and signal are
    equal (B_simple of arXiv 1812.06162). It is made of means of both over seeds, since a mean of ratios is
    ruled by the smallest denominator.
    """

    n: int
    cosine_pairs: float
    cosine_full: float
    cosine_rest: float
    signal: float
    noise: float
    norm: float


def inner_products(gradients_ND: Tensor) -> Tensor:
    """g_i · g_j [N, N], float64: all that noise is computed from."""
    gradients_ND = gradients_ND.double()
    return gradients_ND @ gradients_ND.T


def gradient_noise(dot_NN: Tensor) -> GradientNoise:
    """Compare N gradients by their `inner_products`. Raises ValueError for fewer than two, or one of 0."""
    n, square_N = len(dot_NN), dot_NN.diagonal()
    if n < 2 or not bool((square_N > 0).all()):
        raise ValueError(f"expected at least two gradients that are not 0 to compare, got {n}")
    norm_N = square_N.sqrt()
    apart_NN = ~torch.eye(n, dtype=torch.bool)
    cosine_NN = dot_NN / (norm_N[:, None] * norm_N)
    full_N = dot_NN.sum(1)  # products with the sum of all
    rest_N = full_N - square_N
    rest_norm_N = (dot_NN.sum() - 2 * full_N + square_N).clamp(min=0).sqrt()
    signal = dot_NN[apart_NN].mean()
    return GradientNoise(
        n,
        cosine_pairs=float(cosine_NN[apart_NN].mean()),
        cosine_full=float((full_N / (norm_N * dot_NN.sum().clamp(min=0).sqrt())).mean()),
        cosine_rest=float((rest_N / (norm_N * rest_norm_N)).mean()),
        signal=float(signal),
        noise=float(square_N.mean() - signal),
        norm=float(square_N.mean().sqrt()),
    )


def minibatch_gradient(
    learner: Learner,
    objective: Objective,
    batch: RolloutBatch,
    old_logp_BT: Tensor,
    routing: Routing,
    signal: Signal,
    minibatch: list[slice],
) -> Tensor:
    """The gradient [D] of an objective on one mini-batch, at the learner's policy, on the CPU; nothing moves.

    `routing` is of the whole batch: native, or what replay forces. It is the gradient before any clipping of
    its norm, over all trained parameters in their order.
    """
    target = signal[slice(minibatch[0].start, minibatch[-1].stop)]
    learner.trained.zero_grad()
    for rows in minibatch:
        scores = score(
            learner.policy,
            batch[rows],
            learner.config.rollout.temperature,
            routing=routing if isinstance(routing, Native) else routing[rows],
            share_prompts=learner.share_prompts,
        )
        part = signal[rows]
        keywords: dict[str, Any] = part.tensors
        loss, _ = objective(
            scores.logp_BT,
            old_logp_BT[rows],
            part.advantages,
            part.mask_BT,
            sequences=len(target.mask_BT),
            tokens=max(int(target.mask_BT.sum()), 1),
            **keywords,
        )
        loss.backward()
    parts = [
        torch.zeros(p.numel()) if p.grad is None else p.grad.detach().cpu().flatten()
        for p in learner.trained.parameters()
    ]
    learner.trained.zero_grad()
    return torch.cat(parts)
