"""Our metrics under the names that TRL and verl log the same quantities by."""

from __future__ import annotations

from collections.abc import Mapping

# The same number under both names; where a peer counts differently for some objective, see below.
_ALIASES = {
    "trl": {
        "kl/reference_k3": "kl",
        "entropy/token_mean": "entropy",
        "preference/accuracy": "rewards/accuracies",
        "preference/margin": "rewards/margins",
        "mismatch/logp_abs_diff_mean": "sampling/sampling_logp_difference/mean",
        "mismatch/logp_abs_diff_max": "sampling/sampling_logp_difference/max",
        "mismatch/weight_mean_unit": "sampling/importance_sampling_ratio/mean",
    },
    "verl": {
        "kl/k1": "actor/ppo_kl",
        "kl/reference_aggregated": "actor/kl_loss",
        "entropy/aggregated": "actor/entropy",
        "value/aggregated": "critic/vf_loss",
        "value/clip_frac": "critic/vf_clipfrac",
        "mismatch/kl_k1": "rollout_corr/kl",
        "mismatch/kl_k3": "rollout_corr/k3_kl",
        "mismatch/chi2_token": "rollout_corr/chi2_token",
        "mismatch/weight_mean": "rollout_corr/rollout_is_mean",
        "mismatch/weight_ess": "rollout_corr/rollout_is_eff_sample_size",
    },
}
_TOKEN_LEVEL = ("grpo", "dr_grpo", "dapo", "ppo")
# Which of our three counts a peer's clip fraction is: {peer: {objective: (our name, the peer's name)}}.
_CLIP_FRACTIONS = {
    "trl": {
        **dict.fromkeys(_TOKEN_LEVEL, ("clip_frac/token", "clip_ratio/region_mean")),
        "gmpo": ("clip_frac/token", "clip_ratio/region_mean"),
        "gspo": ("clip_frac/sequence", "clip_ratio/region_mean"),
        "cispo": ("clip_frac/token", "cispo_clip_ratio"),
    },
    "verl": {
        **dict.fromkeys(
            (*_TOKEN_LEVEL, "gspo", "gspo_token", "dppo_tv", "dppo_kl"),
            ("clip_frac/token", "actor/pg_clipfrac"),
        ),
        "cispo": ("clip_frac/token_signblind", "actor/pg_clipfrac"),
    },
}
_DUAL = "clip_frac/token_dual"
# Both peers log these of importance weights alone, not of a rejection or an off-policy mask.
_OF_WEIGHTS = ("mismatch/weight_mean", "mismatch/weight_ess")


def peer_metrics(metrics: Mapping[str, float], peer: str, objective: str) -> dict[str, float]:
    """The metrics that `peer` ("trl" or "verl") logs too, under its names; the others are left out.

    `objective` is our name of it: what a peer calls clip fraction is another of our counts from objective to
    objective (docs/objectives.md). Tokens at the dual clip are no part of a peer's clip fraction: verl counts
    them apart, as actor/pg_clipfrac_lower. Raises ValueError for another peer.
    """
    if peer not in _ALIASES:
        raise ValueError(f"unknown peer {peer!r}; known: {', '.join(_ALIASES)}")
    names = dict(_ALIASES[peer])
    if "mismatch/weight_mean_unit" not in metrics:
        names = {ours: theirs for ours, theirs in names.items() if ours not in _OF_WEIGHTS}
    found = {theirs: metrics[ours] for ours, theirs in names.items() if ours in metrics}
    if objective in _CLIP_FRACTIONS[peer]:
        ours, theirs = _CLIP_FRACTIONS[peer][objective]
        if ours in metrics:
            found[theirs] = metrics[ours] - metrics.get(_DUAL, 0.0)
    if peer == "verl" and _DUAL in metrics:
        found["actor/pg_clipfrac_lower"] = metrics[_DUAL]
    return found
