"""What becomes of collapsed runs when they go on: from where they ended or an earlier model, with changes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from moe_rl.analysis.comparison import setting
from moe_rl.analysis.evidence import final_reward
from moe_rl.analysis.run_files import CompactRun

BACK = 0.9  # of the best reward before the collapse
SMOOTH = 5  # steps in the mean that "best" is taken of
SOURCE = re.compile(r"([^/]+)/([^/]+-[0-9a-f]{8})/seed(\d+)/(final|snapshots/step_(\d+))/?$")
# The settings that a treatment may change, in words.
TREATMENTS = {
    "objective.clip_low": "clip range retuned",
    "rollout.max_new_tokens": "generation lengthened",
    "task": "queries swapped",
}


@dataclass(frozen=True)
class Outcome:
    """Runs of one start and treatment: how many of `n` came back."""

    words: str
    recovered: int
    n: int
    runs: tuple[CompactRun, ...]


def source_of(run: CompactRun) -> tuple[str, bool] | None:
    """The id of the run whose model this one starts from, and whether it is an earlier one than the last."""
    found = SOURCE.search(str(setting(run, "model.path") or ""))
    if found is None:
        return None
    suite, name, seed, _, step = found.groups()
    return f"{suite}/{name}-seed{seed}", step is not None


def treatment(run: CompactRun, source: CompactRun) -> str:
    """What the run changes of its source's configuration."""
    changed = [words for key, words in TREATMENTS.items() if setting(run, key) != setting(source, key)]
    return " and ".join(changed) or "nothing changed"


def best_reward(run: CompactRun) -> float:
    """The highest mean reward over five steps."""
    return float(run.steps["reward/mean"].rolling(SMOOTH, min_periods=1).mean().max())


def outcomes(runs: Sequence[CompactRun], everything: Sequence[CompactRun]) -> list[Outcome]:
    """By start and treatment; a run whose source is not among `everything` cannot be judged: left out."""
    sources = {run.id: run for run in everything}
    groups: dict[str, list[tuple[CompactRun, bool]]] = defaultdict(list)
    for run in runs:
        found = source_of(run)
        if found is None or found[0] not in sources:
            continue
        source = sources[found[0]]
        start = "rolled back to before the collapse" if found[1] else "from the collapsed model"
        back = final_reward(run) >= BACK * best_reward(source)
        groups[f"{start}, {treatment(run, source)}"].append((run, back))
    return [
        Outcome(words, sum(back for _, back in group), len(group), tuple(run for run, _ in group))
        for words, group in sorted(groups.items())
    ]
