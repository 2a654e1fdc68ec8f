"""The load-balancing loss of a MoE: for routers that have yet to learn, and against what RL does to load."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def load_balancing_loss(router_logits: Sequence[Tensor], top_k: Sequence[int], mask_BT: Tensor) -> Tensor:
    """mean over layers of E Σ_e f_e P_e (Switch Transformer, 2101.03961 Eq. 4 to 6); a scalar.

    f_e is the share of the layer's selections that went to expert e and P_e the mean probability of e, both
    over the tokens of `mask_BT`: 1 where all experts are chosen equally often, at most E. `router_logits`
    holds [B·T, E] scores of each MoE layer, softmax not yet taken, and `top_k` the K of each.

    transformers' own loss pools f and P over the layers before it multiplies them, so experts that one layer
    neglects and another prefers cancel; it is also K times larger.

    Raises `ValueError` when there is not one tensor of scores for each layer.
    """
    if len(router_logits) != len(top_k):
        raise ValueError(
            f"the model returns the scores of {len(router_logits)} routers and has {len(top_k)}: its load "
            "cannot be balanced here; set cold_start.aux_loss_coef=0 and optim.aux_loss_coef=0"
        )
    chosen_N = mask_BT.flatten().bool()
    losses = []
    for scores, K in zip(router_logits, top_k, strict=True):
        p_NE = scores.flatten(0, -2)[chosen_N].float().softmax(-1)
        E = p_NE.shape[-1]
        f_E = torch.bincount(p_NE.topk(K).indices.flatten(), minlength=E) / (K * len(p_NE))
        losses.append(E * (f_E * p_NE.mean(0)).sum())
    return torch.stack(losses).mean()
