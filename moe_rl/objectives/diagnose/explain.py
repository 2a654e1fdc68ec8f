"""What a convention is called in TRL and verl, and why several fit one dump."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_rl.objectives.diagnose.dump import Dump
from moe_rl.objectives.diagnose.search import Match

_TRL_LOSS_TYPES = {
    ("grpo", "seq-mean-token-mean"): "grpo",
    ("grpo", "token-mean"): "dapo",
    ("grpo", "seq-mean-token-sum-norm"): "dr_grpo",
    ("gspo", "seq-mean-token-mean"): "grpo",
    ("gspo", "token-mean"): "dapo",
    ("gspo", "seq-mean-token-sum"): "luspo",
    ("gspo", "seq-mean-token-sum-norm"): "dr_grpo",
    ("cispo", "token-mean"): "cispo",
    ("sapo", "seq-mean-token-mean"): "sapo",
}
_VERL_LOSS_MODES = {
    "grpo": "vanilla",
    "gspo": "gspo",
    "gspo_token": "gspo",
    "cispo": "cispo",
    "gmpo": "geo_mean",
    "sapo": "sapo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
}
_COUNT_NAMES = {
    "grpo": {
        "clip_frac/token": "verl actor/pg_clipfrac (+ _lower under dual clip), TRL clip_ratio/region_mean",
        "clip_frac/sequence": "slime pg_clipfrac",
    },
    "gspo": {
        "clip_frac/token": "verl actor/pg_clipfrac",
        "clip_frac/sequence": "TRL clip_ratio/region_mean, slime pg_clipfrac",
    },
    "cispo": {
        "clip_frac/token": "TRL cispo_clip_ratio",
        "clip_frac/token_signblind": "verl actor/pg_clipfrac",
    },
    "gmpo": {
        "clip_frac/token": "TRL clip_ratio/region_mean",
        "clip_frac/token_signblind": "verl actor/pg_clipfrac + pg_clipfrac_lower",
    },
    "dppo_tv": {"clip_frac/token": "verl actor/pg_clipfrac"},
    "dppo_kl": {"clip_frac/token": "verl actor/pg_clipfrac"},
}
_COUNT_NAMES["gspo_token"] = _COUNT_NAMES["gspo"]
_UNUSUAL = {
    (
        "gspo",
        "token-mean",
    ): "GSPO (Eq. 5) averages over responses, seq-mean-token-mean; token-mean is what TRL "
    'gives with its default loss_type="dapo" and verl with its default loss_agg_mode',
    ("grpo", "seq-mean-token-sum"): "a response weighs its length: GRPO (2402.03300) divides by it, and "
    "Dr.GRPO by a constant",
}


def peer_settings(match: Match) -> dict[str, str]:
    """Settings of TRL 1.16 and verl 0.9 that give this objective and aggregation, where they have them."""
    policy, mode = match.unit.policy, match.aggregation.mode
    found = {}
    loss_type = _TRL_LOSS_TYPES.get((policy.family, mode))
    if loss_type and "dual" not in policy.clip and policy.clip != "unclipped":
        level = ', importance_sampling_level="sequence"' if policy.family == "gspo" else ""
        found["TRL"] = f'loss_type="{loss_type}"{level}'
    elif policy.family == "dpo":
        found["TRL"] = f'DPOTrainer, loss_type="sigmoid", {policy.clip.replace(" ", "=")}'
    elif policy.family == "gmpo" and mode == "seq-mean-token-mean":
        found["TRL"] = "experimental.gmpo.GMPOTrainer"
    if policy.family in _VERL_LOSS_MODES and mode != "token-sum" and policy.clip != "unclipped":
        mode_name = f"policy_loss.loss_mode={_VERL_LOSS_MODES[policy.family]}"
        aggregation = "" if policy.family == "gmpo" else f", loss_agg_mode={mode}"
        dual = ""
        if policy.family == "grpo":
            dual = ", clip_ratio_c=3 (the default)" if "dual" in policy.clip else ", clip_ratio_c=1e4"
        found["verl"] = mode_name + aggregation + dual
    return found


def notes(match: Match) -> list[str]:
    """What to know about this convention, its known traps first."""
    unusual = _UNUSUAL.get((match.unit.policy.family, match.aggregation.mode))
    return [*([unusual] if unusual else []), *dict.fromkeys(match.notes)]


def peer_counts(match: Match) -> list[tuple[str, float, str]]:
    """(our name, value, peers' names) of the clip fractions and of KL(old || new), as fractions and nats."""
    names = {"kl/k1": "verl actor/ppo_kl", **_COUNT_NAMES.get(match.unit.policy.family, {})}
    ours = ("clip_frac/token", "clip_frac/sequence", "clip_frac/token_signblind", "kl/k1")
    return [(name, match.counts[name], names.get(name, "")) for name in ours]


def why_indistinguishable(matches: Sequence[Match], dump: Dump) -> list[str]:
    """What about the dump makes several conventions fit; empty for a single one."""
    if len(matches) < 2:
        return []
    reasons = []
    scale = max(match.scale for match in matches)
    if abs(dump.loss) <= 1e-6 * scale:
        reasons.append(
            "the loss is 0 to within rounding because the advantages cancel: dump a step where the policy "
            "has moved, or leave some responses out"
        )
    if len({match.unit.policy.name for match in matches}) > 1:
        reasons.extend(_why_policies(matches, dump))
    if len({match.aggregation.name for match in matches}) > 1:
        reasons.extend(_why_aggregations(dump))
    if len({match.advantages.name for match in matches}) > 1:
        reasons.append(
            "several advantage conventions agree on these rewards to within the tolerance: use rewards whose "
            "spread differs between prompts, and dump in float64 to tell small ε apart"
        )
    losses = [match.loss for match in matches]
    spread = max(losses) - min(losses)
    if spread > 1e-12 * scale:
        reasons.append(
            f"some differ, by up to {spread:.1e}, but by less than the tolerance: dump in a wider dtype"
        )
    return reasons or ["they give one value on these tensors"]


def _why_policies(matches: Sequence[Match], dump: Dump) -> list[str]:
    largest = float((dump.logp - dump.old_logp)[dump.mask].abs().max())
    if largest <= 1e-7:
        return [
            "every ratio is 1, so nothing clips and the ratio objectives agree: dump a later mini-batch of a "
            "rollout, where the policy has moved"
        ]
    families = {match.unit.policy.family for match in matches}
    clips = {match.unit.policy.clip for match in matches}
    if len(families) == 1 and len(clips) > 1:
        what = "no token's ratio lies where these clip ranges treat it differently"
        if any("dual" in clip for clip in clips):
            what += ", and none exceeds 3 under a negative advantage"
        return [f"{what} (the largest |log ratio| is {largest:.3g})"]
    return []


def _why_aggregations(dump: Dump) -> list[str]:
    counts_B = dump.mask.sum(dim=1)
    lengths = torch.unique(counts_B)
    reasons = []
    if len(lengths) == 1:
        at_full = " and fill the width" if int(lengths[0]) == dump.mask.shape[1] else ""
        reasons.append(
            f"all responses have {int(lengths[0])} tokens{at_full}, so means over tokens and over responses "
            "agree: dump responses of mixed lengths"
        )
    elif len(counts_B) == 1:
        reasons.append("there is one response, so all means agree: dump a batch of several")
    return reasons
