"""The options of the ratio's forward: whose experts it runs on, and what is done to it on purpose."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class ReplayConfig:
    """Routing Replay (GSPO §5.3): whose experts the ratio's forward is forced to use.

    None: native routing. "old_policy" (R2): the trace of the trainer's old-policy pass. "rollout" (R3,
    2510.11370): the trace of the sampler's decoding, in the old-policy pass's log-probabilities as well.
    """

    source: str | None = None
    # None: all rows and experts of the trace, weights from the current router. "response": only the rows
    # that score response tokens. "threshold": only experts whose current score is at least min_ratio x the
    # router's own K-th. "old_weights": the old gate weights too, for study: the router gets no gradient.
    variant: str | None = None
    min_ratio: float | None = None  # of variant=threshold, in (0, 1]

    def check(self) -> None:
        if self.source not in (None, "old_policy", "rollout"):
            raise ValueError(f"replay.source={self.source!r}: expected null, old_policy or rollout")
        if self.variant not in (None, "response", "threshold", "old_weights"):
            raise ValueError(
                f"replay.variant={self.variant!r}: expected null, response, threshold or old_weights"
            )
        if self.variant is not None and self.source is None:
            raise ValueError(f"replay.variant={self.variant} needs a replay.source")
        if self.variant == "old_weights" and self.source != "old_policy":
            raise ValueError(
                "replay.variant=old_weights replays the old-policy pass: replay.source=old_policy"
            )
        if (self.variant == "threshold") != (self.min_ratio is not None):
            raise ValueError("replay.min_ratio goes with replay.variant=threshold, and that needs it")
        if self.min_ratio is not None and not 0 < self.min_ratio <= 1:
            raise ValueError(f"replay.min_ratio={self.min_ratio}: expected above 0 and at most 1")


@dataclass
class InterventionConfig:
    """What is done to the importance ratios on purpose, to tell causes apart; see `intervention`."""

    # Share of π_old's experts that are swapped for others in the ratio's forward, 0 to 1; None: off. The rest
    # of its choice is kept, so that 0 is routing replay. With replay.source=old_policy π_old's
    # log-probabilities are on the swapped experts as well: replay of a trace with so many changes.
    expert_changes: float | None = None
    swap: str = "next_best"  # for the highest-scored experts not chosen, or "random" ones
    log_ratio_noise: float = 0.0  # nats, standard deviation of noise added to every token's log-ratio

    @property
    def active(self) -> bool:
        return self.expert_changes is not None or self.log_ratio_noise > 0

    def check(self) -> None:
        if self.expert_changes is not None and not 0 <= self.expert_changes <= 1:
            raise ValueError(
                f"intervention.expert_changes={self.expert_changes}: expected a fraction, or null"
            )
        if self.swap not in ("next_best", "random"):
            raise ValueError(f"intervention.swap={self.swap!r}: expected next_best or random")
        if not 0 <= self.log_ratio_noise < math.inf:
            raise ValueError(f"intervention.log_ratio_noise={self.log_ratio_noise}: must be at least 0")
