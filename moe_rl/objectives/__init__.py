"""RL objectives as pure functions: tensors in, (loss, metrics) out; no model, no configuration object."""

from __future__ import annotations

from dataclasses import fields

from moe_rl.objectives.advantages import NORMALISATIONS, group_advantages
from moe_rl.objectives.aggregation import AGGREGATIONS, aggregate
from moe_rl.objectives.base import Objective
from moe_rl.objectives.regularisers import kl_estimate
from moe_rl.objectives.sequence_level import GSPO
from moe_rl.objectives.token_level import GRPO

OBJECTIVES: dict[str, type[Objective]] = {
    "grpo": GRPO,
    "gspo": GSPO,
}


def get_objective(name: str, **options: object) -> Objective:
    """The objective of that name, its hyper-parameters set by `options`; ValueError on an unknown one."""
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; known: {', '.join(OBJECTIVES)}")
    known = {option.name for option in fields(OBJECTIVES[name])}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ValueError(
            f"objective {name!r} has no option {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    return OBJECTIVES[name](**options)  # type: ignore[arg-type]


__all__ = [
    "AGGREGATIONS",
    "NORMALISATIONS",
    "OBJECTIVES",
    "Objective",
    "aggregate",
    "get_objective",
    "group_advantages",
    "kl_estimate",
]
