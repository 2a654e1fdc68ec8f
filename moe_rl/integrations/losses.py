"""This project's objectives as the loss of TRL's trainer, and TRL's own losses as objectives to count by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moe_rl.objectives import CISPO, GRPO, GSPO, SAPO, Objective
from moe_rl.objectives.preference import DPO, Contrastive

# What TRL's batch and forward can give an objective.
AVAILABLE = {"ref_logp_BT", "entropy_BT", "sampler_logp_BT"}
# Parts of TRL's own loss, with the value that leaves them out.
OWN_TERMS = {
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "delta": None,
}


def require_supported(objective: Objective, args: Any) -> None:
    """Raise `ValueError`, one for all reasons, where TRL's trainer cannot compute the objective."""
    name = type(objective).__name__
    reasons = [
        f"{option}={getattr(args, option)!r} is a term of TRL's own loss"
        for option, off in OWN_TERMS.items()
        if getattr(args, option) != off
    ]
    missing = sorted(set(objective.needs) - AVAILABLE)
    if missing:
        reasons.append(f"{name} needs {', '.join(missing)}, which TRL's trainer does not compute")
    if isinstance(objective, DPO | Contrastive):
        reasons.append(f"{name} compares neighbouring responses, and TRL shuffles them")
    if args.beta != objective.kl_coef:
        reasons.append(
            f"GRPOConfig(beta={args.beta}) and the objective's kl_coef={objective.kl_coef} must be equal "
            "(TRL loads the reference model by beta)"
        )
    if "sampler_logp_BT" in objective.needs and args.use_vllm and args.vllm_importance_sampling_correction:
        reasons.append(
            f"{name} weighs by the sampler's probabilities already: vllm_importance_sampling_correction=False"
        )
    if reasons:
        raise ValueError(f"objective={name} in TRL's trainer: " + "; ".join(reasons))


def keyword_tensors(objective: Objective, batch: Mapping[str, Any], entropy_BC: Tensor) -> dict[str, Tensor]:
    """The objective's keyword tensors, from TRL's batch and the entropies [B, C] of the loss's forward."""
    found = {"entropy_BT": entropy_BC if objective.entropy_coef else entropy_BC.detach()}
    if "ref_per_token_logps" in batch:
        found["ref_logp_BT"] = batch["ref_per_token_logps"]
    if "importance_sampling_ratio" in batch:  # [B, C], or [B, 1] at TRL's sequence levels
        found["weights_BT"] = batch["importance_sampling_ratio"].expand_as(entropy_BC)
    if "sampler_logp_BT" in objective.needs:
        if "sampling_per_token_logps" not in batch:
            raise ValueError(
                f"{type(objective).__name__} needs the sampler's log-probabilities, which TRL has from vLLM "
                "or a rollout_func alone"
            )
        found["sampler_logp_BT"] = batch["sampling_per_token_logps"]
    return found


def objective_of(args: Any) -> Objective | None:
    """The objective that clips where TRL's own loss of these options does, to count by; None: unknown here.

    Only the clip rule is TRL's: aggregation and the other options are left at their defaults.
    """
    if args.loss_type == "sapo":
        return SAPO()
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    by_token = args.importance_sampling_level == "token"
    if args.loss_type == "cispo":  # TRL's epsilon_high is the cap itself, ours its distance from 1
        return CISPO(clip_high=high - 1) if by_token else None
    if args.loss_type not in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        return None
    bounds = {"clip_low": args.epsilon, "clip_high": high}
    return GRPO(**bounds) if by_token else GSPO(**bounds)
