"""RL objectives as pure functions: tensors in, (loss, metrics) out; no model, no configuration object."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from moe_rl.objectives.advantages import (
    NORMALISATIONS,
    equal_rewards,
    group_advantages,
    turn_advantages,
)
from moe_rl.objectives.aggregation import AGGREGATIONS, aggregate
from moe_rl.objectives.aliases import peer_metrics
from moe_rl.objectives.base import Objective
from moe_rl.objectives.geometric import GMPO, RSPO, router_shift
from moe_rl.objectives.mismatch import (
    MISMATCH_CORRECTIONS,
    Correction,
    MismatchCorrection,
    get_mismatch_correction,
    mismatch_metrics,
    off_policy_sequence_mask,
)
from moe_rl.objectives.policy_gradient import CISPO, DPPODivergence, DPPOTotalVariation, MiniRL
from moe_rl.objectives.ppo import PPO, gae
from moe_rl.objectives.preference import DPO, Contrastive
from moe_rl.objectives.regularisers import KL_ESTIMATORS, kl_estimate
from moe_rl.objectives.sequence_level import GSPO, GSPOToken
from moe_rl.objectives.token_level import DAPO, GRPO, SAPO, DrGRPO

OBJECTIVES: dict[str, type[Objective]] = {
    "grpo": GRPO,
    "gspo": GSPO,
    "gspo_token": GSPOToken,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "ppo": PPO,
    "cispo": CISPO,
    "gmpo": GMPO,
    "sapo": SAPO,
    "rspo": RSPO,
    "dppo_tv": DPPOTotalVariation,
    "dppo_kl": DPPODivergence,
    "minirl": MiniRL,
    "contrastive": Contrastive,
    "dpo": DPO,
}


def get_objective(name: str, **options: Any) -> Objective:
    """The objective of that name, its hyper-parameters set by `options`.

    Raises ValueError on an unknown name or option, a value out of range, or a required option left out, and
    TypeError on a value of another type.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; known: {', '.join(OBJECTIVES)}")
    known = {option.name: option for option in fields(OBJECTIVES[name])}
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise ValueError(
            f"objective {name!r} has no option {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    missing = [
        option.name for option in known.values() if option.default is MISSING and option.name not in options
    ]
    if missing:
        raise ValueError(f"objective {name!r} requires {', '.join(missing)}")
    return OBJECTIVES[name](**options)


__all__ = [
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "MISMATCH_CORRECTIONS",
    "NORMALISATIONS",
    "OBJECTIVES",
    "Correction",
    "MismatchCorrection",
    "Objective",
    "aggregate",
    "equal_rewards",
    "gae",
    "get_mismatch_correction",
    "get_objective",
    "group_advantages",
    "kl_estimate",
    "mismatch_metrics",
    "off_policy_sequence_mask",
    "peer_metrics",
    "router_shift",
    "turn_advantages",
]
