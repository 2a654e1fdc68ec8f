"""slime's loss functions on the scenes, from `slime.utils.ppo_utils`.

Its reducers (`get_sum_of_sample_mean`) live beside Megatron, which is not needed here, and are written out: a
response's mean summed over responses, or a sum over tokens, each over the count of the whole batch.
"""

from argparse import Namespace
from functools import partial

import torch
from scenes import SHARED_SCENES
from slime.utils import ppo_utils

PER_SAMPLE, PER_TOKEN = "per sample", "calculate_per_token_loss"


def record(recording):
    with torch.compiler.set_stance("force_eager"):  # the functions are compiled, which takes minutes here
        for scene in SHARED_SCENES:
            loss_cases(recording, scene)
        record_estimates(recording)


def ragged(rows_BT, mask_BT):
    """slime's layout: one tensor for each response, as long as the response."""
    return [row[: int(mask.sum())] for row, mask in zip(rows_BT, mask_BT, strict=True)]


def reduce(values, masks, reducer):
    parts = values.split([len(mask) for mask in masks])
    if reducer == PER_TOKEN:
        return sum(part.sum() for part in parts) / sum(mask.sum() for mask in masks)
    means = [part.sum() / mask.sum().clamp(min=1) for part, mask in zip(parts, masks, strict=True)]
    return sum(means) / len(masks)


def loss_cases(recording, scene):
    """Token and sequence ratios under both reducers, and CISPO.

    slime's clip fraction leaves dual-clip hits out and is sign-blind for CISPO; it is compared where we count
    the same.
    """
    case = partial(policy_case, recording, scene)
    mean, token = {"aggregation": "seq-mean-token-mean"}, {"aggregation": "token-mean"}
    by_sample, by_token = {"count": "clip_frac/sequence"}, {"count": "clip_frac/token"}
    case("grpo", mean, reducer=PER_SAMPLE, **by_sample)
    case("grpo", token, reducer=PER_TOKEN, **by_token)
    case("grpo", mean | {"dual_clip": 3.0}, reducer=PER_SAMPLE, dual_clip=3.0)
    case("dapo", {"clip_high": 0.28}, reducer=PER_TOKEN, high=0.28, **by_token)
    gspo = {"low": 3e-4, "high": 4e-4}
    case("gspo", mean, reducer=PER_SAMPLE, **gspo, **by_sample)
    case("gspo", token, reducer=PER_TOKEN, **gspo, **by_token)
    cispo = {"clip_low": 1.0, "clip_high": 1.5}
    blind = {"count": "clip_frac/token_signblind"}
    case("cispo", cispo | mean, reducer=PER_SAMPLE, low=1.0, high=1.5)
    case("cispo", cispo | token, reducer=PER_TOKEN, low=1.0, high=1.5, **blind)


def policy_case(
    recording, scene_name, objective, options, *, reducer, low=0.2, high=0.27, dual_clip=None, count=None
):
    scene, leaf = recording.scenes[scene_name], recording.leaf(scene_name)
    mask = scene["mask"]
    logp, old, masks = (ragged(rows, mask) for rows in (leaf, scene["old_logp"], mask))
    advantages = torch.cat(ragged(scene["advantages"][:, None].expand_as(mask), mask))
    if objective == "gspo":
        ppo_kl = ppo_utils.compute_gspo_kl(logp, old, logp, masks)
    else:
        ppo_kl = torch.cat(old) - torch.cat(logp)
    if objective == "cispo":
        losses, clipped = ppo_utils.compute_cispo_loss(ppo_kl, torch.cat(logp), advantages, low, high)
    else:
        losses, clipped = ppo_utils.compute_policy_loss(ppo_kl, advantages, low, high, dual_clip)
    counts = {count: reduce(clipped, masks, reducer).item()} if count else {}
    if reducer == PER_TOKEN:
        counts["kl/k1"] = reduce(ppo_kl, masks, reducer).item()
    estimator = objective if objective in ("gspo", "cispo") else "ppo"
    function = f"{estimator} {reducer}"
    recording.record(scene_name, function, objective, options, reduce(losses, masks, reducer), leaf, counts)


def record_estimates(recording):
    """Generalised advantages, and the sequence mask that drops drifted responses with A < 0."""
    scene, tensors = recording.scenes["far"], recording.tensors
    mask = scene["mask"]
    rewards, values = scene["ref_logp"] * mask, scene["token_advantages"] * mask
    advantages, returns = ppo_utils.vanilla_gae(rewards, values, 0.9, 0.8)
    tensors["slime/gae/advantages"], tensors["slime/gae/returns"] = advantages * mask, returns * mask
    logp, sampler, masks = (ragged(scene[name], mask) for name in ("logp", "sampler_logp", "mask"))
    advantages = ragged(scene["advantages"][:, None].expand_as(mask), mask)
    kept, dropped = ppo_utils.compute_opsm_mask(Namespace(opsm_delta=0.1), logp, sampler, advantages, masks)
    tensors["slime/opsm/kept"], tensors["slime/opsm/dropped"] = kept.double(), dropped.double().reshape(1)
