"""Advantages from rewards: relative to the other responses of the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_rl.objectives.options import check_group_size

# (degrees of freedom taken off for the standard deviation, epsilon added to it)
_STD_CONVENTIONS = {
    "paper": (1, 0.0),
    "population": (0, 0.0),
    "trl": (1, 1e-4),
    "verl": (1, 1e-6),
}
NORMALISATIONS = (*_STD_CONVENTIONS, "mean", "leave-one-out")
# Sums of a few reward terms in another order differ by this many units of rounding at most.
ROUNDING_UNITS = 8


def group_advantages(rewards: Tensor, group_size: int | None = None, *, normalise: str = "paper") -> Tensor:
    """Group-relative advantages, in the shape of the rewards, in their precision or float32.

    rewards: [P, G], the G responses of each of P prompts; or [P * G] with group_size = G, the responses of a
    prompt next to each other. normalise:
      "paper"          (r - mean) / std (GSPO paper Eq. 3). The equation leaves the degrees of freedom open;
                       this is the sample standard deviation (ddof 1) that TRL, verl and slime all use
      "population"     the same with ddof 0
      "trl", "verl"    ddof 1 with 1e-4, 1e-6 added to the standard deviation (slime's is verl's)
      "mean"           r - mean (Dr.GRPO, 2503.20783; MiniRL, 2512.01374)
      "leave-one-out"  r - mean of the others (RLOO, 2402.14740) = (r - mean) G / (G - 1)
    A group whose rewards are equal up to rounding (equal_rewards), and so a group of one, gets exactly 0
    under every convention (verl instead passes the reward of a group of one through as its advantage).
    Raises ValueError on an unknown convention, a wrong shape, or rewards that are not finite; TypeError on a
    group_size that is no integer.
    """
    _check_normalise(normalise)
    grouped_PG = _grouped(rewards, group_size)
    if not bool(grouped_PG.isfinite().all()):
        raise ValueError("rewards must be finite; got NaN or infinity: score failed responses with a number")
    present_PG = torch.ones_like(grouped_PG, dtype=torch.bool)
    return _relative(grouped_PG, present_PG, normalise).reshape(rewards.shape)


def turn_advantages(
    rewards: Tensor, turn_ids_BT: Tensor, group_size: int | None = None, *, normalise: str = "paper"
) -> Tensor:
    """Advantages [B, T] of responses that are rewarded turn by turn, for gspo_token (GSPO paper Eq. 13).

    rewards: [P, G, N] for N turns, or [P * G, N] with group_size = G, the responses of a prompt next to each
    other. turn_ids_BT: integer [B, T], the turn 0 to N - 1 that a token belongs to, -1 outside responses.
    Each turn's rewards are normalised over the responses of the prompt that have it, by the conventions of
    group_advantages; a turn that a response has no token of is left out of its group, its reward unread (NaN
    will do). All tokens of a turn get its advantage, tokens outside get 0. Raises ValueError on an unknown
    convention, a wrong shape, a turn id out of range or a reward that is not finite, TypeError on turn ids
    that are no integers.
    """
    _check_normalise(normalise)
    rewards_PGN = _grouped_turns(rewards, group_size)
    prompts, group, turns = rewards_PGN.shape
    if turn_ids_BT.is_floating_point() or turn_ids_BT.dtype == torch.bool:
        raise TypeError(f"turn_ids_BT must hold integers, got {turn_ids_BT.dtype}")
    if turn_ids_BT.ndim != 2 or len(turn_ids_BT) != prompts * group:
        raise ValueError(
            f"turn_ids_BT must be [B, T] for the {prompts * group} responses of the rewards, "
            f"got {tuple(turn_ids_BT.shape)}"
        )
    if not bool(((turn_ids_BT >= -1) & (turn_ids_BT < turns)).all()):
        raise ValueError(f"turn_ids_BT must lie in -1 (outside responses) to {turns - 1}, the last turn")
    present_BN = (turn_ids_BT[:, :, None] == torch.arange(turns, device=turn_ids_BT.device)).any(dim=1)
    present_PGN = present_BN.reshape(rewards_PGN.shape)
    if not bool((rewards_PGN.isfinite() | ~present_PGN).all()):
        raise ValueError("rewards of turns with tokens must be finite; got NaN or infinity")
    # A prompt's responses at one turn are a group.
    rewards_QG = rewards_PGN.transpose(1, 2).reshape(-1, group)
    advantages_QG = _relative(rewards_QG, present_PGN.transpose(1, 2).reshape(-1, group), normalise)
    advantages_BN = advantages_QG.reshape(prompts, turns, group).transpose(1, 2).reshape(-1, turns)
    advantages_BT = advantages_BN.gather(1, turn_ids_BT.long().clamp(min=0))
    return advantages_BT.masked_fill(turn_ids_BT < 0, 0)


def equal_rewards(rewards_PG: Tensor) -> Tensor:
    """Whether the rewards of each group are equal up to rounding, bool [P]: such a group teaches nothing.

    Equal means a spread of at most 8 eps max|r|, eps that of the rewards' dtype: 1.8e-15 of the largest
    reward in float64, 9.5e-7 in float32. So 0.3 and 0.1 + 0.2 are equal: a division by the standard deviation
    of their rounding error would make full-size advantages of it. Half precisions and integers are judged by
    float32's eps.
    """
    return _equal(_as_float(rewards_PG), torch.ones_like(rewards_PG, dtype=torch.bool))


def _equal(rewards_PG: Tensor, present_PG: Tensor) -> Tensor:
    """equal_rewards over the responses that are present."""
    eps = torch.finfo(rewards_PG.dtype).eps
    rewards_PG = rewards_PG.double()
    highest_P = rewards_PG.masked_fill(~present_PG, -torch.inf).amax(dim=1)
    lowest_P = rewards_PG.masked_fill(~present_PG, torch.inf).amin(dim=1)
    # Halves, because the spread itself may overflow.
    spread_P = highest_P / 2 - lowest_P / 2
    return spread_P <= ROUNDING_UNITS / 2 * eps * torch.maximum(highest_P.abs(), lowest_P.abs())


def _relative(rewards_PG: Tensor, present_PG: Tensor, normalise: str) -> Tensor:
    """Advantages [P, G] among the responses of each group that are present, and 0 for the others."""
    values_PG = rewards_PG.double().masked_fill(~present_PG, 0)
    # In units of the power of two below the largest reward: squares neither overflow nor vanish, and exactly.
    exponent_P1 = torch.frexp(values_PG.abs().amax(dim=1, keepdim=True)).exponent - 1
    unit_P1 = torch.pow(2.0, exponent_P1.double())
    values_PG = values_PG / unit_P1
    size_P1 = present_PG.sum(dim=1, keepdim=True).double()
    mean_P1 = values_PG.sum(dim=1, keepdim=True) / size_P1.clamp(min=1)
    centred_PG = (values_PG - mean_P1).masked_fill(~present_PG, 0)
    if normalise == "leave-one-out":
        advantages_PG = centred_PG * unit_P1 * (size_P1 / (size_P1 - 1).clamp(min=1))
    elif normalise == "mean":
        advantages_PG = centred_PG * unit_P1
    else:
        ddof, epsilon = _STD_CONVENTIONS[normalise]
        squares_P1 = centred_PG.square().sum(dim=1, keepdim=True)
        std_P1 = (squares_P1 / (size_P1 - ddof).clamp(min=1)).sqrt()
        advantages_PG = centred_PG / (std_P1 + epsilon / unit_P1)
    idle_P1 = _equal(rewards_PG, present_PG)[:, None] | (size_P1 < 2)
    return advantages_PG.masked_fill(idle_P1 | ~present_PG, 0).to(rewards_PG.dtype)


def _check_normalise(normalise: str) -> None:
    if normalise not in NORMALISATIONS:
        raise ValueError(f"unknown normalise {normalise!r}; known: {', '.join(NORMALISATIONS)}")


def _as_float(rewards: Tensor) -> Tensor:
    return rewards.to(torch.promote_types(rewards.dtype, torch.float32))


def _grouped(rewards: Tensor, group_size: int | None) -> Tensor:
    """Rewards as [P, G] in float32 or wider."""
    check_group_size(group_size)
    rewards = _as_float(rewards)
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


def _grouped_turns(rewards: Tensor, group_size: int | None) -> Tensor:
    """Rewards as [P, G, N] in float32 or wider."""
    check_group_size(group_size)
    rewards = _as_float(rewards)
    if rewards.ndim == 3 and group_size in (None, rewards.shape[1]) and rewards.shape[2]:
        return rewards
    has_turns = rewards.ndim == 2 and rewards.shape[1] > 0
    if has_turns and group_size and len(rewards) % group_size == 0:
        return rewards.reshape(-1, group_size, rewards.shape[1])
    raise ValueError(
        "rewards by turn must be [P, G, N], or [P * G, N] with group_size = G, got shape "
        f"{tuple(rewards.shape)} and group_size {group_size}"
    )
