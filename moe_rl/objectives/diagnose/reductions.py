"""The ways from token sums to a loss that are tried: aggregation, regularisers, constant factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.objectives.diagnose.choices import Choice, Settings

FACTORS = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128)
KL_COEFFICIENTS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.05, 0.1)
ENTROPY_COEFFICIENTS = (0.001, 0.01)
ROUND_LENGTHS = sorted({2**k for k in range(6, 18)} | {1000 * k for k in (1, 2, 3, 4, 8, 10, 16, 20, 32)})
_SUM_NORM = "seq-mean-token-sum-norm"


@dataclass(frozen=True, kw_only=True)
class Aggregation(Choice):
    """Weights [B] of the responses' token sums, from their token counts [B]: every way here is linear."""

    mode: str
    weights: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Term(Choice):
    """Regularisers added to the loss: (which, coefficient) pairs, each aggregated like the objective."""

    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Factor(Choice):
    """A constant that multiplies the whole loss."""

    value: float


def aggregations(mask_BT: Tensor, settings: Settings) -> list[Aggregation]:
    """Documented aggregations first, then those that are mistakes or need a guess."""
    rows, width = mask_BT.shape
    counts_B = mask_BT.sum(dim=1)
    documented = [
        Aggregation("seq-mean-token-mean", mode="seq-mean-token-mean", weights=_per_response(rows)),
        Aggregation("token-mean", mode="token-mean", weights=_per_token),
        Aggregation("seq-mean-token-sum", mode="seq-mean-token-sum", weights=_over(rows)),
    ]
    if settings.length_divisor is not None:
        documented.append(sum_norm(rows, settings.length_divisor))
    if settings.length_divisor != width:
        note = "the divisor is the padded width, as .mean() over the padded tensor has it too"
        documented.append(sum_norm(rows, width, note=note))
    present = int((counts_B > 0).sum())
    if present < rows:
        by_response = [choice for choice in documented if choice.mode != "token-mean"]
        documented += [_without_empty(choice, rows / present) for choice in by_response]
    return [*documented, *_departures(rows, width, int(counts_B.max()), settings)]


def sum_norm(rows: int, length: float, cost: int = 0, note: str = "") -> Aggregation:
    """Dr.GRPO's: the sum over tokens divided by responses times a constant length."""
    return Aggregation(f"{_SUM_NORM} /{length:g}", cost, note, mode=_SUM_NORM, weights=_over(rows * length))


def _departures(rows: int, width: int, longest: int, settings: Settings) -> list[Aggregation]:
    found = [
        Aggregation("token-sum", 1, "nothing divides the sum over tokens", mode="token-sum", weights=_over(1))
    ]
    if longest != width:
        note = "the divisor is the batch's longest response, so that it changes from batch to batch"
        found.append(sum_norm(rows, longest, 1, note))
    note = "a divisor guessed from the loss"
    found += [sum_norm(rows, length, 1, note) for length in ROUND_LENGTHS if length > width]
    for size in range(2, rows):
        if rows % size == 0:
            name = f"token-mean of every {size} rows"
            note = f"token means of micro-batches of {size}, averaged: the loss depends on the split"
            weights = _by_micro_batch(rows, size)
            found.append(Aggregation(name, 1, note, mode="token-mean", weights=weights))
    return found


def _per_token(counts_B: Tensor) -> Tensor:
    return torch.ones_like(counts_B) / counts_B.sum()


def _per_response(rows: int) -> Callable[[Tensor], Tensor]:
    return lambda counts_B: 1 / (counts_B.clamp(min=1) * rows)


def _over(divisor: float) -> Callable[[Tensor], Tensor]:
    return lambda counts_B: torch.ones_like(counts_B) / divisor


def _without_empty(base: Aggregation, factor: float) -> Aggregation:
    note = "responses without tokens are left out of the divisor, as verl does; TRL counts them as 0"
    name = f"{base.name}, empty left out"
    return Aggregation(name, 0, note, mode=base.mode, weights=lambda n: base.weights(n) * factor)


def _by_micro_batch(rows: int, size: int) -> Callable[[Tensor], Tensor]:
    def weights(counts_B: Tensor) -> Tensor:
        tokens = counts_B.reshape(-1, size).sum(dim=1, keepdim=True).clamp(min=1)
        return (1 / tokens).expand(-1, size).flatten() / (rows // size)

    return weights


def terms(settings: Settings, *, reference: bool, entropy: bool) -> list[Term]:
    """Regularisers: none, a KL to the reference where the dump has one, an entropy bonus likewise."""
    none = Term("", parts=())
    kl = [none, *(_kl_terms(settings.kl_coef) if reference else [])]
    bonus = [none, *(_entropy_terms(settings.entropy_coef) if entropy else [])]
    return [
        Term(f"{a.name} {b.name}".strip(), a.cost + b.cost, a.note or b.note, parts=a.parts + b.parts)
        for a in kl
        for b in bonus
    ]


def _kl_terms(known: float | None) -> list[Term]:
    found = []
    for coefficient in KL_COEFFICIENTS if known is None else (known,):
        for which in ("k1", "k2", "k3", "ratio*k3"):
            weighted = which == "ratio*k3"
            note = "TRL multiplies k3 by the ratio unless use_bias_correction_kl=False" if weighted else ""
            name = f"+ {coefficient:g} KL {which}"
            found.append(Term(name, int(known is None), note, parts=((which, coefficient),)))
    return found


def _entropy_terms(known: float | None) -> list[Term]:
    found = []
    for coefficient in ENTROPY_COEFFICIENTS if known is None else (known,):
        for which in ("entropy", "token-mean entropy"):
            name = f"- {coefficient:g} {which}"
            found.append(Term(name, int(known is None), parts=((which, -coefficient),)))
    return found


def factors(rows: int, group_size: int | None) -> list[Factor]:
    """1, a flipped sign, and the constants that accumulation, world size or a wrong divisor leave behind."""
    found = [Factor("", value=1.0), Factor("× -1", 1, "the sign is flipped", value=-1.0)]
    numbers = {float(number) for number in FACTORS} | {float(rows)}
    numbers |= {float(group_size), rows / group_size} if group_size else set()
    note = "a constant factor: gradient accumulation, world size, or the number of responses or prompts"
    for number in sorted(numbers - {1.0}):
        found.append(Factor(f"× {number:g}", 1, note, value=number))
        found.append(Factor(f"× 1/{number:g}", 1, note, value=1 / number))
    return found
