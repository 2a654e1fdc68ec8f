"""The objectives that are tried, under the clip ranges that papers and frameworks give them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_rl.objectives import OBJECTIVES, get_objective
from moe_rl.objectives.base import Surrogate, never, outside_interval
from moe_rl.objectives.batch import Batch
from moe_rl.objectives.diagnose.choices import Choice, Settings, Widths

COMPARISONS = ("contrastive", "dpo")
DUAL_CLIP = 3.0  # verl's clip_ratio_c
DPO_BETAS = (0.01, 0.05, 0.2, 0.3, 0.5)  # beside the paper's and TRL's 0.1
# Equal widths to try where the documented ranges give no match: 1e-4, 1.5e-4, 2e-4, ... 0.9.
ROUND_WIDTHS = tuple(
    float(f"{n}e{k}") for k in (-4, -3, -2, -1) for n in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
)
GSPO_FORMS = ("gspo", "gspo_token")  # they differ in value only under advantages per token


@dataclass(frozen=True, kw_only=True)
class Policy(Choice):
    """A per-token objective with its clip range."""

    family: str
    clip: str
    surrogate: Callable[[Batch, dict[str, Tensor]], Surrogate]

    @property
    def compares(self) -> bool:
        """Its values belong to whole responses and are averaged over those, and are not linear in |A|."""
        return self.family in COMPARISONS

    @property
    def by_response(self) -> bool:
        return self.family in GSPO_FORMS


def policies(
    settings: Settings, group_sizes: Sequence[int], *, per_token: bool, router_shift: bool, reference: bool
) -> list[Policy]:
    """Objectives under their papers' and peers' default clip ranges, the likeliest first.

    group_sizes: those that `contrastive` may have. per_token: advantages differ within responses, so that
    GSPO and GSPO-token do too. router_shift: the dump has it. reference: the
    dump has that and pairs of rows.
    """
    geometric = ("gmpo", "rspo") if router_shift else ("gmpo",)
    unclipped: dict[str, Any] = {"clip_low": 1.0, "clip_high": math.inf}
    return [
        *_grpo(settings),
        *(policy for family in GSPO_FORMS[: 1 + per_token] for policy in _gspo(family, settings)),
        *_cispo(settings),
        *(
            _policy(family, f"clip {low:g}/{high:g} nats", cost, clip_low=low, clip_high=high)
            for family in geometric
            for low, high, cost in _ranges(settings, (0.4, 0.4), (0.2, 0.2))
        ),
        _policy("sapo", ""),
        *_dppo(settings),
        *(
            _policy("minirl", f"clip {low:g}/{high:g} cap 5", cost, clip_low=low, clip_high=high)
            for low, high, cost in _ranges(settings, (0.2, 0.27), (0.2, 0.2))
        ),
        _policy("grpo", "unclipped", **unclipped),
        _policy("gspo", "unclipped", **unclipped),
        Policy("reinforce", 0, "A log π, without a ratio", family="reinforce", clip="", surrogate=_reinforce),
        *(_policy("contrastive", f"beta 1 G={size}", group_size=size) for size in group_sizes),
        *(_dpo() if reference else []),
        *(_guessed_ranges() if settings.clip is None else []),
    ]


def _ranges(settings: Settings, *defaults: Widths) -> list[tuple[float, float, int]]:
    """(clip_low, clip_high, cost): the user's range, from which defaults then are departures, or defaults."""
    if settings.clip is None:
        return [(*widths, 0) for widths in defaults]
    return [(*settings.clip, 0), *((*widths, 1) for widths in defaults if widths != settings.clip)]


def _policy(family: str, clip: str, cost: int = 0, note: str = "", **options: Any) -> Policy:
    surrogate = get_objective(family, **options).surrogate
    return Policy(f"{family} {clip}".strip(), cost, note, family=family, clip=clip, surrogate=surrogate)


def _grpo(settings: Settings) -> list[Policy]:
    found = []
    dual_note = "dual clip at 3 is always on in verl's vanilla loss; GRPO's paper and TRL have none"
    for low, high, cost in _ranges(settings, (0.2, 0.27), (0.2, 0.2), (0.2, 0.28)):
        clip = f"clip {low:g}/{high:g}"
        found.append(_policy("grpo", clip, cost, clip_low=low, clip_high=high))
        if 1 + high < DUAL_CLIP:
            options = {"clip_low": low, "clip_high": high, "dual_clip": DUAL_CLIP}
            found.append(_policy("grpo", f"{clip} dual {DUAL_CLIP:g}", cost, dual_note, **options))
    return found


def _gspo(family: str, settings: Settings) -> list[Policy]:
    found = []
    for low, high, cost in _ranges(settings, (3e-4, 4e-4), (0.2, 0.2), (0.2, 0.27), (0.2, 0.28)):
        wide = "a clip range meant for token ratios: GSPO's is 3e-4 / 4e-4" if low >= 0.1 else ""
        found.append(_policy(family, f"clip {low:g}/{high:g}", cost, wide, clip_low=low, clip_high=high))
    return found


def _cispo(settings: Settings) -> list[Policy]:
    found = []
    for low, high, cost in _ranges(settings, (1.0, 4.0), (1.0, 0.2), (0.2, 0.2), (0.2, 0.28)):
        bounds = f"ratio {max(1 - low, 0):g} to {1 + high:g}"
        found.append(_policy("cispo", bounds, cost, clip_low=low, clip_high=high))
    caps = {0.2} | ({settings.clip[1]} if settings.clip else set())
    note = "TRL reads epsilon_high as the cap of the ratio itself, and epsilon, 0.2, where it is unset"
    for cap in sorted(caps):
        bounds = f"ratio 0 to {cap:g}"
        name, surrogate = f"cispo {bounds}", _capped(cap)
        found.append(Policy(name, 0, note, family="cispo", clip=bounds, surrogate=surrogate))
    return found


def _dppo(settings: Settings) -> list[Policy]:
    found = []
    for cap, note in ((20.0, ""), (3.0, "verl reads DPPO's cap from clip_ratio_c, 3 unless set")):
        for family, default in (("dppo_tv", 0.15), ("dppo_kl", 0.05)):
            for low, high, cost in _ranges(settings, (default, default)):
                clip = f"clip {low:g}/{high:g} cap {cap:g}"
                options = {"clip_low": low, "clip_high": high, "ratio_cap": cap}
                found.append(_policy(family, clip, cost, note, **options))
    return found


def _dpo() -> list[Policy]:
    note = "rows 2i and 2i + 1 are a pair, and the one with the greater advantage is preferred"
    guessed = [_policy("dpo", f"beta {beta:g}", 1, note, beta=beta) for beta in DPO_BETAS]
    return [_policy("dpo", "beta 0.1", 0, note, beta=0.1), *guessed]


def _guessed_ranges() -> list[Policy]:
    documented = (0.2,)
    widths = [width for width in ROUND_WIDTHS if width not in documented]
    return [guessed_range(family, width) for family in ("grpo", "gspo") for width in widths]


def guessed_range(family: str, width: float) -> Policy:
    """GRPO or GSPO under one width on both sides, which no paper or framework gives it."""
    note = "this clip range was guessed from the loss: give the trainer's (--clip-low, --clip-high)"
    return _policy(family, f"clip {width:g}/{width:g}", 1, note, clip_low=width, clip_high=width)


def needs_of(family: str) -> tuple[str, ...]:
    """Keyword tensors that an objective takes."""
    return OBJECTIVES[family].needs if family in OBJECTIVES else ()


def _capped(cap: float) -> Callable[[Batch, dict[str, Tensor]], Surrogate]:
    """CISPO with an absolute cap, which may be below 1 as widths cannot be."""

    def surrogate(batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
        ratio_BT = batch.log_ratio.exp()
        flags = outside_interval(ratio_BT, batch.advantages, 0.0, cap)
        return Surrogate(ratio_BT.clamp(max=cap) * batch.advantages * batch.logp, *flags)

    return surrogate


def _reinforce(batch: Batch, tensors: dict[str, Tensor]) -> Surrogate:
    return Surrogate(batch.advantages * batch.logp, never(batch.logp), never(batch.logp))
