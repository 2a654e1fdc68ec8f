"""Variance of log-ratios against response length, with and without length normalisation.

With d_t the log-ratio of token t and n the length, the sequence ratio of GSPO (arXiv 2507.18071, Eq. 7) is
exp(m), m = mean_t d_t; without normalisation it is the product exp(n m). If the d_t are independent with
variance σ², Var m = σ²/n and Var(n m) = σ² n. What they share (a response on which every token became
likelier) makes both larger, by the same factor: the inflation n Var m / σ². Under a correlation that dies out
with the distance, an AR(1) of coefficient ρ, it grows to (1 + ρ) / (1 - ρ) and stays there; where τ² of σ² is
common to a response, it grows as 1 + (n - 1) τ²/σ², and Var m does not fall below τ².
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_rl.laboratory.clip_units import RANGES, clip_unit_sums
from moe_rl.laboratory.sums import ResponseSums

FLOAT32 = (math.log(torch.finfo(torch.float32).tiny), math.log(torch.finfo(torch.float32).max))


def length_sums(log_ratio_BN: Tensor, lengths: Sequence[int]) -> dict[str, ResponseSums]:
    """By metric, a column for each length n: the first n tokens of every response.

    log_ratio_BN: log-ratios of B responses of N tokens, nats. Raises ValueError for fewer than two responses
    and for a length that they do not have. Metrics, beside those of `clip_unit_sums`:

    token/variance          σ²: mean square of d about its mean over the n tokens of all responses, nats²
    sequence/mean           mean of m over responses, nats
    sequence/variance       Var m over responses (unbiased), nats²; sequence/independent: σ²/n
    product/variance        Var n m, nats²; product/independent: σ² n
    inflation               n Var m / σ²
    product/outside         share of responses whose product lies outside GRPO's range
    product/not_float32     share of responses whose product float32 cannot hold as a normal number

    Intervals resample responses; the mean that variances are taken about stays that of all of them.
    """
    B, N = log_ratio_BN.shape
    if B < 2 or not lengths or min(lengths) < 1 or max(lengths) > N:
        raise ValueError(
            f"expected at least 2 responses and lengths of 1 to {N} tokens, got {B} responses and lengths "
            f"{list(lengths)}"
        )
    columns: dict[str, list[ResponseSums]] = {}
    for n in lengths:
        for metric, sums in _of_length(log_ratio_BN[:, :n].cpu().double()).items():
            columns.setdefault(metric, []).append(sums)
    return {
        metric: ResponseSums(
            torch.cat([part.sums_BC for part in parts], dim=1),
            torch.cat([part.counts_BC for part in parts], dim=1),
        )
        for metric, parts in columns.items()
    }


def _of_length(token_Bn: Tensor) -> dict[str, ResponseSums]:
    B, n = token_Bn.shape
    one_B = torch.ones(B, dtype=torch.float64)
    mean_B, sum_B = token_Bn.mean(1), token_Bn.sum(1)
    square_B = (token_Bn - token_Bn.mean()).square().sum(1)  # n σ² of each response
    apart_B = (mean_B - mean_B.mean()).square() * B / (B - 1)
    outside_B = RANGES["grpo"].units(sum_B) > 1
    unheld_B = (sum_B < FLOAT32[0]) | (sum_B > FLOAT32[1])
    sums = {
        "token/variance": (square_B, n * one_B),
        "sequence/mean": (sum_B, n * one_B),
        "sequence/variance": (apart_B, one_B),
        "sequence/independent": (square_B / n**2, one_B),
        "product/variance": (apart_B * n**2, one_B),
        "product/independent": (square_B, one_B),
        "inflation": (apart_B * n**2, square_B),
        "product/outside": (outside_B.double(), one_B),
        "product/not_float32": (unheld_B.double(), one_B),
    }
    own = {metric: ResponseSums(s[:, None], c[:, None]) for metric, (s, c) in sums.items()}
    return own | clip_unit_sums(token_Bn, torch.ones_like(token_Bn))
