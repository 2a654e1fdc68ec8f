"""TRL's loss functions on the scenes: the trainers' own methods, with a stand-in for `self`.

The stand-in's log-probabilities are our leaf tensor, so no model is involved. These methods are private to
TRL and change between versions.
"""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import torch
from scenes import EMPTY_ROW, LENGTHS, MAX_LENGTH, SHARED_SCENES
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer

SAPO_TAU = 1.0625  # TRL rounds its temperatures to float32; this one survives that


def record(recording):
    for scene in SHARED_SCENES:
        grpo_cases(recording, scene)
    dpo_case(recording)
    scene = recording.scenes["far"]
    recording.tensors["mismatch/off_policy_sequence_mask"] = GRPOTrainer.get_off_policy_mask(
        scene["advantages"][:, None], scene["logp"], scene["sampler_logp"], scene["mask"], 0.1
    )


def identity(values, *args, **kwargs):
    return values


def grpo_case(
    recording,
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
    scene, logp = recording.scenes[scene_name], recording.leaf(scene_name)
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
    rest = {"offset": offset, "extra": extra}
    if beta:
        rest["reported"] = {"kl/reference_k3": metrics["eval"]["kl"][0]}
    function = f"{trainer.__name__} loss_type={loss_type} level={level}"
    recording.record(scene_name, function, objective, options, loss, logp, counts, **rest)


def grpo_cases(recording, scene):
    """Every loss of the GRPO trainers on one scene."""
    case = partial(grpo_case, recording, scene)
    by_token, by_response = (
        {f"clip_frac/{unit}": "clip_ratio/region_mean"} for unit in ("token", "sequence")
    )
    case("grpo", {}, count=by_token)
    case("grpo", {"kl_coef": 0.05}, beta=0.05, count=by_token, extra=[("ref_logp_BT", "ref_logp")])
    gspo = {"level": "sequence", "low": 3e-4, "high": 4e-4, "count": by_response}
    case("gspo", {}, **gspo)
    case("gspo", {"aggregation": "seq-mean-token-sum"}, loss_type="luspo", **gspo)
    case("dapo", {}, loss_type="dapo", high=0.28, count=by_token)
    case("dr_grpo", {"length_divisor": float(MAX_LENGTH)}, loss_type="dr_grpo", high=0.2, count=by_token)
    case("cispo", {}, loss_type="cispo", high=5.0, count={"clip_frac/token": "cispo_clip_ratio"})
    case("sapo", {"tau_neg": SAPO_TAU}, loss_type="sapo")
    # GMPOTrainer gives a response without tokens a ratio of 1, and so the loss -A.
    offset = recording.scenes[scene]["advantages"][EMPTY_ROW].item() / len(LENGTHS)
    offset = offset if scene == "empty_row" else 0.0
    case("gmpo", {}, trainer=GMPOTrainer, low=0.4, high=0.4, count=by_token, offset=offset)
    weights = recording.scenes[scene]["weights"]
    case("grpo", {}, weights=weights, count=by_token, extra=[("weights_BT", "weights")])


def dpo_case(recording):
    """Neighbouring rows of the scene as pairs, in TRL's order: chosen responses first, then rejected ones."""
    scene, logp = recording.scenes["far"], recording.leaf("far")
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
    recording.record("far", "DPOTrainer loss_type=sigmoid", "dpo", {}, loss, logp, counts, extra=extra)
