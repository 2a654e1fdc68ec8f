"""Other ways to replay a trace than all of its experts, with weights from the current router."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.routing.gates import Scores
from moe_rl.routing.trace import RoutingError, RoutingTrace


@dataclass(frozen=True)
class Threshold:
    """Keep a replayed expert only where the current router still ranks it near its own choice.

    A slot of the trace is kept where its score is at least min_ratio x the score of the router's own K-th
    expert (at least that score, should it be negative). Dropped slots get, in order, the router's own experts
    that no kept slot holds, best first. So no row repeats an expert, an own choice is never dropped, and kept
    experts stay in their slots. `replay.replaced` says how much was dropped.

    The score is what the router's top-k ranks: a probability with its selection bias, or the softmax of the
    logits where the top-k is over logits, and in either case before the mask of expert groups. A frozen hash
    router (DeepSeek-V4) ranks nothing and is replayed as it is; PhiMoE raises RoutingError.

    min_ratio  in (0, 1]; 1 leaves the router's own set, but for experts as high outside its expert groups
    """

    min_ratio: float

    def __post_init__(self) -> None:
        if not 0 < self.min_ratio <= 1:
            raise RoutingError(
                f"min_ratio must be in (0, 1], got {self.min_ratio}: replay without Threshold to keep all"
            )

    def choose(self, forced_NK: Tensor, native_NK: Tensor, scores: Scores | None) -> Tensor:
        """int64 [N, K]: the replayed ids, completed by native ones."""
        if scores is None:
            return forced_NK
        native_scores_NK = scores(native_NK)
        best_first_NK = native_NK.gather(1, native_scores_NK.argsort(stable=True, dim=1, descending=True))
        weakest_N1 = native_scores_NK.amin(1, keepdim=True)
        # A selection bias can make scores negative, and a ratio of a negative score asks for more than it.
        least_N1 = torch.minimum(self.min_ratio * weakest_N1, weakest_N1)
        kept_NK = scores(forced_NK) >= least_N1
        in_kept_NK = ((best_first_NK[:, :, None] == forced_NK[:, None, :]) & kept_NK[:, None, :]).any(2)
        free_first_NK = best_first_NK.gather(1, in_kept_NK.int().argsort(stable=True, dim=1))
        nth_dropped_NK = ((~kept_NK).cumsum(1) - 1).clamp(min=0)
        return torch.where(kept_NK, forced_NK, free_first_NK.gather(1, nth_dropped_NK))


@dataclass(frozen=True, eq=False)
class OldWeights:
    """Replay the recorded gate weights as well as the recorded experts, for study.

    The weights are constants, so the router gets no gradient from the rows that are replayed: it would learn
    only from auxiliary losses, as no method in use intends.

    weights_BTLK  what `record_routing(model, weights=True)` returned as `recorder.weights()` beside the trace
    """

    weights_BTLK: Tensor

    def require_fit(self, trace: RoutingTrace) -> None:
        """Raise RoutingError unless there is one finite weight for every expert of the trace."""
        weights, shape = self.weights_BTLK, trace.experts.shape
        if weights.shape != shape or not weights.is_floating_point():
            raise RoutingError(
                f"OldWeights must be floats [B, T, L, K] = {list(shape)} like the trace's experts, "
                f"got {weights.dtype} {list(weights.shape)}"
            )
        if not bool(weights[trace.valid.to(weights.device)].isfinite().all()):
            raise RoutingError("OldWeights hold a weight that is not finite in a valid row of the trace")


Variant = Threshold | OldWeights


def scoring_rows(mask_BT: Tensor) -> Tensor:
    """bool [B, T]: the rows whose logits score the masked tokens, for a replay of the response alone.

    Row t - 1 scores token t, so a response of tokens prompt_len … end - 1 has rows prompt_len - 1 … end - 2:

        replay_routing(model, trace.where(scoring_rows(response_mask_BT)))
    """
    return torch.cat([mask_BT[:, 1:], torch.zeros_like(mask_BT[:, :1])], dim=1).bool()
