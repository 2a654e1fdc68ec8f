"""The routing of one rollout of TRL's trainer: the sampler's, and π_old's in the pass that scores it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.integrations.carried import FORCED, OLD, put_trace
from moe_rl.integrations.sampled import Sampled
from moe_rl.routing import RoutingError, RoutingTrace, record_routing, replay_routing

Score = Callable[..., Any]  # TRL's _get_per_token_logps_and_entropies, a tuple with log-probabilities first


@dataclass
class RolloutRouting:
    """What is known of a rollout's routing so far, all rows of this process.

    replay       the trainer's; under "rollout" the old-policy pass is forced onto the sampler's experts
    pass_due     the next call for log-probabilities is the old policy's
    sampled      gives the sampler's trace on the padded batch
    forced       that trace, once the old-policy pass has replayed it
    old, logp    the experts that π_old chose by itself in its pass, [B, T], and its log-probabilities [B, C]
    """

    replay: str | None
    pass_due: bool = False
    sampled: Sampled | None = None
    forced: RoutingTrace | None = None
    old: RoutingTrace | None = None
    logp: Tensor | None = None

    def old_policy_pass(
        self,
        score: Score,
        model: nn.Module,
        ids_BT: Tensor,
        mask_BT: Tensor,
        columns: int,
        batch_size: int,
        **options: Any,
    ) -> Tensor:
        """π_old's log-probabilities of the last `columns` tokens, with `old` recorded.

        Under rollout replay `old` is what each router would have chosen on the hidden states that the
        sampler's experts lead to: the same conditions as in the forward of the loss, where it is compared.
        """
        if self.replay == "rollout":
            if options.get("pixel_values") is not None:
                raise RoutingError("replay='rollout' of prompts with images is not supported")
            self.forced = self._require_sampled()(mask_BT, columns)
            logps, chosen = [], []
            for start in range(0, len(ids_BT), batch_size):  # a replay holds for one batch of rows
                rows = slice(start, start + batch_size)
                with replay_routing(model, self.forced[rows]) as replay:
                    logps.append(score(model, ids_BT[rows], mask_BT[rows], columns, **options)[0])
                chosen.append(replay.native)
            self.old, logp_BC = RoutingTrace.cat(chosen), torch.cat(logps)
        else:
            with record_routing(model) as recorder:
                logp_BC = score(model, ids_BT, mask_BT, columns, batch_size=batch_size, **options)[0]
            self.old = RoutingTrace.cat(recorder.traces())
        self.logp = logp_BC
        return logp_BC

    def _require_sampled(self) -> Sampled:
        if self.sampled is None:
            raise RoutingError("replay='rollout': the routing of the sampler was not seen in this rollout")
        return self.sampled

    def put_into(self, batch: dict[str, Any]) -> None:
        """Let π_old's routing, and what is forced where that is another, travel with the batch."""
        assert self.old is not None
        put_trace(batch, OLD, self.old)
        if self.forced is not None:
            put_trace(batch, FORCED, self.forced)
