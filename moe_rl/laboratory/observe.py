"""One policy on a batch, by the forward that training uses: what it scores, and how it routes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_rl.routing import RoutingTrace, record_routing
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.passes import Plan, flat
from moe_rl.training.policy import score


@dataclass(frozen=True, eq=False)
class RoutedPass:
    """What one forward of a policy gave on a batch, on the CPU.

    trace              RoutingTrace [B, T], native
    logp_BT            log-probability of token t, nats; its routing is row t - 1. 0 in the prompt columns
    weights_BTLK       gate weights of the experts in `trace`, 0 in rows not valid
    scores_BTLE        what each router's top-k ranked (`Recorder.scores`)
    router_logp_BTLE   log softmax of each router's logits, what RSPO compares; None where the model does not
                       return one tensor of logits for each router call

    Weights and scores are None where they were not asked for.
    """

    trace: RoutingTrace
    logp_BT: Tensor
    weights_BTLK: Tensor | None = None
    scores_BTLE: Tensor | None = None
    router_logp_BTLE: Tensor | None = None

    def __getitem__(self, rows: slice) -> RoutedPass:
        """The same for some sequences."""
        present = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(self, **{name: part[rows] for name, part in present.items()})

    @staticmethod
    def cat(passes: list[RoutedPass]) -> RoutedPass:
        """Join passes of one model along B; what one of them lacks, the whole lacks."""

        def joined(name: str) -> Tensor | None:
            parts = [getattr(part, name) for part in passes]
            return None if any(part is None for part in parts) else torch.cat(parts)

        return RoutedPass(
            RoutingTrace.cat([part.trace for part in passes]),
            torch.cat([part.logp_BT for part in passes]),
            *map(joined, ("weights_BTLK", "scores_BTLE", "router_logp_BTLE")),
        )


@torch.no_grad()
def observe(
    model: PreTrainedModel, batch: RolloutBatch, plan: Plan, temperature: float, *, scores: bool = True
) -> RoutedPass:
    """The routing and the log-probabilities (at `temperature`) of `model` on a batch.

    Runs `score` on whole sequences, on the slices of `plan` and in the mode the model is in, as the updates
    do, so that an unchanged model gives the same bits. With scores=False only trace and log-probabilities are
    kept, which is B·T·L·(2E + K) numbers less. Raises RoutingError for a family whose routers have no gate
    weights or selection scores to record, which scores=False does not need.
    """
    parts = []
    for rows in flat(plan):
        with record_routing(model, weights=scores, scores=scores) as recorder:
            said = score(model, batch[rows], temperature, router_logits=scores)
        trace = recorder.trace().to("cpu")
        parts.append(
            RoutedPass(
                trace,
                said.logp_BT.cpu(),
                recorder.weights().cpu() if scores else None,
                recorder.scores().cpu() if scores else None,
                router_log_softmax(said.passed.router_logits, trace),
            )
        )
    return RoutedPass.cat(parts)


def router_log_softmax(router_logits: tuple[Tensor, ...] | None, trace: RoutingTrace) -> Tensor | None:
    """float32 [B, T, L, E] on the CPU; None unless there are logits over E experts for each of L calls."""
    shape = (*trace.valid.shape, trace.num_experts)
    if router_logits is None or len(router_logits) != len(trace.layer_ids):
        return None
    if any(logits.numel() != torch.Size(shape).numel() for logits in router_logits):
        return None
    return torch.stack([logits.float().log_softmax(-1).view(shape).cpu() for logits in router_logits], dim=2)
