"""Run TRL's and verl's own loss functions on fixed tensors and store what they return. Run by hand:

    pip install torch==2.13.0 trl==1.16.0
    pip install --no-deps verl==0.9.1
    pip install packaging numpy ray tensordict omegaconf transformers codetiming orjson
    python tests/golden/make_peer_values.py

writes peer_values.safetensors (scenes, losses, gradients) and peer_values.json (versions and, for each case,
the objective of ours that must give the same). No model is involved: TRL's trainer methods are called with a
stand-in for `self` whose log-probabilities are our leaf tensor.

A case's "scale" and "offset" are known differences: ours == scale * peer + offset. verl divides by the number
of responses that have tokens, we and TRL by the number of responses; TRL's GMPO gives a response without
tokens a ratio of 1, and so the loss -A.
"""

import json
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import save_file
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

HERE = Path(__file__).parent
LENGTHS = (9, 3, 7, 1, 9, 5)
EMPTY_ROW = 3
MAX_LENGTH = 12
SAPO_TAU = 1.0625  # TRL rounds its temperatures to float32; this one survives that
TENSORS, CASES = {}, []


def make_scene(scale, *, empty=False, zero_advantage=True):
    """Log-probabilities whose log-ratio has the given spread, finite garbage where there is no response."""
    generator = torch.Generator().manual_seed(7)
    rows, width = len(LENGTHS), max(LENGTHS)

    def normal():
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    old = -0.05 - 4 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    scene = {
        "old_logp": old,
        "logp": (old + scale * normal()).clamp(max=-0.01),
        "ref_logp": (old + 0.3 * normal()).clamp(max=-0.01),
        "sampler_logp": (old + 0.9 * normal()).clamp(max=-0.01),
        "advantages": torch.tensor([1.3, -0.7, 0.0, 2.1, -1.9, 0.4], dtype=torch.float64),
        "token_advantages": normal(),
    }
    if not zero_advantage:
        scene["advantages"][2] = -0.3
    lengths = torch.tensor(LENGTHS)
    if empty:
        lengths[EMPTY_ROW] = 0
    scene["mask"] = (torch.arange(width)[None, :] < lengths[:, None]).double()
    for name in ("logp", "old_logp", "ref_logp", "sampler_logp", "token_advantages"):
        scene[name] = torch.where(scene["mask"] == 1, scene[name], torch.full_like(old, 3.0))
    return scene


SCENES = {
    "equal": make_scene(0.0),
    "near": make_scene(1e-3),
    "far": make_scene(0.5),
    "wild": make_scene(2.0),
    "signed": make_scene(0.5, zero_advantage=False),
    "empty_row": make_scene(0.5, empty=True),
}


def record(scene, peer, objective, options, loss, logp, counts, *, scale=1.0, offset=0.0, extra=()):
    (gradient,) = torch.autograd.grad(loss, logp)
    key = f"{len(CASES):03d}"
    TENSORS[f"{key}/loss"], TENSORS[f"{key}/gradient"] = loss.detach().reshape(1), gradient
    CASES.append(
        {
            "key": key,
            "scene": scene,
            "peer": peer,
            "objective": objective,
            "options": options,
            "counts": counts,
            "scale": scale,
            "offset": offset,
            "extra": list(extra),  # keyword tensors: our argument = scene tensor
        }
    )


def identity(values, *args, **kwargs):
    return values


def trl_case(
    scene_name,
    objective,
    options,
    *,
    loss_type="grpo",
    level="token",
    low=0.2,
    high=0.27,
    beta=0.0,
    weights=None,
    trainer=GRPOTrainer,
    count=None,
    offset=0.0,
    extra=(),
):
    scene = SCENES[scene_name]
    logp = scene["logp"].clone().requires_grad_()
    metrics = defaultdict(lambda: defaultdict(list))
    itself = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, torch.zeros_like(logp), None),
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(
            use_bias_correction_kl=False, delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=SAPO_TAU
        ),
        accelerator=SimpleNamespace(num_processes=1, gather=identity, reduce=identity),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        beta=beta,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        _entropy_bonus_enabled=False,
        _metrics=metrics,
    )
    no_tokens = torch.zeros(len(LENGTHS), 0)
    inputs = {
        "prompt_ids": no_tokens,
        "prompt_mask": no_tokens,
        "completion_ids": torch.zeros_like(scene["mask"]),
        "completion_mask": scene["mask"],
        "advantages": scene["advantages"],
        "old_per_token_logps": scene["old_logp"],
        "ref_per_token_logps": scene["ref_logp"],
        "importance_sampling_ratio": weights,
        "num_items_in_batch": scene["mask"].sum(),
    }
    loss = trainer._compute_loss(itself, None, inputs)
    counts = {ours: metrics["eval"][theirs][0] for ours, theirs in (count or {}).items()}
    peer = f"trl {trainer.__name__} loss_type={loss_type} level={level}"
    record(scene_name, peer, objective, options, loss, logp, counts, offset=offset, extra=extra)


def verl_case(
    scene_name, objective, options, *, name, mode, low, high, cap=1e4, count=None, token_level=False
):
    scene = SCENES[scene_name]
    logp = scene["logp"].clone().requires_grad_()
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
    advantages = scene["token_advantages"] if token_level else scene["advantages"][:, None].expand_as(logp)
    loss_function = core_algos.get_policy_loss_fn(name)
    loss, metrics = loss_function(scene["old_logp"], logp, advantages, scene["mask"], mode, config)
    counts = {ours: sum(metrics[f"actor/{part}"] for part in parts) for ours, parts in (count or {}).items()}
    counts["kl/k1"] = metrics["actor/ppo_kl"]
    rows = len(LENGTHS)
    drops_empty = scene_name == "empty_row" and mode.startswith("seq-mean") and name != "geo_mean"
    scale = (rows - 1) / rows if drops_empty else 1.0
    record(scene_name, f"verl {name} {mode}", objective, options, loss, logp, counts, scale=scale)
    if token_level:
        CASES[-1]["advantages"] = "token_advantages"


def make_objective_cases():
    region = "clip_ratio/region_mean"
    for scene in ("equal", "near", "far", "wild", "empty_row"):
        by_token, by_response = {"clip_frac/token": region}, {"clip_frac/sequence": region}
        trl_case(scene, "grpo", {}, count=by_token)
        trl_case(
            scene, "grpo", {"kl_coef": 0.05}, beta=0.05, count=by_token, extra=[("ref_logp_BT", "ref_logp")]
        )
        gspo = {"level": "sequence", "low": 3e-4, "high": 4e-4, "count": by_response}
        trl_case(scene, "gspo", {}, **gspo)
        trl_case(scene, "gspo", {"aggregation": "seq-mean-token-sum"}, loss_type="luspo", **gspo)
        trl_case(scene, "dapo", {}, loss_type="dapo", high=0.28, count=by_token)
        dr_grpo = {"length_divisor": float(MAX_LENGTH)}
        trl_case(scene, "dr_grpo", dr_grpo, loss_type="dr_grpo", high=0.2, count=by_token)
        trl_case(
            scene, "cispo", {}, loss_type="cispo", high=5.0, count={"clip_frac/token": "cispo_clip_ratio"}
        )
        trl_case(scene, "sapo", {"tau_neg": SAPO_TAU}, loss_type="sapo")
        offset = SCENES[scene]["advantages"][EMPTY_ROW].item() / len(LENGTHS) if scene == "empty_row" else 0.0
        trl_case(scene, "gmpo", {}, trainer=GMPOTrainer, low=0.4, high=0.4, count=by_token, offset=offset)
        weights = (SCENES[scene]["old_logp"] - SCENES[scene]["sampler_logp"]).exp()
        TENSORS[f"{scene}/weights"] = weights
        trl_case(scene, "grpo", {}, weights=weights, count=by_token, extra=[("weights_BT", "weights")])

        both = {"clip_frac/token": ["pg_clipfrac", "pg_clipfrac_lower"]}
        one, blind = {"clip_frac/token": ["pg_clipfrac"]}, {"clip_frac/token_signblind": ["pg_clipfrac"]}
        mean = "seq-mean-token-mean"
        paper = {"name": "vanilla", "low": 0.2, "high": 0.27, "count": both}
        verl_case(scene, "grpo", {}, mode=mean, **paper)
        verl_case(scene, "grpo", {"dual_clip": 3.0}, mode=mean, cap=3.0, **paper)
        verl_case(scene, "dapo", {"clip_high": 0.27}, mode="token-mean", **paper)
        verl_case(scene, "grpo", {"aggregation": "seq-mean-token-sum"}, mode="seq-mean-token-sum", **paper)
        verl_case(scene, "dr_grpo", dr_grpo | {"clip_high": 0.27}, mode="seq-mean-token-sum-norm", **paper)
        sequence = {"name": "gspo", "mode": mean, "low": 3e-4, "high": 4e-4, "count": one}
        verl_case(scene, "gspo", {}, **sequence)
        verl_case(scene, "gspo_token", {}, **sequence)
        verl_case(scene, "gspo_token", {}, token_level=True, **sequence)
        cispo = {"clip_low": 10.0, "clip_high": 0.2}
        verl_case(scene, "cispo", cispo, name="cispo", mode="token-mean", low=10.0, high=0.2, count=blind)
        verl_case(scene, "sapo", {}, name="sapo", mode=mean, low=0.2, high=0.2)
        # verl counts tokens with A = 0 among the dropped (DPPO) and leaves them out of the GMPO count; both
        # carry no gradient, so the counts are compared on the scene where no advantage is 0.
        signed = scene == "far"
        for place in (scene, "signed") if signed else (scene,):
            counted = {"count": one} if place == "signed" else {}
            tv = {"name": "dppo_tv", "mode": "token-mean", "low": 0.15, "high": 0.15, "cap": 20.0}
            verl_case(place, "dppo_tv", {}, **tv, **counted)
            verl_case(
                place, "dppo_kl", {}, **(tv | {"name": "dppo_kl", "low": 0.05, "high": 0.05}), **counted
            )
            counted = {"count": {"clip_frac/token_signblind": both["clip_frac/token"]}} if counted else {}
            verl_case(place, "gmpo", {}, name="geo_mean", mode=mean, low=0.4, high=0.4, **counted)


def make_dpo_case():
    """Neighbouring rows of the scene as pairs, in TRL's order: chosen responses first, then rejected ones."""
    scene = SCENES["far"]
    logp = scene["logp"].clone().requires_grad_()
    preferred = [0, 3, 5]  # advantages 1.3 > -0.7, 2.1 > 0, 0.4 > -1.9
    order = [*preferred, 1, 2, 4]
    masked = torch.where(scene["mask"] == 1, logp, torch.zeros_like(logp))[order]
    reference = (scene["ref_logp"] * scene["mask"]).sum(1)[order]
    mask = torch.nn.functional.pad(scene["mask"][order], (1, 0))
    outputs = SimpleNamespace(
        log_probs=masked,
        entropy=torch.zeros_like(masked),
        mean_logits=torch.zeros_like(masked),
        is_top1=torch.zeros_like(masked).bool(),
    )
    metrics = defaultdict(lambda: defaultdict(list))
    itself = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(device="cpu", gather=identity, gather_for_metrics=identity),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=0.1,
        use_weighting=False,
        _total_train_tokens=0,
        _metrics=metrics,
    )
    inputs = {
        "input_ids": torch.zeros_like(mask).long(),
        "attention_mask": mask,
        "completion_mask": mask,
        "ref_chosen_logps": reference[:3],
        "ref_rejected_logps": reference[3:],
    }
    loss = DPOTrainer._compute_loss(itself, lambda **k: outputs, inputs, False)
    counts = {
        "preference/accuracy": metrics["eval"]["rewards/accuracies"][0],
        "preference/margin": metrics["eval"]["rewards/margins"][0],
    }
    extra = [("ref_logp_BT", "ref_logp")]
    record("far", "trl DPOTrainer loss_type=sigmoid", "dpo", {}, loss, logp, counts, extra=extra)


def make_other_values():
    """Advantages, value loss, KL estimates and mismatch corrections."""
    scene = SCENES["far"]
    mask, old, sampler = scene["mask"], scene["old_logp"], scene["sampler_logp"]
    scores = torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 0.25], dtype=torch.float64)
    rewards, index = torch.zeros_like(mask), np.array([0, 0, 0, 1, 1, 1])
    rewards[:, 0] = scores
    TENSORS["advantages/scores"] = scores
    TENSORS["advantages/verl"] = core_algos.compute_grpo_outcome_advantage(rewards.clone(), mask, index)[0][
        :, 0
    ]
    TENSORS["advantages/mean"] = core_algos.compute_grpo_outcome_advantage(
        rewards.clone(), mask, index, norm_adv_by_std_in_grpo=False
    )[0][:, 0]
    TENSORS["advantages/leave-one-out"] = core_algos.compute_rloo_outcome_advantage(
        rewards.clone(), mask, index
    )[0][:, 0]
    holes = mask.clone()
    holes[0, 3:5] = 0  # text of a tool inside a response
    values = scene["token_advantages"] * holes
    gae = core_algos.compute_gae_advantage_return(scene["ref_logp"] * holes, values, holes, 0.9, 0.8)
    TENSORS["gae/mask"], TENSORS["gae/advantages"], TENSORS["gae/returns"] = holes, *gae
    predicted = (values + 0.5 * scene["ref_logp"]).requires_grad_()
    loss, clipped = core_algos.compute_value_loss(predicted, scene["logp"], values, mask, 0.5)
    TENSORS["value/predicted"], TENSORS["value/loss"] = predicted.detach().clone(), loss.detach().reshape(1)
    TENSORS["value/clip_frac"] = clipped.detach().double().reshape(1)
    TENSORS["value/old"] = values
    (TENSORS["value/gradient"],) = torch.autograd.grad(loss, predicted)
    for estimator in ("k1", "k2", "k3"):
        TENSORS[f"kl/{estimator}"] = core_algos.kl_penalty(scene["logp"], scene["ref_logp"], estimator)

    log_ratio = old - sampler
    for name, level, threshold in (
        ("token_tis", "token", 2.0),
        ("sequence_tis", "sequence", 2.0),
        ("icepop", "token", "0.5_5.0"),
    ):
        weights, metrics = rollout_corr_helper.compute_rollout_correction_weights(
            log_ratio, mask, rollout_is=level, rollout_is_threshold=threshold
        )
        TENSORS[f"mismatch/{name}"] = weights
        TENSORS[f"mismatch/{name}/ess"] = torch.tensor([metrics["rollout_is_eff_sample_size"]]).double()
    for name, option, threshold in (
        ("sequence_rejection", "seq_sum_k1", "0.5_2.0"),
        ("geometric_rejection", "seq_mean_k1", "0.9_1.1"),
    ):
        # k1 there is -log w, so its bounds are those of 1 / w.
        kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(log_ratio, mask, option, threshold)
        TENSORS[f"mismatch/{name}"] = kept
    metrics = rollout_corr_helper.compute_offpolicy_metrics(old, sampler, mask)
    TENSORS["mismatch/metrics"] = torch.tensor(
        [metrics[name] for name in ("kl", "k3_kl", "chi2_token")]
    ).double()
    TENSORS["mismatch/off_policy_sequence_mask"] = GRPOTrainer.get_off_policy_mask(
        scene["advantages"][:, None], scene["logp"], sampler, mask, 0.1
    )


def main():
    for name, scene in SCENES.items():
        TENSORS.update({f"{name}/{key}": tensor for key, tensor in scene.items()})
    make_objective_cases()
    make_dpo_case()
    make_other_values()
    save_file(
        {name: tensor.contiguous() for name, tensor in TENSORS.items()}, HERE / "peer_values.safetensors"
    )
    header = {
        "versions": {name: version(name).split("+")[0] for name in ("trl", "verl", "torch")},
        "cases": CASES,
    }
    (HERE / "peer_values.json").write_text(json.dumps(header, indent=1) + "\n")
    print(f"{len(CASES)} cases, versions {header['versions']}")


if __name__ == "__main__":
    main()
