"""Interventions on the importance ratio, to tell what routing change does from what a large step does.

A learning rate moves the policy and the routing together. Here the amount of expert change between π_old and
the ratio's forward is set by hand, or noise that has nothing to do with routing is put in its place:

- `expert_changes` p without replay: π_old scores on its own experts, the ratio's forward runs on the same
  experts with a share p of them swapped. p = 0 is routing replay.
- `expert_changes` p with replay: both run on the swapped experts, so that the experts are as wrong and the
  ratio compares like with like.
- `log_ratio_noise` σ: every token's log-ratio gets Gaussian noise of standard deviation σ. Its k3 estimate of
  the KL is σ²/2 to second order, so that σ can be set to the KL of any other arm.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_rl.routing import RoutingTrace, expert_change, record_routing
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.config import InterventionConfig
from moe_rl.training.forward import Forced
from moe_rl.training.learner import Learner
from moe_rl.training.passes import OldPolicy, Plan, flat
from moe_rl.training.policy import score
from moe_rl.training.prefix import distinct_prompts
from moe_rl.training.seeds import random_stream


@torch.no_grad()
def intervene(
    learner: Learner, batch: RolloutBatch, old: OldPolicy, plan: Plan, step: int
) -> tuple[OldPolicy, dict[str, float]]:
    """π_old's record as the updates are to see it, and what was done to it on the response rows.

    Metrics: `intervention/experts`, the share of experts swapped, as `expert_change` counts it. Random
    numbers come from the run's seed and the step. Unchanged, without metrics, where nothing is asked for.
    """
    config = learner.config.intervention
    if not config.active:
        return old, {}
    metrics = {}
    with random_stream(learner.config.seed, "intervention", step):
        if config.expert_changes is not None and old.trace is not None:
            trace = swapped_trace(learner, batch, old.trace, plan, config)
            forced, on = Forced(trace), batch.routing_rows_BT
            metrics["intervention/experts"] = expert_change(old.trace.where(on), trace.where(on)).experts
            old = replace(old, forced=forced)
            if learner.config.replay.source is not None:
                old = replace(old, logp_BT=_logp_on(learner, batch, forced, plan))
        if config.log_ratio_noise:
            noise_BT = config.log_ratio_noise * torch.randn(old.logp_BT.shape).to(old.logp_BT.device)
            old = replace(old, logp_BT=old.logp_BT - noise_BT * batch.response_mask_BT)
    return old, metrics


def swapped_trace(
    learner: Learner, batch: RolloutBatch, trace: RoutingTrace, plan: Plan, config: InterventionConfig
) -> RoutingTrace:
    """`trace` with a share of its experts swapped; rows that share a prompt share its swaps."""
    assert config.expert_changes is not None
    if config.swap == "random":
        scores_BTLE = torch.rand(*trace.experts.shape[:3], trace.num_experts, device=trace.experts.device)
    else:
        scores_BTLE = _router_scores(learner, batch, plan)
    swapped = swap_experts(trace, config.expert_changes, scores_BTLE)
    prompts, columns = distinct_prompts(*batch.prompts()), batch.prompt_length
    if learner.share_prompts and prompts.shared and config.expert_changes:
        # a packed prompt is run once for all of its rows
        experts = swapped.experts.clone()
        experts[:, :columns] = prompts.repeat(experts[prompts.first_P, :columns])
        swapped = replace(swapped, experts=experts)
    return swapped


def swap_experts(trace: RoutingTrace, share: float, scores_BTLE: Tensor) -> RoutingTrace:
    """Each slot of `trace`, with probability `share`, gets the best-scored expert that its token has not.

    A token's second swapped slot gets the second best, and so on, so that K swapped slots change K experts.
    Raises `ValueError` where fewer than K experts are left to swap for.
    """
    experts_BTLK = trace.experts.long()
    if share and trace.num_experts < 2 * trace.top_k:
        raise ValueError(
            f"intervention.expert_changes={share}: {trace.top_k} of {trace.num_experts} experts are chosen, "
            "which leaves too few others to swap them for"
        )
    lowest = torch.finfo(scores_BTLE.dtype).min  # of experts that a family's groups rule out
    others_BTLE = scores_BTLE.clamp_min(lowest).scatter(-1, experts_BTLK, -torch.inf)
    best_first_BTLE = others_BTLE.argsort(dim=-1, descending=True)
    swapped_BTLK = torch.rand(experts_BTLK.shape).to(experts_BTLK.device) < share
    nth_BTLK = (swapped_BTLK.cumsum(-1) - 1).clamp_min(0)
    new_BTLK = torch.where(swapped_BTLK, best_first_BTLE.gather(-1, nth_BTLK), experts_BTLK)
    return replace(trace, experts=new_BTLK.to(trace.experts.dtype))


def _router_scores(learner: Learner, batch: RolloutBatch, plan: Plan) -> Tensor:
    """[B, T, L, E]: by what each router ranks the experts."""
    parts = []
    for rows in flat(plan):
        part = batch[rows]
        with record_routing(learner.policy, scores=True) as recorder:
            learner.policy(
                input_ids=part.input_ids_BT,
                attention_mask=part.attention_mask_BT,
                position_ids=part.position_ids_BT,
                use_cache=False,
                logits_to_keep=1,
            )
        parts.append(recorder.scores())
    return torch.cat(parts)


def _logp_on(learner: Learner, batch: RolloutBatch, forced: Forced, plan: Plan) -> Tensor:
    """log π_old of the sampled tokens on the forced experts, [B, T], nats."""
    temperature = learner.config.rollout.temperature
    parts = [
        score(
            learner.policy,
            batch[rows],
            temperature,
            routing=forced[rows],
            share_prompts=learner.share_prompts,
        ).logp_BT
        for rows in flat(plan)
    ]
    return torch.cat(parts)
