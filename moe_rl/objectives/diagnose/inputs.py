"""The conventions about what enters an objective: mask, ratio, sampler correction, advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_rl.objectives import MISMATCH_CORRECTIONS, NORMALISATIONS, group_advantages
from moe_rl.objectives.aggregation import masked, sequence_mean
from moe_rl.objectives.batch import Batch
from moe_rl.objectives.diagnose.choices import Choice
from moe_rl.objectives.diagnose.dump import Dump
from moe_rl.objectives.diagnose.policies import COMPARISONS


@dataclass(frozen=True, kw_only=True)
class Mask(Choice):
    """A response mask, bool [B, T], that the trainer may have used in place of the dump's."""

    values: Tensor


@dataclass(frozen=True, kw_only=True)
class Ratio(Choice):
    """What stands for the log-ratio; `families` are the objectives that it makes a difference to."""

    change: Callable[[Batch, Dump], Batch]
    families: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Advantages(Choice):
    """Advantages [B] or [B, T]."""

    values: Tensor


def masks(dump: Dump) -> list[Mask]:
    """The dump's mask and the usual slips of a position, where they change it and the dump has numbers."""
    off_by_one = "the mask is off by one against logp"
    without_last = "the mask ends one token early: EOS has no loss"
    with_next = "the mask ends one token late, or the dump's leaves EOS out"
    slips = (
        ("last token dropped", without_last, _without_last),
        ("one more token", with_next, _with_next),
        ("first token dropped", "the mask starts one token late", _mirrored(_without_last)),
        ("one token before", "the mask starts one token early", _mirrored(_with_next)),
        ("mask shifted right", off_by_one, _shifted),
        ("mask shifted left", off_by_one, _mirrored(_shifted)),
        ("mask ignored", "every position counts, padding too", torch.ones_like),
    )
    known = dump.logp.isfinite() & dump.old_logp.isfinite()
    found = [Mask("", values=dump.mask)]
    for name, note, change in slips:
        mask_BT = change(dump.mask) & known
        if bool(mask_BT.any()) and not any(torch.equal(mask_BT, other.values) for other in found):
            found.append(Mask(name, 1, note, values=mask_BT))
    return found


def _shifted(mask_BT: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(mask_BT[:, :1]), mask_BT[:, :-1]], dim=1)


def _last(mask_BT: Tensor) -> Tensor:
    """True at the last response token of each row."""
    later_BT = mask_BT.flip(1).cumsum(1).flip(1)
    return mask_BT & (later_BT == 1)


def _without_last(mask_BT: Tensor) -> Tensor:
    return mask_BT & ~_last(mask_BT)


def _with_next(mask_BT: Tensor) -> Tensor:
    return mask_BT | _shifted(_last(mask_BT))


def _mirrored(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda mask_BT: change(mask_BT.flip(1)).flip(1)


def ratios(dump: Dump) -> list[Ratio]:
    """The log-ratio as the objective defines it and the ways in which it goes wrong."""
    tokenwise = ("grpo", "cispo", "gmpo", "sapo", "rspo")
    every = (*tokenwise, "gspo", "gspo_token", "dppo_tv", "dppo_kl", "minirl")
    found = [Ratio("", change=lambda batch, dump: batch, families=(*every, "reinforce", *COMPARISONS))]

    def add(name: str, note: str, change: Callable[[Batch, Dump], Batch], *families: str) -> None:
        found.append(Ratio(name, 1, note, change=change, families=families))

    add("ratio 1", "old_logp is not used: the ratio is 1, as in a purely on-policy step", _one, *every)
    add("old/new", "the ratio is upside down: old over new", _inverse, *tokenwise, "gspo")
    add("product ratio", "the response's ratio has no length normalisation", _product, "gspo")
    add("mean of ratios", "an arithmetic mean of token ratios, not a geometric one", _mean, "gspo")
    if dump.sampler_logp is not None:
        note = "the ratio is measured from the sampler, not from old_logp (verl: bypass mode)"
        add("ratio to sampler", note, _to_sampler, *every)
    return found


def _one(batch: Batch, dump: Dump) -> Batch:
    return replace(batch, log_ratio=torch.zeros_like(batch.log_ratio), old_logp=batch.logp)


def _inverse(batch: Batch, dump: Dump) -> Batch:
    return replace(batch, log_ratio=-batch.log_ratio)


def _product(batch: Batch, dump: Dump) -> Batch:
    return replace(batch, log_ratio=batch.log_ratio * batch.mask.sum(dim=1, keepdim=True))


def _mean(batch: Batch, dump: Dump) -> Batch:
    mean_B = sequence_mean(batch.log_ratio.exp(), batch.mask)
    log_mean_B1 = torch.where(mean_B > 0, mean_B, 1.0).log()[:, None]
    return replace(batch, log_ratio=masked(log_mean_B1.expand_as(batch.log_ratio), batch.mask))


def _to_sampler(batch: Batch, dump: Dump) -> Batch:
    assert dump.sampler_logp is not None
    old_BT = masked(dump.sampler_logp, batch.mask)
    return replace(batch, old_logp=old_BT, log_ratio=batch.logp - old_BT)


def corrections(dump: Dump) -> list[Choice]:
    """None, or the name of a mismatch correction with its default bounds where the dump has a sampler."""
    names = MISMATCH_CORRECTIONS if dump.sampler_logp is not None else ()
    return [Choice(""), *(Choice(name, 1, "a correction for the sampler is on") for name in names)]


def advantages(dump: Dump, group_size: int | None) -> list[Advantages]:
    """The dump's own advantages, or every convention that makes some of its rewards."""
    if dump.advantages is None:
        assert dump.rewards is not None
        return from_rewards(dump.rewards, group_size)
    given = dump.advantages
    values_N = given[dump.mask] if given.ndim == 2 else given
    found = [
        Advantages("as given", values=given),
        Advantages("negated", 1, "A enters negated", values=-given),
    ]
    if len(values_N) > 1 and values_N.std() > 0:
        note = "the advantages are scaled once more, over the batch"
        whitened = (given - values_N.mean()) / (values_N.std() + 1e-8)
        found.append(Advantages("whitened again", 1, note, values=whitened))
    return found


def group_sizes(rows: int, known: int | None) -> list[int]:
    """The known group size, or all that divide the rows."""
    return [known] if known else [size for size in range(2, rows + 1) if rows % size == 0]


def from_rewards(rewards_B: Tensor, group_size: int | None) -> list[Advantages]:
    """Advantages [B] of rewards [B] under every convention, for one group size or for all that divide B."""
    rows, sizes = len(rewards_B), group_sizes(len(rewards_B), group_size)
    found = []
    for size in sizes:
        for normalise in NORMALISATIONS:
            values = group_advantages(rewards_B, size, normalise=normalise)
            found.append(Advantages(f"{normalise}, G={size}", values=values))
        found += _by_other_deviations(rewards_B, size)
    found.append(Advantages("raw rewards", 1, "rewards enter without a baseline", values=rewards_B))
    if rows not in sizes:
        note = "the baseline is the mean of the whole batch, not of a prompt's group"
        for normalise in ("verl", "mean"):
            values = group_advantages(rewards_B, rows, normalise=normalise)
            found.append(Advantages(f"{normalise} over the batch", 1, note, values=values))
    return found


def _by_other_deviations(rewards_B: Tensor, size: int) -> list[Advantages]:
    """Group-centred rewards over a standard deviation that no name of group_advantages stands for."""
    centred_PG = group_advantages(rewards_B, size, normalise="mean").reshape(-1, size)
    spread = rewards_B.std() if len(rewards_B) > 1 else rewards_B.new_zeros(())
    found = [
        Advantages(
            f"trl batch std, G={size}",
            0,
            'TRL scale_rewards="batch": group mean, standard deviation of the whole batch',
            values=(centred_PG / (spread + 1e-4)).flatten(),
        )
    ]
    for ddof, epsilon in ((0, 1e-6), (0, 1e-5), (0, 1e-4), (1, 1e-5), (1, 1e-3), (0, 1e-3)):
        std_P1 = (centred_PG.square().sum(dim=1, keepdim=True) / max(size - ddof, 1)).sqrt()
        name, note = (
            f"ddof {ddof}, ε {epsilon:g}, G={size}",
            "a standard deviation that no named convention has",
        )
        found.append(Advantages(name, 1, note, values=(centred_PG / (std_P1 + epsilon)).flatten()))
    return found
