"""Token sums of one objective on one reading of the inputs: what every aggregation starts from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.objectives import get_mismatch_correction, kl_estimate
from moe_rl.objectives.aggregation import masked
from moe_rl.objectives.base import Surrogate
from moe_rl.objectives.batch import Batch, prepare_batch
from moe_rl.objectives.diagnose.choices import Choice
from moe_rl.objectives.diagnose.dump import Dump
from moe_rl.objectives.diagnose.inputs import Advantages, Mask, Ratio
from moe_rl.objectives.diagnose.policies import Policy, needs_of
from moe_rl.objectives.metrics import policy_metrics
from moe_rl.objectives.sequence_level import sequence_log_ratio


@dataclass(frozen=True)
class Unit:
    """An objective on one reading of mask, ratio and sampler: all that costs a pass over the tokens."""

    policy: Policy
    ratio: Ratio
    mask: Mask
    correction: Choice

    @property
    def cost(self) -> int:
        return self.policy.cost + self.ratio.cost + self.mask.cost + self.correction.cost


@dataclass(frozen=True)
class Sums:
    """Token sums per response."""

    objective: Tensor  # [C, B], for C advantage conventions; maximised
    magnitude: Tensor  # [C, B], of |objective|: what its rounding error scales with
    regularisers: dict[str, Tensor]  # [B] each: k1, k2, k3, ratio*k3, entropy
    counts: Tensor  # [B], tokens under the unit's mask


def masked_batch(unit: Unit, dump: Dump, advantages: Tensor) -> tuple[Batch, Tensor | None]:
    """(batch under the unit's mask and ratio, sampler weights [B, T] or None)."""
    mask_BT, weights_BT = unit.mask.values, None
    if unit.correction.name:
        assert dump.sampler_logp is not None
        correct = get_mismatch_correction(unit.correction.name)(dump.old_logp, dump.sampler_logp, mask_BT)
        mask_BT, weights_BT = correct.mask, correct.weights
    batch = prepare_batch(dump.logp, dump.old_logp, advantages, mask_BT)
    return unit.ratio.change(batch, dump), weights_BT


def evaluate(unit: Unit, dump: Dump, advantages: list[Advantages]) -> Sums:
    """The unit's sums under every advantage convention.

    Objectives are linear in |A| given A's sign, so that two passes, at A = 1 and A = -1, serve all
    conventions with one advantage per response; comparisons are not, and take a pass for each.
    """
    linear = not unit.policy.compares
    per_response = linear and all(choice.values.ndim == 1 for choice in advantages)
    if per_response:
        ones_B = torch.ones(len(dump.mask), dtype=torch.float64)
        (up_B, up_size_B), (down_B, down_size_B) = (_row_sums(unit, dump, sign * ones_B) for sign in (1, -1))
        values_CB = torch.stack([choice.values for choice in advantages])
        objective_CB = _by_sign(values_CB, up_B, down_B)
        magnitude_CB = _by_sign(values_CB, up_size_B, down_size_B)
    else:
        sums = [_row_sums(unit, dump, choice.values) for choice in advantages]
        objective_CB, magnitude_CB = (torch.stack(part) for part in zip(*sums, strict=True))
    batch, _ = masked_batch(unit, dump, torch.zeros(len(dump.mask), dtype=torch.float64))
    return Sums(objective_CB, magnitude_CB, _regularisers(unit, dump, batch), batch.mask.sum(dim=1).double())


def clip_counts(unit: Unit, dump: Dump, advantages: Tensor) -> dict[str, float]:
    """The metrics that the unit's objective reports under these advantages."""
    batch, _ = masked_batch(unit, dump, advantages)
    surrogate = _surrogate(unit, dump, batch)
    return policy_metrics(batch, surrogate.clipped, surrogate.outside)


def _by_sign(values_CB: Tensor, up_B: Tensor, down_B: Tensor) -> Tensor:
    # Zeros are set apart: 0 times an overflown ratio would be NaN.
    zero = torch.zeros_like(values_CB)
    return torch.where(values_CB > 0, values_CB * up_B, torch.where(values_CB < 0, -values_CB * down_B, zero))


def _row_sums(unit: Unit, dump: Dump, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over tokens [B] of the objective and of its absolute value."""
    batch, weights_BT = masked_batch(unit, dump, advantages)
    values_BT = masked(_surrogate(unit, dump, batch).objective, batch.mask)
    values_BT = values_BT if weights_BT is None else values_BT * weights_BT
    return values_BT.sum(dim=1), values_BT.abs().sum(dim=1)


def _surrogate(unit: Unit, dump: Dump, batch: Batch) -> Surrogate:
    tensors = {}
    for name in needs_of(unit.policy.family):
        if name == "sampler_logp_BT":  # MiniRL; the sampler is the old policy where the dump has none
            sampler = dump.old_logp if dump.sampler_logp is None else dump.sampler_logp
            tensors[name] = masked(sampler, batch.mask)
        if name == "ref_logp_BT":
            assert dump.ref_logp is not None
            tensors[name] = masked(dump.ref_logp, batch.mask)
        if name == "router_shift_BT":
            assert dump.router_shift is not None
            tensors[name] = torch.where(batch.mask & dump.mask, dump.router_shift, 1.0)
    return unit.policy.surrogate(batch, tensors)


def _regularisers(unit: Unit, dump: Dump, batch: Batch) -> dict[str, Tensor]:
    found = {}
    if dump.ref_logp is not None:
        ref_BT = masked(dump.ref_logp, batch.mask)
        found = {name: kl_estimate(batch.logp, ref_BT, name) for name in ("k1", "k2", "k3")}
        log_ratio_BT = sequence_log_ratio(batch) if unit.policy.by_response else batch.log_ratio
        found["ratio*k3"] = log_ratio_BT.exp() * found["k3"]
    if dump.entropy is not None:
        found["entropy"] = dump.entropy
    return {name: masked(values_BT, batch.mask).sum(dim=1) for name, values_BT in found.items()}
