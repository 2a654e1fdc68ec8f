"""Metrics over all rows of all micro-batches and processes since the last log, in one call on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.integrations.carried import counted_rows
from moe_rl.objectives import Objective
from moe_rl.objectives.base import never
from moe_rl.objectives.batch import prepare_batch
from moe_rl.objectives.metrics import policy_metrics
from moe_rl.routing import ExpertChange, RoutingTrace, expert_change


@dataclass(frozen=True)
class LossPass:
    """What the forward of one loss saw, detached; C completion columns, the names of the objectives' call.

    rows      logp_BT, old_logp_BT, advantages, mask_BT and keyword tensors, of C columns; advantages [B]
              or [B, C]
    changes   expert changes on the rows that score counted tokens, by the name they are logged under
    """

    rows: dict[str, Tensor]
    changes: dict[str, ExpertChange] = field(default_factory=dict)


class MetricPool:
    """Keeps loss passes and reduces them to one dictionary of metrics; `objective` says what is clipped.

    None: a loss without a clip rule known here, of which ratios and KL are reported and no clip fractions.
    """

    def __init__(self, objective: Objective | None) -> None:
        self._objective = objective
        self._rows: list[dict[str, Tensor]] = []
        self._changes: dict[str, list[ExpertChange]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, seen: LossPass) -> None:
        self._rows.append({name: tensor.detach().cpu() for name, tensor in seen.rows.items()})
        for name, change in seen.changes.items():
            self._changes.setdefault(name, []).append(change)

    def reduce(self, accelerator: Any) -> tuple[dict[str, float], dict[str, ExpertChange]]:
        """(the objective's metrics, expert changes by name) over every process's rows; empties the pool.

        All processes must call it after the same number of passes.
        """
        rows = {name: self._gathered(name, accelerator) for name in self._rows[0]}
        changes = {
            name: combined(ExpertChange.combine(parts), accelerator)
            for name, parts in sorted(self._changes.items())
        }
        self._rows.clear()
        self._changes.clear()
        return batch_metrics(self._objective, rows), changes

    def _gathered(self, name: str, accelerator: Any) -> Tensor:
        """A tensor's rows of all passes and processes, [B] or padded to the longest [B, C]."""
        parts = [rows[name] for rows in self._rows]
        if parts[0].dim() == 1:
            whole = torch.cat(parts)
        else:
            width = max(part.shape[1] for part in parts)
            whole = torch.cat([nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])
        whole = whole.to(accelerator.device)
        if whole.dim() > 1:
            whole = accelerator.pad_across_processes(whole, dim=1)
        gathered: Tensor = accelerator.gather(whole)
        return gathered.cpu()


@torch.no_grad()
def batch_metrics(objective: Objective | None, rows: dict[str, Tensor]) -> dict[str, float]:
    """The metrics of an objective on rows of a batch."""
    if objective is not None:
        _, metrics = objective(**rows)  # type: ignore[arg-type]  # no counts among the rows
        return metrics
    batch = prepare_batch(*(rows[name] for name in ("logp_BT", "old_logp_BT", "advantages", "mask_BT")))
    nothing = never(batch.logp)
    metrics = policy_metrics(batch, nothing, nothing)
    return {name: value for name, value in metrics.items() if not name.startswith("clip_frac/")}


def combined(change: ExpertChange, accelerator: Any) -> ExpertChange:
    """A change over the tokens of every process, by the sums of its counts."""
    L = len(change.layer_ids)
    tokens = torch.tensor([change.changed_tokens, change.num_tokens])
    counts = torch.cat([change.changed_experts, change.changed_sets, tokens]).to(accelerator.device)
    counts = accelerator.reduce(counts, "sum").cpu()
    return ExpertChange(
        change.layer_ids, change.top_k, counts[:L], counts[L : 2 * L], int(counts[-2]), int(counts[-1])
    )


def change(old: RoutingTrace, new: RoutingTrace, batch: Mapping[str, Any]) -> ExpertChange:
    """The expert change on the rows that score the batch's counted tokens; of no tokens where none counts."""
    rows_BT = counted_rows(batch).cpu() & old.valid.cpu() & new.valid.cpu()
    if not bool(rows_BT.any()):
        zeros = torch.zeros(len(old.layer_ids), dtype=torch.int64)
        return ExpertChange(old.layer_ids, old.top_k, zeros, zeros, 0, 0)
    return expert_change(old.where(rows_BT), new.to("cpu"))


def change_metrics(changes: dict[str, ExpertChange]) -> dict[str, float]:
    """`<name>`, `<name>_sets` and `<name>_tokens` of expert changes, as fractions; none of no tokens."""
    found: dict[str, float] = {}
    for name, change in changes.items():
        if change.num_tokens:
            found |= {name: change.experts, f"{name}_sets": change.sets, f"{name}_tokens": change.tokens}
    return found
