"""When a run collapsed: one documented rule, applied the same way while training and afterwards."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

WINDOW, FRACTION, PATIENCE = 5, 0.5, 5  # steps, of the best so far, steps in a row


@dataclass(frozen=True)
class Collapse:
    """Outcome of the collapse rule for one run.

    step: the first-hit step (1-based), at which the rule first holds; None when it never does.
    censored_at: without a collapse the last step seen, up to which the run survived; else None.
    reason: for a collapse "reward" or "non-finite reward|loss|gradient norm|policy", else "none" or "never
    earned reward".
    """

    step: int | None
    censored_at: int | None
    reason: str

    def __str__(self) -> str:
        if self.step is not None:
            return f"step {self.step} ({self.reason})"
        suffix = ", never earned reward" if self.reason == "never earned reward" else ""
        return f"none by step {self.censored_at}{suffix}"


def detect_collapse(
    rewards: Iterable[float],
    losses: Iterable[float] = (),
    grad_norms: Iterable[float] = (),
    skipped: Iterable[float] = (),
    *,
    window: int = WINDOW,
    fraction: float = FRACTION,
    patience: int = PATIENCE,
) -> Collapse:
    """Apply the collapse rule to the rewards (losses, gradient norms, skipped updates) of steps 1, 2, ...

    A step is bad when the trailing mean of the reward over `window` steps lies below `fraction` times the
    best such mean so far.  The run collapses at the step that completes `patience` bad steps in a row: the
    first-hit step, so that the same answer comes from the prefix that a training loop has seen.  A
    non-finite reward, loss or gradient norm is a collapse at its own step, unless updates were skipped there:
    then the run was told to go on, and a non-finite reward is left out of the trailing means.  The rule reads
    rewards as amounts above zero: while the best trailing mean is not positive nothing was earned, so nothing
    can collapse, and the run is "never earned reward" rather than collapsed.
    """
    rewards = list(rewards)
    series = (("reward", rewards), ("loss", list(losses)), ("gradient norm", list(grad_norms)))
    told_to_go_on = [count > 0 for count in skipped]
    best, bad_in_a_row = -math.inf, 0
    for index in range(len(rewards)):
        for name, values in series if not any(told_to_go_on[index : index + 1]) else ():
            if index < len(values) and not math.isfinite(values[index]):
                return Collapse(index + 1, None, f"non-finite {name}")
        recent = list(filter(math.isfinite, rewards[max(0, index + 1 - window) : index + 1]))
        if index + 1 < window or not recent:
            continue
        trailing = math.fsum(recent) / len(recent)
        best = max(best, trailing)
        bad_in_a_row = bad_in_a_row + 1 if best > 0 and trailing < fraction * best else 0
        if bad_in_a_row == patience:
            return Collapse(index + 1, None, "reward")
    earned = any(reward > 0 for reward in rewards if math.isfinite(reward))
    return Collapse(None, len(rewards), "none" if earned or not rewards else "never earned reward")
