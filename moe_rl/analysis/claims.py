"""The paper's claims (2507.18071), each beside what the runs of a suite gave; negative results are results.

Every statement is made from the tables of finished runs alone. p values are two-sided, of the sign-flip test
of paired differences or of the log-rank test, adjusted by Holm over the comparisons of its kind in the suite;
without p < 0.05 the words are "not separated".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from moe_rl.analysis.claims_causes import intervention, rates, recovery, regimes
from moe_rl.analysis.claims_longer import longer
from moe_rl.analysis.claims_models import NEEDS_REPLAY, against_dense, models
from moe_rl.analysis.claims_open import length_growth, partial_rollout, recompute, turns
from moe_rl.analysis.claims_warning import warning_statements
from moe_rl.analysis.clip_grid import clip_cells, ratio_by_seed
from moe_rl.analysis.evidence import (
    Difference,
    Statement,
    Tested,
    arms_of,
    by_seed,
    collapses_compared,
    difference,
    final_greedy,
    final_reward,
    ids,
    lifetimes,
    limit,
    mean_of,
    reward_at_unclipped,
    says,
    shown_difference,
    shown_p,
    shown_range,
    shown_summary,
    summary_of,
    tested,
)
from moe_rl.analysis.run_files import UNCLIPPED, CompactRun
from moe_rl.analysis.statistics import paired_difference, paired_test, proportion, summarise
from moe_rl.analysis.survival import kaplan_meier

Runs = Sequence[CompactRun]
PAIRS = (
    ("grpo+replay", "grpo"),
    ("grpo+rollout_replay", "grpo"),
    ("gspo", "grpo"),
    ("gspo", "grpo+replay"),
    ("ppo", "grpo"),
    ("dpo", "grpo"),
)
NO_REPLAY = "GSPO needs no Routing Replay, and is more stable and efficient at equal compute and queries"
COLD_STARTS = ("fig1_sort", "fig1_sort_again")  # one configuration, but for model.seed and cold_start.seed
BOTH = "fig1_sort_both"
SEEDS = 1_000_000  # more than there are in a suite
CLAIM_OF = {
    "grpo+replay": (NEEDS_REPLAY, "Fig. 3"),
    "grpo+rollout_replay": (NEEDS_REPLAY + " (R3)", "Fig. 3"),
    "gspo": (NO_REPLAY, "Fig. 1, §5.1"),
    "ppo": ("no claim: token ratios with a value model, PPO", "Eq. 1"),
    "dpo": ("no claim: preference pairs, DPO", "–"),
}


def both_cold_starts(runs: Runs) -> Iterator[Statement]:
    """Final reward of the arms over two suites that differ in initialisation and cold start alone; a pair is
    a seed of a suite."""
    suites = [suite for suite in COLD_STARTS if any(run.suite == suite for run in runs)]
    if len(suites) < len(COLD_STARTS):
        return
    values: dict[str, dict[int, float]] = defaultdict(dict)
    members: dict[str, list[CompactRun]] = defaultdict(list)
    for place, suite in enumerate(suites):
        for arm, group in arms_of([run for run in runs if run.suite == suite]).items():
            members[arm] += group
            for seed, value in by_seed(group, final_reward).items():
                values[arm][place * SEEDS + seed] = value
    rows = []
    for arm, minus in PAIRS[:4]:
        if arm == "grpo+rollout_replay" or not {arm, minus} <= values.keys():
            continue
        pair = values[arm], values[minus]
        claim, source = CLAIM_OF[arm]
        one, other = lifetimes(members[arm]), lifetimes(members[minus])
        rows.append(
            Tested(
                claim,
                source,
                f"both cold starts together: final reward, {arm} − {minus}:",
                Difference(arm, minus, paired_difference(*pair), paired_test(*pair)),
                ids(members[arm], members[minus]),
                f"; {one.events} of {one.n} against {other.events} of {other.n} collapsed",
                headline=minus == "grpo",
            )
        )
    yield from tested(BOTH, rows)


def drift(suite: str, runs: Runs) -> Iterator[Statement]:
    """About 10 % of the experts change after one update."""
    for arm, group in arms_of(runs).items():
        first, last = summary_of(group, mean_of("drift/first")), summary_of(group, mean_of("drift/old"))
        if arm == "grpo" and first.n:
            yield Statement(
                "roughly 10 % of the activated experts change after one gradient update",
                "§5.3",
                suite,
                f"{100 * first.mean:.2g} % after the first update of a batch, {100 * last.mean:.2g} % after "
                "the last (GRPO, mean over steps)",
                shown_range(100 * first.low, 100 * first.high, first.n) + " % after the first",
                str(first.n),
                ids(group),
                headline=True,
            )


def arms(suite: str, runs: Runs) -> Iterator[Statement]:
    """Final reward and time to collapse of the arms, in pairs."""
    found = arms_of(runs)
    pairs = [pair for pair in PAIRS if pair[0] in found and pair[1] in found]
    collapses = collapses_compared([(lifetimes(found[arm]), lifetimes(found[minus])) for arm, minus in pairs])
    yield from tested(
        suite,
        [
            Tested(
                *CLAIM_OF[arm],
                f"final reward, {arm} − {minus}:",
                difference(arm, minus, found, final_reward),
                ids(found[arm], found[minus]),
                f"; {collapsed}",
                headline=arm in ("grpo+replay", "gspo") and minus == "grpo",
            )
            for (arm, minus), collapsed in zip(pairs, collapses, strict=True)
        ],
    )


def capacity(suite: str, runs: Runs) -> Iterator[Statement]:
    """What forcing experts costs in accuracy: held-out, decoded natively, replay against GRPO."""
    found = arms_of(runs)
    forced = [arm for arm in ("grpo+replay", "grpo+rollout_replay") if arm in found and "grpo" in found]
    yield from tested(
        suite,
        [
            Tested(
                "Routing Replay may limit the model's capacity",
                "§5.3",
                f"final greedy accuracy, {arm} − grpo:",
                difference(arm, "grpo", found, final_greedy),
                ids(found[arm], found["grpo"]),
                f"; grpo {shown_summary(summary_of(found['grpo'], final_greedy))}",
            )
            for arm in forced
        ],
    )


def survival(suite: str, runs: Runs) -> Iterator[Statement]:
    """Kaplan–Meier of GRPO and GSPO at the last step that all of their runs were planned for."""
    for arm, group in arms_of(runs).items():
        if arm not in ("grpo", "gspo"):
            continue
        horizon = min(int(run.config["steps"]) for run in group)
        curve = kaplan_meier(lifetimes(group))
        share = proportion(sum(1 for run in group if run.collapse.step is not None), len(group))
        yield Statement(
            "GSPO trains stably; GRPO's collapse is common" if arm == "gspo" else "GRPO collapses on MoE",
            "§1, §5.1",
            suite,
            f"{arm}: {share.hits} of {share.n} collapsed by step {horizon}"
            + (f", median time to collapse {curve.median:.0f} steps" if curve.median is not None else "")
            + (f" ({curve.note})" if curve.note else ""),
            f"95 %: {share.low:.2g} to {share.high:.2g} of runs (exact)",
            str(share.n),
            ids(group),
        )


def clipping(suite: str, runs: Runs) -> Iterator[Statement]:
    """How many times more tokens GSPO clips than GRPO, at the paper's ranges."""
    found = arms_of(runs)
    if "grpo" not in found or "gspo" not in found:
        return
    grpo, gspo = (by_seed(found[arm], mean_of("clip_frac/token")) for arm in ("grpo", "gspo"))
    logs = [math.log10(gspo[s] / grpo[s]) for s in sorted(grpo.keys() & gspo.keys()) if grpo[s] and gspo[s]]
    times = summarise(logs)
    if times.n:
        yield Statement(
            "GSPO clips two orders of magnitude more tokens than GRPO (0.15 against 0.0013)",
            "Fig. 2",
            suite,
            f"{np.mean(list(gspo.values())):.3g} against {np.mean(list(grpo.values())):.3g} of tokens: "
            f"{10**times.mean:.3g} times (geometric mean over seeds)",
            shown_range(10**times.low, 10**times.high, times.n),
            str(times.n),
            ids(found["grpo"], found["gspo"]),
            headline=True,
        )


def clip_ranges(suite: str, runs: Runs) -> Iterator[Statement]:
    """Whether the clip ranges change that gap, and the accuracy."""
    cells = clip_cells(runs)
    scales = sorted(cells["grpo"].keys() & cells["gspo"].keys())
    ratios = {scale: ratio_by_seed(cells, scale) for scale in scales}
    scales = [scale for scale in scales if ratios[scale]]
    if len(scales) < 2:
        return
    means = {scale: summarise(list(ratios[scale].values())) for scale in scales}
    shown = ", ".join(f"× {scale:g}: {10 ** means[scale].mean:.3g}" for scale in scales)
    gap = paired_difference(ratios[scales[-1]], ratios[scales[0]])
    test = paired_test(ratios[scales[-1]], ratios[scales[0]])
    behind = [run for scale in scales for arm in ("grpo", "gspo") for run in cells[arm][scale]]
    yield Statement(
        "changing the clip ranges does not change that gap",
        "§5.2",
        suite,
        f"GSPO clips this many times more, both ranges scaled by the same factor: {shown}; widest against "
        f"narrowest range: × {10**gap.mean:.3g} ({shown_p(test.p)}: {says(test.p)})",
        shown_range(10**gap.low, 10**gap.high, gap.n) + " as a factor",
        f"{gap.n} pairs",
        ids(behind),
        headline=True,
    )
    for arm in ("grpo", "gspo"):
        accuracy = {scale: summary_of(cells[arm][scale], final_greedy) for scale in scales}
        shown = ", ".join(f"× {scale:g}: {shown_summary(accuracy[scale])}" for scale in scales)
        best, worst = (choose(scales, key=lambda s: accuracy[s].mean) for choose in (max, min))
        apart = paired_difference(
            by_seed(cells[arm][best], final_greedy), by_seed(cells[arm][worst], final_greedy)
        )
        yield Statement(
            "no claim: sensitivity of the final accuracy to the clip range",
            "§5.2",
            suite,
            f"{arm}, final greedy accuracy by range: {shown}; best − worst (chosen after the fact, no test) "
            f"{apart.mean:.3g}",
            shown_range(apart.low, apart.high, apart.n, signed=True),
            f"{apart.n} pairs",
            ids(*cells[arm].values()),
        )


def efficiency(suite: str, runs: Runs) -> Iterator[Statement]:
    """Reward at equal cumulative numbers of unclipped tokens."""
    found = arms_of(runs)
    if "grpo" not in found or "gspo" not in found:
        return
    both = [*found["grpo"], *found["gspo"]]
    if any(UNCLIPPED not in run.steps for run in both):
        return
    tokens = min(float(run.steps[UNCLIPPED].sum()) for run in both)
    row = difference("gspo", "grpo", found, lambda run: reward_at_unclipped(run, tokens))
    yield Statement(
        "GSPO learns more from each token that is not clipped",
        "§5.2",
        suite,
        f"reward after {tokens:.0f} unclipped tokens (the most that every run saw), gspo − grpo: "
        f"{shown_difference(row)} ({shown_p(row.test.p)}{limit(row)}: {says(row.test.p)})",
        shown_range(row.summary.low, row.summary.high, row.n, signed=True),
        f"{row.n} pairs",
        ids(both),
        headline=True,
    )


Section = Callable[[str, Runs], Iterator[Statement]]
# Which statements are made of a suite, by the beginning of its name.
SECTIONS: dict[str, tuple[Section, ...]] = {
    "fig1_longer": (longer,),
    "fig1": (drift, arms, capacity, survival, clipping, efficiency),
    "fig2": (clip_ranges,),
    "search_rates": (rates,),
    "search": (regimes, rates),
    "intervention": (intervention,),
    "recompute": (recompute,),
    "partial_rollout": (partial_rollout,),
    "two_turn": (turns,),
    "length_growth": (length_growth,),
    "dense_control": (models, against_dense),
    "moe_configurations": (models,),
}


def statements(runs: Runs) -> list[Statement]:
    """Every statement that the runs allow, in the order of the paper's figures."""
    found: list[Statement] = []
    for suite in sorted({run.suite for run in runs}):
        mine = [run for run in runs if run.suite == suite]
        prefix = next((name for name in SECTIONS if suite.startswith(name)), None)
        for section in SECTIONS[prefix] if prefix is not None else ():
            found.extend(section(suite, mine))
        if suite.startswith("recovery"):
            found.extend(recovery(suite, mine, runs))
    found.extend(both_cold_starts(runs))
    return [*found, *warning_statements(runs)]  # of all suites together: collapses are few
