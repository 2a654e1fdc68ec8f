"""The options of sampling: on which prompts, how many responses, how long, by which numerics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace


@dataclass
class RolloutConfig:
    """How responses are sampled from the old policy, and on how many prompts."""

    prompts: int = 32  # P, prompts per step
    responses: int = 8  # G, responses per prompt (the group)
    max_new_tokens: int = 24  # a response that reaches it without a stop token is "truncated"
    # [[step, max_new_tokens from it on], ...], e.g. [[40, 32], [80, 48]]: longer generation (GSPO §5.1)
    length_schedule: list[list[int]] = field(default_factory=list)
    query_set: int | None = None  # as many prompts, trained on again and again; None: fresh ones every step
    query_set_steps: int | None = None  # steps until they are replaced by as many new ones; None: never
    sampler_dtype: str | None = None  # bfloat16: a copy of the weights in it samples, an engine of its own
    # False: π_old's log-probabilities are the sampler's own (GSPO §5.4). An old-policy pass is then run only
    # in steps that measure drift, and where the objective asks for π_old's values or router shift.
    recompute: bool = True
    # Partial rollout: as many first tokens of a step's responses are drawn before the updates of the step
    # before, and the responses go on with the weights after them; 0: off
    ahead: int = 0
    temperature: float = 1.0  # of the sampler, and of every log-probability that enters a ratio
    top_p: float = 1.0  # only 1.0: see `check`
    top_k: int = 0  # only 0 (off): see `check`
    refill: int = 0  # dynamic sampling: further batches drawn at most to replace groups without signal
    microbatch: int | None = None  # responses decoded together; None: all
    overlong_cache: int | None = None  # soft overlong punishment over the last so many tokens; None: off
    grading_timeout: float | None = 20.0  # seconds of wall clock a response; then reward 0; None: no limit

    def check(self) -> None:
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"rollout.top_p={self.top_p} and rollout.top_k={self.top_k}: only top_p=1.0 and top_k=0 are "
                "accepted, since a truncated sampler draws from another distribution than the one whose "
                "log-probabilities enter the importance ratio; lower rollout.temperature instead"
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"rollout.temperature={self.temperature}: must be a number above 0 (ratios divide by it)"
            )
        if self.grading_timeout is not None and not 0 < self.grading_timeout < math.inf:
            raise ValueError(f"rollout.grading_timeout={self.grading_timeout}: expected seconds, or null")
        if self.responses < 2:
            raise ValueError(
                f"rollout.responses={self.responses}: a group needs at least 2 responses, a group of one has "
                "no advantage"
            )
        if self.refill < 0:
            raise ValueError(f"rollout.refill={self.refill}: must be at least 0")
        if self.sampler_dtype not in (None, "bfloat16", "float16"):
            raise ValueError(
                f"rollout.sampler_dtype={self.sampler_dtype!r}: expected bfloat16, float16 or null"
            )
        self._check_schedules()
        shortest = min([self.max_new_tokens, *(limit for _, limit in self.length_schedule)])
        if self.ahead and not 0 < self.ahead < shortest:
            raise ValueError(
                f"rollout.ahead={self.ahead}: expected 0 (off) to {shortest - 1}, one less than the "
                "tokens of a response"
            )
        if self.ahead and self.refill:
            raise ValueError(
                "rollout.refill draws prompts that nothing was sampled ahead for: not with rollout.ahead"
            )
        if self.overlong_cache is not None and not 0 < self.overlong_cache <= self.max_new_tokens:
            raise ValueError(
                f"rollout.overlong_cache={self.overlong_cache}: expected 1 to rollout.max_new_tokens="
                f"{self.max_new_tokens}, or null"
            )
        if self.prompts < 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"rollout.prompts={self.prompts} and rollout.max_new_tokens={self.max_new_tokens} "
                "must be at least 1"
            )

    def _check_schedules(self) -> None:
        if any(len(pair) != 2 or min(pair) < 1 for pair in self.length_schedule):
            raise ValueError(
                f"rollout.length_schedule={self.length_schedule}: expected [[step, tokens], ...], from 1"
            )
        if self.length_schedule and self.overlong_cache is not None:
            raise ValueError(
                "rollout.overlong_cache punishes by one length: not with rollout.length_schedule"
            )
        if self.query_set is None:
            if self.query_set_steps is not None:
                raise ValueError("rollout.query_set_steps needs a rollout.query_set")
            return
        if self.query_set < self.prompts or self.query_set % self.prompts:
            raise ValueError(
                f"rollout.query_set={self.query_set}: expected a multiple of rollout.prompts={self.prompts}"
            )
        if self.query_set_steps is not None and self.query_set_steps < 1:
            raise ValueError(f"rollout.query_set_steps={self.query_set_steps}: must be at least 1")
        if self.refill:
            raise ValueError("rollout.refill draws fresh prompts: not with rollout.query_set")

    def at(self, step: int) -> RolloutConfig:
        """The same options with the response length of that step."""
        limits = [limit for since, limit in sorted(self.length_schedule) if since <= step]
        return replace(self, max_new_tokens=limits[-1]) if limits else self

    @property
    def longest(self) -> int:
        """Tokens of the longest response that may be sampled at any step."""
        return max([self.max_new_tokens, *(limit for _, limit in self.length_schedule)])
