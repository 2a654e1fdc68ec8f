"""Advantages from rewards: relative to the other responses of the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

# (degrees of freedom taken off for the standard deviation, epsilon added to it)
_STD_CONVENTIONS = {
    "paper": (1, 0.0),
    "population": (0, 0.0),
    "trl": (1, 1e-4),
    "verl": (1, 1e-6),
}
NORMALISATIONS = (*_STD_CONVENTIONS, "mean", "leave-one-out")


def group_advantages(rewards: Tensor, group_size: int | None = None, *, normalise: str = "paper") -> Tensor:
    """Group-relative advantages, in the shape of the rewards.

    rewards: [P, G], the G responses of each of P prompts; or [P * G] with group_size = G, the responses of a
    prompt next to each other. normalise:
      "paper"          (r - mean) / std (GSPO paper Eq. 3). The equation leaves the degrees of freedom open;
                       this is the sample standard deviation (ddof 1) that TRL, verl and slime all use
      "population"     the same with ddof 0
      "trl", "verl"    ddof 1 with 1e-4, 1e-6 added to the standard deviation (slime's is verl's)
      "mean"           r - mean (Dr.GRPO, 2503.20783; MiniRL, 2512.01374)
      "leave-one-out"  r - mean of the others (RLOO, 2402.14740) = (r - mean) G / (G - 1)
    A group whose rewards are all equal, and so a group of one, gets exactly 0 under every convention
    (verl instead passes the reward of a group of one through as its advantage).
    Raises ValueError on an unknown convention, a wrong shape, or rewards that are not finite.
    """
    if normalise not in NORMALISATIONS:
        raise ValueError(f"unknown normalise {normalise!r}; known: {', '.join(NORMALISATIONS)}")
    grouped_PG = _grouped(rewards, group_size)
    if not bool(grouped_PG.isfinite().all()):
        raise ValueError("rewards must be finite; got NaN or infinity: score failed responses with a number")
    centred_PG = grouped_PG - grouped_PG.mean(dim=1, keepdim=True)
    group = grouped_PG.shape[1]
    if normalise == "leave-one-out":
        advantages_PG = centred_PG * (group / max(group - 1, 1))
    elif normalise == "mean":
        advantages_PG = centred_PG
    else:
        ddof, epsilon = _STD_CONVENTIONS[normalise]
        variance_P1 = centred_PG.square().sum(dim=1, keepdim=True) / max(group - ddof, 1)
        advantages_PG = centred_PG / (variance_P1.sqrt() + epsilon)
    # The mean of equal rewards can be off by a rounding error, which a division by std would blow up to 1.
    equal_P1 = (grouped_PG == grouped_PG[:, :1]).all(dim=1, keepdim=True)
    return torch.where(equal_P1, torch.zeros_like(advantages_PG), advantages_PG).reshape(rewards.shape)


def _grouped(rewards: Tensor, group_size: int | None) -> Tensor:
    """Rewards as [P, G] in float32 or wider."""
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    if rewards.ndim == 2:
        if group_size not in (None, rewards.shape[1]):
            raise ValueError(f"rewards [P, G] are {tuple(rewards.shape)} but group_size is {group_size}")
        return rewards
    if rewards.ndim == 1 and group_size and len(rewards) % group_size == 0:
        return rewards.reshape(-1, group_size)
    raise ValueError(
        f"rewards must be [P, G], or [P * G] with group_size = G, got shape {tuple(rewards.shape)} "
        f"and group_size {group_size}"
    )
