"""A dump of one loss call of another trainer: read, checked once, and how far its numbers can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_rl.objectives.diagnose.files import DumpError, read_entries

# Our name of each entry, and the names that TRL and verl give the same tensor.
ALIASES = {
    "logp": ("per_token_logps", "log_prob", "log_probs"),
    "old_logp": ("old_per_token_logps", "old_log_prob", "old_log_probs"),
    "mask": ("completion_mask", "response_mask"),
    "loss": ("pg_loss",),
    "advantages": (),
    "rewards": ("token_level_scores",),
    "ref_logp": ("ref_per_token_logps", "ref_log_prob"),
    "sampler_logp": ("sampling_per_token_logps", "rollout_log_probs"),
    "entropy": ("entropys",),
    "router_shift": (),
    "group_size": ("num_generations",),
    "clip_frac": (),
}
OUR_NAMES = {alias: name for name, aliases in ALIASES.items() for alias in (name, *aliases)}
REQUIRED = ("logp", "old_logp", "mask", "loss")
LOG_PROBABILITIES = ("logp", "old_logp", "ref_logp", "sampler_logp")
PER_TOKEN = (*LOG_PROBABILITIES, "entropy", "router_shift")
ROUNDED_ABOVE_ZERO = 1e-4  # nats; a log-softmax in low precision may end this far above 0
# How far a right recomputation may be off, relative to |loss| plus the responses' parts in quadrature.
# float64: verl adds 1e-8 to its divisors. float32: sums over many tokens. The others: one unit of rounding.
TOLERANCES = {
    torch.float64: 1e-7,
    torch.float32: 2e-6,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-8,
}


@dataclass(frozen=True)
class Dump:
    """The tensors of one loss call in float64, padding replaced by nothing: as they came."""

    logp: Tensor  # [B, T], nats
    old_logp: Tensor  # [B, T]
    mask: Tensor  # bool [B, T]
    loss: float
    advantages: Tensor | None = None  # [B], or [B, T] where they differ within a response
    rewards: Tensor | None = None  # [B]
    ref_logp: Tensor | None = None  # [B, T]
    sampler_logp: Tensor | None = None  # [B, T]
    entropy: Tensor | None = None  # [B, T], nats
    router_shift: Tensor | None = None  # [B, T], gamma in (0, 1]
    group_size: int | None = None
    clip_frac: float | None = None
    loss_dtype: torch.dtype = torch.float64  # the precision that the loss was computed in
    value_dtype: torch.dtype = torch.float64  # the coarsest precision of the tensors behind it
    ignored: tuple[str, ...] = ()  # entries of the file that have no meaning here
    doubts: tuple[str, ...] = ()  # what looks wrong with the numbers, a sentence each

    @property
    def tolerances(self) -> tuple[float, ...]:
        """Tight first: the loss's own precision, then that of the coarsest tensor where it is worse."""
        tight, coarse = TOLERANCES[self.loss_dtype], TOLERANCES[self.value_dtype]
        return (tight, coarse) if coarse > tight else (tight,)


def read_dump(path: str | Path) -> Dump:
    """A dump from .safetensors or .npz, never a pickle; DumpError where the file or an entry does not fit."""
    path = Path(path)
    entries, unread = read_entries(path, OUR_NAMES.keys())
    try:
        return make_dump(entries, unread)
    except DumpError as error:
        raise DumpError(f"{path}: {error}") from error


def make_dump(entries: Mapping[str, Tensor], unread: tuple[str, ...] = ()) -> Dump:
    """A checked Dump from tensors under our names or under TRL's and verl's; DumpError where one is amiss.

    logp, old_logp, ref_logp, sampler_logp, entropy, router_shift: [B, T]. mask: [B, T] of 0 and 1. loss,
    clip_frac, group_size: scalars. advantages: [B] or [B, T]. rewards: [B], [P, G] or, per token, [B, T].
    unread: names of a file's other entries.
    """
    found, ignored = _by_our_names(entries, unread)
    logp = found["logp"]
    if logp.ndim != 2:
        raise DumpError(
            f"logp must be [B, T] (responses, tokens), got {tuple(logp.shape)}: pad packed sequences"
        )
    mask = _mask(found["mask"], logp.shape)
    tensors = {name: _per_token(name, found[name], mask) for name in PER_TOKEN if name in found}
    _check_router_shift(tensors.get("router_shift"), mask)
    group_size = _group_size(found["group_size"], len(mask)) if "group_size" in found else None
    coarse = [_precision(found[name][mask]) for name in ("logp", "old_logp")]
    coarse += [found["advantages"].dtype] if "advantages" in found else []
    return Dump(
        logp=tensors["logp"],
        old_logp=tensors["old_logp"],
        mask=mask,
        loss=_scalar("loss", found["loss"]),
        advantages=_advantages(found.get("advantages"), mask),
        rewards=_rewards(found.get("rewards"), mask),
        ref_logp=tensors.get("ref_logp"),
        sampler_logp=tensors.get("sampler_logp"),
        entropy=tensors.get("entropy"),
        router_shift=tensors.get("router_shift"),
        group_size=group_size,
        clip_frac=_scalar("clip_frac", found["clip_frac"]) if "clip_frac" in found else None,
        loss_dtype=_loss_dtype(found["loss"]),
        value_dtype=max(coarse, key=lambda dtype: TOLERANCES.get(dtype, 0.0)),
        ignored=ignored,
        doubts=_doubts({name: tensors[name][mask] for name in LOG_PROBABILITIES if name in tensors}),
    )


def _by_our_names(
    entries: Mapping[str, Tensor], unread: tuple[str, ...]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    found: dict[str, Tensor] = {}
    for given, tensor in entries.items():
        name = OUR_NAMES.get(given)
        if name in found:
            raise DumpError(f"{name} is there twice, once as {given}: keep one")
        if name is not None:
            found[name] = tensor
    missing = [name for name in REQUIRED if name not in found]
    missing += [] if {"advantages", "rewards"} & found.keys() else ["advantages or rewards"]
    if missing:
        hint = "; a trainer that keeps no old_logp used logp itself: save it twice"
        raise DumpError(
            f"missing {', '.join(missing)}; got {', '.join(sorted([*entries, *unread])) or 'nothing'}"
            + (hint if "old_logp" in missing else "")
        )
    return found, tuple(sorted({*entries, *unread} - OUR_NAMES.keys()))


def _mask(mask: Tensor, shape: torch.Size) -> Tensor:
    if mask.shape != shape:
        raise DumpError(f"mask must have logp's shape {tuple(shape)}, got {tuple(mask.shape)}")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise DumpError("mask must hold only 0 and 1 (response token); got other values")
    if not bool(mask.any()):
        raise DumpError("mask has no response token: there is no loss to explain")
    return mask.bool()


def _per_token(name: str, values: Tensor, mask: Tensor) -> Tensor:
    if values.shape != mask.shape:
        raise DumpError(f"{name} must have logp's shape {tuple(mask.shape)}, got {tuple(values.shape)}")
    if values.dtype not in TOLERANCES:
        raise DumpError(f"{name} must be a floating tensor, got {values.dtype}")
    bad = int((~values[mask].isfinite()).sum())
    if bad:
        raise DumpError(f"{name} is NaN or infinite at {bad} response tokens: the dump or the mask is wrong")
    return values.double()


def _doubts(log_probabilities: Mapping[str, Tensor]) -> tuple[str, ...]:
    """What is odd about log-probabilities at response tokens, though a loss can be computed from it."""
    found = []
    for name, values_N in log_probabilities.items():
        above = int((values_N > ROUNDED_ABOVE_ZERO).sum())
        if above:
            found.append(
                f"{name} is above 0 at {above} response tokens, up to {float(values_N.max()):.4g}: "
                "log-probabilities in nats are not; are these probabilities, or negated?"
            )
    return tuple(found)


def _group_size(value: Tensor, rows: int) -> int:
    group_size = _scalar("group_size", value)
    if not group_size.is_integer() or group_size < 1 or rows % group_size:
        raise DumpError(f"group_size must divide the {rows} responses, got {group_size:g}")
    return int(group_size)


def _check_router_shift(gamma_BT: Tensor | None, mask: Tensor) -> None:
    if gamma_BT is not None and not bool(((gamma_BT > 0) & (gamma_BT <= 1))[mask].all()):
        raise DumpError("router_shift is gamma = exp(-shift) and must lie in (0, 1] on response tokens")


def _scalar(name: str, value: Tensor) -> float:
    if value.numel() != 1:
        raise DumpError(f"{name} must be one number, got shape {tuple(value.shape)}")
    number = float(value)
    if not np.isfinite(number):
        raise DumpError(f"{name} must be finite, got {number}")
    return number


def _advantages(values: Tensor | None, mask: Tensor) -> Tensor | None:
    """[B] where they are constant over each response, as trainers broadcast them; [B, T] otherwise."""
    if values is None:
        return None
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.shape not in (mask.shape, mask.shape[:1]):
        raise DumpError(
            f"advantages must be [B] or [B, T] with logp's [B, T] = {tuple(mask.shape)}, "
            f"got {tuple(values.shape)}"
        )
    values_BT = values[:, None].expand_as(mask) if values.ndim == 1 else values
    values_BT = torch.where(mask, _per_token("advantages", values_BT, mask), 0.0)
    if values.ndim == 1:
        return values.double()
    first_B = values_BT.gather(1, mask.int().argmax(dim=1, keepdim=True))[:, 0]
    constant = torch.where(mask, values_BT == first_B[:, None], True).all()
    return first_B if bool(constant) else values_BT


def _rewards(values: Tensor | None, mask: Tensor) -> Tensor | None:
    if values is None:
        return None
    if values.shape == mask.shape:  # rewards per token, as verl keeps them
        values = torch.where(mask, values, torch.zeros_like(values)).sum(dim=1)
    if values.numel() != len(mask) or values.ndim > 2:
        raise DumpError(
            f"rewards must be [B], [P, G] or [B, T] for {len(mask)} responses, got {tuple(values.shape)}"
        )
    if not bool(values.isfinite().all()):
        raise DumpError("rewards must be finite; got NaN or infinity")
    return values.reshape(-1).double()


def _precision(values: Tensor) -> torch.dtype:
    """The coarsest dtype that holds the values exactly: numpy has no bfloat16, so dumps are often upcast."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if bool((values.to(dtype).to(values.dtype) == values).all()):
            return dtype
    return values.dtype


def _loss_dtype(loss: Tensor) -> torch.dtype:
    """float32 for a float64 that holds a float32, as loss.item() gives."""
    if loss.dtype in (torch.bfloat16, torch.float16):
        return loss.dtype
    return torch.float32 if bool(loss.float().double() == loss.double()) else torch.float64
