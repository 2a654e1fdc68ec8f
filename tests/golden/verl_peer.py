"""verl's loss functions and estimators on the scenes, from `verl.trainer.ppo`.

verl divides by the number of responses that have tokens, we and TRL by the number of responses: a case's
"scale" carries that.
"""

from functools import partial

import numpy as np
import torch
from scenes import LENGTHS, MAX_LENGTH, SHARED_SCENES
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

BOTH_COUNTS = ["pg_clipfrac", "pg_clipfrac_lower"]


def record(recording):
    for scene in SHARED_SCENES:
        clipping_cases(recording, scene)
        other_cases(recording, scene)
        dropping_cases(recording, scene)
    dropping_cases(recording, "signed")
    record_estimates(recording)
    record_mismatch(recording)


def clipping_cases(recording, scene):
    """The clipped ratio by token and by response, under each aggregation, and PPO."""
    case = partial(policy_case, recording, scene)
    mean = "seq-mean-token-mean"
    paper = {"name": "vanilla", "low": 0.2, "high": 0.27, "count": {"clip_frac/token": BOTH_COUNTS}}
    case("grpo", {}, mode=mean, **paper)
    case("grpo", {"dual_clip": 3.0}, mode=mean, cap=3.0, **paper)
    case("dapo", {"clip_high": 0.27}, mode="token-mean", **paper)
    case("grpo", {"aggregation": "seq-mean-token-sum"}, mode="seq-mean-token-sum", **paper)
    dr_grpo = {"length_divisor": float(MAX_LENGTH), "clip_high": 0.27}
    case("dr_grpo", dr_grpo, mode="seq-mean-token-sum-norm", **paper)
    by_token = {"mode": "token-mean", "advantages": "token_advantages", "value_model": True}
    case("ppo", {"clip_high": 0.27}, **paper, **by_token)
    gspo = {"name": "gspo", "mode": mean, "low": 3e-4, "high": 4e-4}
    gspo["count"] = {"clip_frac/token": ["pg_clipfrac"]}
    case("gspo", {}, **gspo)
    case("gspo_token", {}, **gspo)
    case("gspo_token", {}, advantages="token_advantages", **gspo)


def other_cases(recording, scene):
    case = partial(policy_case, recording, scene)
    blind = {"clip_frac/token_signblind": ["pg_clipfrac"]}
    cispo = {"name": "cispo", "mode": "token-mean", "low": 10.0, "high": 0.2, "count": blind}
    case("cispo", {"clip_low": 10.0, "clip_high": 0.2}, **cispo)
    none = {"clip_frac/token": BOTH_COUNTS}
    case("sapo", {}, name="sapo", mode="seq-mean-token-mean", low=0.2, high=0.2, count=none)


def dropping_cases(recording, scene):
    """DPPO and GMPO, whose counts treat A = 0 their own way.

    verl counts tokens with A = 0 among the dropped (DPPO) and leaves them out of the GMPO count. Neither
    carries a gradient, so the counts are compared on the scene where no advantage is 0.
    """
    case = partial(policy_case, recording, scene)
    counted = scene == "signed"
    count = {"clip_frac/token": ["pg_clipfrac"]} if counted else {}
    for name, width in (("dppo_tv", 0.15), ("dppo_kl", 0.05)):
        case(name, {}, name=name, mode="token-mean", low=width, high=width, cap=20.0, count=count)
    count = {"clip_frac/token_signblind": BOTH_COUNTS} if counted else {}
    case("gmpo", {}, name="geo_mean", mode="seq-mean-token-mean", low=0.4, high=0.4, count=count)


def policy_case(
    recording,
    scene_name,
    objective,
    options,
    *,
    name,
    mode,
    low,
    high,
    cap=1e4,
    count=None,
    advantages="advantages",
    value_model=False,
):
    scene, logp = recording.scenes[scene_name], recording.leaf(scene_name)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=cap,
        tau_pos=1.0,
        tau_neg=1.05,
    )
    if mode == "seq-mean-token-sum-norm":
        config.global_batch_info["loss_scale_factor"] = MAX_LENGTH
    by_token = (
        scene[advantages] if scene[advantages].ndim == 2 else scene[advantages][:, None].expand_as(logp)
    )
    loss_function = core_algos.get_policy_loss_fn(name)
    loss, metrics = loss_function(scene["old_logp"], logp, by_token, scene["mask"], mode, config)
    counts = {ours: sum(metrics[f"actor/{part}"] for part in parts) for ours, parts in (count or {}).items()}
    counts["kl/k1"] = metrics["actor/ppo_kl"]
    rows = len(LENGTHS)
    drops_empty = scene_name == "empty_row" and mode.startswith("seq-mean") and name != "geo_mean"
    scale = (rows - 1) / rows if drops_empty else 1.0
    rest = {"scale": scale, "advantages": advantages}
    function = f"{name} {mode}"
    if value_model:
        rest["values"] = values = recording.leaf(scene_name, "values")
        rest["extra"] = [(f"{tensor}_BT", tensor) for tensor in ("values", "old_values", "returns")]
        value_loss, clipped = core_algos.compute_value_loss(
            values, scene["returns"], scene["old_values"], scene["mask"], 0.5
        )
        loss = loss + 0.5 * value_loss
        counts |= {"value/loss": value_loss.item(), "value/clip_frac": clipped.item()}
        function += " + compute_value_loss"
    recording.record(scene_name, function, objective, options, loss, logp, counts, **rest)


def record_estimates(recording):
    """Advantages and KL estimates."""
    scene, tensors = recording.scenes["far"], recording.tensors
    mask = scene["mask"]
    scores = torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 0.25], dtype=torch.float64)
    rewards, index = torch.zeros_like(mask), np.array([0, 0, 0, 1, 1, 1])
    rewards[:, 0] = scores
    tensors["advantages/scores"] = scores
    tensors["advantages/verl"] = core_algos.compute_grpo_outcome_advantage(rewards.clone(), mask, index)[0][
        :, 0
    ]
    tensors["advantages/mean"] = core_algos.compute_grpo_outcome_advantage(
        rewards.clone(), mask, index, norm_adv_by_std_in_grpo=False
    )[0][:, 0]
    tensors["advantages/leave-one-out"] = core_algos.compute_rloo_outcome_advantage(
        rewards.clone(), mask, index
    )[0][:, 0]
    holes = mask.clone()
    holes[0, 3:5] = 0  # text of a tool inside a response
    values = scene["token_advantages"] * holes
    gae = core_algos.compute_gae_advantage_return(scene["ref_logp"] * holes, values, holes, 0.9, 0.8)
    tensors["gae/mask"], tensors["gae/advantages"], tensors["gae/returns"] = holes, *gae
    for estimator in ("k1", "k2", "k3"):
        tensors[f"kl/{estimator}"] = core_algos.kl_penalty(scene["logp"], scene["ref_logp"], estimator)


def record_mismatch(recording):
    """Corrections and metrics for a sampler other than the old policy."""
    scene, tensors = recording.scenes["far"], recording.tensors
    mask, old, sampler = scene["mask"], scene["old_logp"], scene["sampler_logp"]
    log_ratio = old - sampler
    for name, level, threshold, changed in (
        ("token_tis", "token", 2.0, "ratio_fraction_high"),
        ("sequence_tis", "sequence", 2.0, "seq_fraction_high"),
        ("icepop", "token", "0.5_5.0", "oob_ratio"),
    ):
        weights, metrics = rollout_corr_helper.compute_rollout_correction_weights(
            log_ratio, mask, rollout_is=level, rollout_is_threshold=threshold
        )
        tensors[f"mismatch/{name}"] = weights
        reported = [metrics[f"rollout_is_{metric}"] for metric in ("eff_sample_size", changed)]
        tensors[f"mismatch/{name}/ess_and_changed"] = torch.tensor(reported).double()
    for name, option, threshold in (
        ("sequence_rejection", "seq_sum_k1", "0.5_2.0"),
        ("geometric_rejection", "seq_mean_k1", "0.9_1.1"),
    ):
        # k1 there is -log w, so its bounds are those of 1 / w.
        kept, metrics = rollout_corr_helper.compute_rollout_rejection_mask(log_ratio, mask, option, threshold)
        tensors[f"mismatch/{name}"] = kept
        reported = [metrics[f"rollout_rs_{metric}"] for metric in ("masked_fraction", "seq_masked_fraction")]
        tensors[f"mismatch/{name}/changed"] = torch.tensor(reported).double()
    metrics = rollout_corr_helper.compute_offpolicy_metrics(old, sampler, mask)
    tensors["mismatch/metrics"] = torch.tensor(
        [metrics[name] for name in ("kl", "k3_kl", "chi2_token")]
    ).double()
