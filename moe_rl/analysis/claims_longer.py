"""Statements on Figure 1's second half: more training, refreshed queries, longer generation (GSPO §5.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from moe_rl.analysis.contrasts import compared, contrasts
from moe_rl.analysis.evidence import (
    Difference,
    Statement,
    Tested,
    arms_of,
    by_seed,
    final_greedy,
    ids,
    tested,
)
from moe_rl.analysis.run_files import CompactRun
from moe_rl.analysis.statistics import paired_difference, paired_test

Runs = Sequence[CompactRun]
LONGER = "more training, refreshed query sets and longer generation keep improving GSPO"


def longer(suite: str, runs: Runs) -> Iterator[Statement]:
    """What more training with longer generation gains, and what refreshing the query set adds to it."""
    found = arms_of(runs)
    gains = {
        label: (
            by_seed(group, final_greedy),
            {run.seed: accuracy_before(run, first_lengthening(run)) for run in group},
        )
        for label, group in found.items()
        if all(map(first_lengthening, group))
    }
    yield from tested(
        suite,
        [
            Tested(
                LONGER,
                "§5.1",
                f"{label}: greedy accuracy at the end − before generation was first lengthened (step "
                f"{first_lengthening(found[label][0])}), both under the longest limit:",
                Difference("end", "before", paired_difference(*pair), paired_test(*pair)),
                ids(found[label]),
                headline=found[label][0].arm == "gspo",
            )
            for label, pair in gains.items()
        ],
    )
    queries = "rollout.query_set_steps"
    for key, base, context in ((queries, None, ("arm",)), ("arm", "grpo", (queries,))):
        pairs = contrasts(runs, key, base, context, final_greedy)
        yield from compared(suite, LONGER, "§5.1", "greedy accuracy at the end", key, pairs, headline=True)


def first_lengthening(run: CompactRun) -> int:
    """The step from which generation may be longer than at the start; 0 if none."""
    return min((step for step, _ in run.config["rollout"]["length_schedule"]), default=0)


def accuracy_before(run: CompactRun, step: int) -> float:
    """Greedy accuracy at the last evaluation before `step`."""
    evals = run.evaluations("eval/greedy")
    earlier = evals[evals["step"] < step]["value"]
    return float(earlier.iloc[-1]) if len(earlier) else math.nan
