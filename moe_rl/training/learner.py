"""The policy in training together with what its objective needs: value head, reference, optimiser."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from moe_rl.models import ValueHead
from moe_rl.objectives import Objective
from moe_rl.routing.routers import find_routers, has_routers, router_parameters
from moe_rl.training.border import check_model, check_together
from moe_rl.training.config import TrainConfig
from moe_rl.training.sharing import can_share_prompts

# Where each keyword tensor of an objective comes from.
BEFORE_UPDATES = {"sampler_logp_BT", "ref_logp_BT", "old_values_BT", "returns_BT"}
FROM_THE_FORWARD = {"entropy_BT", "values_BT", "router_shift_BT"}


@dataclass(frozen=True)
class Learner:
    """`needs` are the keyword tensors that the objective is called with.

    `reference` (frozen, the policy as it was before any update) and `value_head` are None where unneeded.
    `top_k` holds each router's number of experts per token where their load is balanced, else nothing.
    `trained` holds policy and value head, for the optimiser, gradient clipping and checkpoints. With
    `share_prompts` a forward runs the prompt of a group once (see `packed`).
    """

    policy: PreTrainedModel
    objective: Objective
    config: TrainConfig
    needs: frozenset[str]
    moe: bool
    share_prompts: bool
    top_k: tuple[int, ...]
    reference: PreTrainedModel | None
    value_head: ValueHead | None
    trained: nn.ModuleDict
    optimizer: torch.optim.AdamW

    @property
    def records_routing(self) -> bool:
        """Whether π_old's routing is recorded: to measure drift, to replay it, or for the router shift."""
        wanted = self.config.drift_every > 0 or self.config.replay.source is not None
        wanted |= self.config.intervention.expert_changes is not None
        return self.moe and (wanted or "router_shift_BT" in self.needs)

    def needs_old_policy_pass(self, step: int) -> bool:
        """Whether a step runs π_old over its batch, or has from the sampler all that it needs of it."""
        of_pass = {"values_BT", "router_shift_BT"} & self.needs
        measured = self.moe and self.config.drift_due(step)
        return self.config.rollout.recompute or measured or bool(of_pass)


def make_learner(policy: PreTrainedModel, objective: Objective, config: TrainConfig) -> Learner:
    """Call before a checkpoint is restored: the reference is the policy as it is now.

    Raises `ValueError` where objective, replay and model do not go together.
    """
    moe = has_routers(policy)
    check_together(objective, config)
    check_model(policy, objective, config)
    needs = needed_tensors(objective)
    policy.eval()  # π_old and π_θ are one function of their weights: dropout in neither
    if config.optim.freeze_routers:
        for router in find_routers(policy):
            for parameter in router_parameters(router):
                parameter.requires_grad_(False)
    reference = copy.deepcopy(policy).requires_grad_(False) if "ref_logp_BT" in needs else None
    value_head = ValueHead(policy).to(policy.device) if "values_BT" in needs else None
    trained = nn.ModuleDict({"policy": policy})
    if value_head is not None:
        trained["value_head"] = value_head
    optimizer = torch.optim.AdamW(
        trained.parameters(),
        lr=config.optim.lr,
        betas=(config.optim.beta1, config.optim.beta2),
        weight_decay=config.optim.weight_decay,
        fused=True,  # as transformers' Trainer; one by one, small parameters cost their calls
    )
    balanced = find_routers(policy) if config.optim.aux_loss_coef else []
    # a packed forward returns no router logits
    share = not balanced and "router_shift_BT" not in needs and can_share_prompts(policy)
    return Learner(
        policy,
        objective,
        config,
        needs,
        moe,
        share,
        tuple(router.top_k for router in balanced),
        reference,
        value_head,
        trained,
        optimizer,
    )


def needed_tensors(objective: Objective) -> frozenset[str]:
    """The keyword tensors of an objective under its options. Raises `ValueError` for one unknown here."""
    needs = {*objective.needs}
    needs |= {"ref_logp_BT"} if objective.kl_coef else set()
    needs |= {"entropy_BT"} if objective.entropy_coef else set()
    unknown = needs - BEFORE_UPDATES - FROM_THE_FORWARD
    if unknown:
        raise ValueError(
            f"objective {type(objective).__name__} needs {sorted(unknown)}, which the loop lacks"
        )
    return frozenset(needs)
