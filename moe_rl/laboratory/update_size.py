"""How large an update was: what the optimiser did, how far the weights moved, how far the policy did."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.laboratory.observe import RoutedPass
from moe_rl.laboratory.rows import COLUMNS, Row, rows_of
from moe_rl.laboratory.two_causes import per_response
from moe_rl.laboratory.weights import Weights, relative_update
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.update import Update


def update_rows(
    update: Update,
    old: RoutedPass,
    new: RoutedPass,
    batch: RolloutBatch,
    groups_B: Tensor,
    resamples: int,
    subject: str,
) -> Iterator[Row]:
    """Over response tokens and native routing, since the batch was sampled: KL(old ‖ new), and the log-ratio.

    kl_k1, kl_k3    mean of −log r and of r − 1 − log r, nats a token
    log_ratio_sq    mean of (log r)², nats²
    lr, loss, grad_norm    of this update; the norm before clipping
    """
    mask_BT = batch.response_mask_BT.cpu().double()
    log_ratio_BT = (new.logp_BT.double() - old.logp_BT.double()) * mask_BT
    for metric, values_BT in (
        ("kl_k1", -log_ratio_BT),
        ("kl_k3", torch.expm1(log_ratio_BT) - log_ratio_BT),
        ("log_ratio_sq", log_ratio_BT**2),
    ):
        sums = per_response(values_BT, mask_BT, groups_B)
        yield from rows_of(sums, resamples, subject=subject, rows="response", metric=metric)
    for metric, value in (("lr", update.lr), ("loss", update.loss), ("grad_norm", update.grad_norm)):
        yield _one_number(subject, metric, value)


def moved_row(old: Weights, policy: PreTrainedModel, subject: str) -> Row:
    """‖θ − θ_old‖ / ‖θ_old‖ over all parameters, since the batch was sampled."""
    return _one_number(subject, "relative_update_norm", relative_update(old, policy))


def _one_number(subject: str, metric: str, value: float) -> Row:
    """A row of something that is one number, of which nothing can be resampled."""
    nothing = float("nan")
    return dict(
        zip(
            COLUMNS,
            (subject, "", metric, "all", "", value, 1, value, nothing, nothing, 1, "updates"),
            strict=True,
        )
    )
