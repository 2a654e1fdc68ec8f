"""What becomes of collapsed runs when they go on: from a collapsed or an earlier model, with changes.

A run's level is its mean reward over the SMOOTH steps before the decline that ends in the collapse. It came
back if the mean of the last SMOOTH steps of the run that goes on is at least BACK of that level. Steps are
noisy, so how often a healthy run would pass is measured as well: runs that did not collapse go on from the
middle and from their end, and their level is that of the SMOOTH steps up to there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from moe_rl.analysis.comparison import setting
from moe_rl.analysis.early_warning import decline
from moe_rl.analysis.run_files import CompactRun

BACK = 0.9  # of the level
SMOOTH = 5  # steps in a mean reward
SOURCE = re.compile(r"([^/]+)/([^/]+-[0-9a-f]{8})/seed(\d+)/(final|snapshots/step_(\d+))/?$")
# The settings that a treatment may change, in words.
TREATMENTS = {
    "objective.clip_low": "clip range retuned",
    "rollout.max_new_tokens": "generation lengthened",
    "seed": "other queries",
}


@dataclass(frozen=True)
class Outcome:
    """Runs of one start and treatment. `healthy`: from runs without a collapse; `regained`: what each ended
    at, as a share of its level."""

    words: str
    healthy: bool
    regained: tuple[float, ...]
    runs: tuple[CompactRun, ...]

    @property
    def recovered(self) -> int:
        """How many came back."""
        return sum(share >= BACK for share in self.regained)


@dataclass(frozen=True)
class Start:
    """Where a run goes on: after `step` steps of the run `source`."""

    source: CompactRun
    step: int

    @cached_property
    def onset(self) -> int | None:
        """The first step of the source's decline; None for a healthy one."""
        return decline(self.source)

    @property
    def words(self) -> str:
        if self.onset is None:
            return (
                "healthy, from its end" if self.step == len(self.source.steps) else "healthy, from its middle"
            )
        return "rolled back to before the decline" if self.step < self.onset else "from the collapsed model"

    @property
    def level(self) -> float:
        """Mean reward of the last steps before the decline, or before the start of a healthy run."""
        return mean_before(self.source, self.onset or self.step + 1)


def mean_before(run: CompactRun, step: int) -> float:
    """Mean reward of the SMOOTH steps before `step`."""
    earlier = run.steps[run.steps["step"] < step]["reward/mean"]
    return float(earlier.tail(SMOOTH).mean())


def regained(run: CompactRun, level: float) -> float:
    """What the run ends at over the level; 0 for one that ended because a value was not finite."""
    return 0.0 if run.header["status"] == "collapsed" else mean_before(run, len(run.steps) + 1) / level


def start_of(run: CompactRun, sources: dict[str, CompactRun]) -> Start | None:
    """The start of a run from another one's model; None where that one is not among the sources."""
    found = SOURCE.search(str(setting(run, "model.path") or ""))
    if found is None:
        return None
    suite, name, seed, _, step = found.groups()
    source = sources.get(f"{suite}/{name}-seed{seed}")
    return None if source is None else Start(source, len(source.steps) if step is None else int(step))


def treatment(run: CompactRun, source: CompactRun) -> str:
    """What the run changes of its source's configuration."""
    changed = [words for key, words in TREATMENTS.items() if setting(run, key) != setting(source, key)]
    return " and ".join(changed) or "nothing changed"


def outcomes(runs: Sequence[CompactRun], everything: Sequence[CompactRun]) -> list[Outcome]:
    """By start and treatment, and how the collapsed runs ended by themselves; a run whose source is not among
    `everything` cannot be judged: left out."""
    sources = {run.id: run for run in everything}
    groups: dict[tuple[bool, str], list[tuple[CompactRun, float]]] = defaultdict(list)
    collapsed: dict[str, Start] = {}
    for run in runs:
        start = start_of(run, sources)
        if start is None:
            continue
        healthy = start.onset is None
        words = f"{start.words}, {treatment(run, start.source)}"
        groups[healthy, words].append((run, regained(run, start.level)))
        if not healthy:
            collapsed[start.source.id] = start
    for start in collapsed.values():
        words = "left alone, to its own last step"
        groups[False, words].append((start.source, regained(start.source, start.level)))
    return [
        Outcome(words, healthy, tuple(share for _, share in group), tuple(run for run, _ in group))
        for (healthy, words), group in sorted(groups.items())
    ]
