"""Statements on what the paper left open: skipped passes, partial rollouts, turns, lengths, other models.

A contrast pairs, seed by seed, runs that differ in one setting; its p values are adjusted by Holm over the
contrasts of its kind in a suite.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moe_rl.analysis.comparison import said, setting
from moe_rl.analysis.evidence import (
    Difference,
    Measure,
    Statement,
    Tested,
    arms_of,
    collapses_compared,
    difference,
    final_reward,
    gains,
    ids,
    lifetimes,
    mean_of,
    shown_difference,
    shown_range,
    shown_summary,
    summary_of,
    tested,
)
from moe_rl.analysis.run_files import CompactRun
from moe_rl.analysis.statistics import paired_difference, paired_test
from moe_rl.analysis.tables import FINAL_SHARE

Runs = Sequence[CompactRun]
SKIPS = "sequence likelihoods tolerate what two engines differ by, so that the recompute may be skipped"
PARTIAL = "skipping the recompute helps in partial rollouts"
SPANS = "no claim: what responses of two policy versions cost"
TURNS = "GSPO-token serves responses whose tokens have advantages of their own, as in multi-turn RL"
EXPERTS = "GRPO's instability is that of experts; GSPO's advantage goes with it"
NEEDS_REPLAY = "GRPO on MoE needs Routing Replay to converge"
LENGTH = "the loss normalisation sets how long responses become"
TOPOLOGY = (
    "model.name",
    "model.config.num_experts",
    "model.config.num_experts_per_tok",
    "optim.aux_loss_coef",
)


@dataclass(frozen=True)
class Contrast:
    """Runs with `value` of a setting minus runs with its base; `words` are the other settings looked at."""

    words: str
    value: Any
    base: Any
    difference: Difference
    runs: tuple[CompactRun, ...]


def contrasts(runs: Runs, key: str, base: Any, context: Sequence[str], measure: Measure) -> list[Contrast]:
    """Every other value of the setting `key` against `base`, where the settings `context` agree."""
    found = []
    for words, cell in cells_of(runs, context).items():
        by_value: dict[Any, list[CompactRun]] = defaultdict(list)
        for run in cell:
            by_value[setting(run, key)].append(run)
        if base not in by_value:
            continue
        named = {str(value): group for value, group in by_value.items()}
        for value, group in by_value.items():
            if value != base:
                row = difference(str(value), str(base), named, measure)
                found.append(Contrast(words, value, base, row, (*group, *by_value[base])))
    return found


def cells_of(runs: Runs, context: Sequence[str]) -> dict[str, list[CompactRun]]:
    """The runs by the settings `context`, named by those of them that vary."""
    varying = [name for name in context if len({str(setting(run, name)) for run in runs}) > 1]
    cells: dict[str, list[CompactRun]] = defaultdict(list)
    for run in runs:
        values = {name: setting(run, name) for name in varying}
        cells[", ".join(said(name, value) for name, value in values.items() if value is not None)].append(run)
    return cells


def compared(
    suite: str,
    claim: str,
    source: str,
    what: str,
    key: str,
    found: Sequence[Contrast],
    headline: bool = False,
) -> Iterator[Statement]:
    """A row for each contrast of one kind."""
    yield from tested(
        suite,
        [
            Tested(
                claim,
                source,
                f"{contrast.words + ': ' if contrast.words else ''}{what}, {key}={contrast.value} − "
                f"{contrast.base}:",
                contrast.difference,
                ids(contrast.runs),
                headline=headline,
            )
            for contrast in found
        ],
    )


def recompute(suite: str, runs: Runs) -> Iterator[Statement]:
    """What training with the sampler's likelihoods loses, and the time that it saves."""
    key, context = "rollout.recompute", ("arm", "rollout.sampler_dtype")
    rewards = contrasts(runs, key, True, context, final_reward)
    yield from compared(suite, SKIPS, "§5.4", "final reward", key, rewards, headline=True)
    for contrast in contrasts(runs, key, True, context, undisturbed("time/total")):
        row = contrast.difference
        passes = summary_of([r for r in contrast.runs if setting(r, key)], undisturbed("time/old_policy"))
        whole = summary_of([r for r in contrast.runs if setting(r, key)], undisturbed("time/total"))
        yield Statement(
            SKIPS,
            "§5.4",
            suite,
            f"{contrast.words}: seconds a step without drift measured, skipped − recomputed: "
            f"{shown_difference(row)} of {shown_summary(whole)}, of which the pass takes "
            f"{shown_summary(passes)}",
            shown_range(row.summary.low, row.summary.high, row.n, signed=True),
            f"{row.n} pairs",
            ids(contrast.runs),
        )


def undisturbed(column: str) -> Measure:
    """Mean of a column over the steps that do not measure drift, which run the old-policy pass anyway."""

    def measure(run: CompactRun) -> float:
        if column not in run.steps:
            return math.nan
        drift = run.steps.get("drift/old")
        values = run.steps[column] if drift is None else run.steps[column][drift.isna()]
        return float(values.mean())

    return measure


def partial_rollout(suite: str, runs: Runs) -> Iterator[Statement]:
    """What responses of two policy versions cost, and how far their older tokens are from π_old."""
    key, skips = "rollout.ahead", "rollout.recompute"
    spanning = [run for run in runs if setting(run, key)]
    found = contrasts(spanning, skips, True, ("arm", key), final_reward)
    yield from compared(suite, PARTIAL, "§5.4", "final reward of partial rollouts", skips, found, True)
    found = contrasts(runs, key, 0, ("arm", skips), final_reward)
    yield from compared(suite, SPANS, "§5.4", "final reward", key, found)
    for label, group in arms_of(spanning).items():
        older = summary_of(group, mean_of("mismatch/kl_k3_older"))
        current = summary_of(group, mean_of("mismatch/kl_k3_current"))
        share = summary_of(group, mean_of("rollout/older_tokens"))
        yield Statement(
            "no claim: mismatch of a partial rollout",
            "§5.4",
            suite,
            f"{label}: {shown_summary(share)} of tokens from older weights; KL(μ‖π_old) per token "
            f"{shown_summary(older)} nats on them, {shown_summary(current)} on the others",
            shown_range(older.low, older.high, older.n) + " on the older",
            str(older.n),
            ids(group),
        )


def turns(suite: str, runs: Runs) -> Iterator[Statement]:
    """Advantages by turn against by response, and GSPO-token with constant advantages against GSPO."""
    key = "advantages_by"
    by_turn = contrasts(runs, key, "response", ("arm",), final_reward)
    yield from compared(suite, TURNS, "§4.3", "final reward", key, by_turn, headline=True)
    whole = [r for r in runs if setting(r, key) == "response" and str(r.arm).startswith("gspo")]
    yield from compared(
        suite,
        "GSPO-token with one advantage for all tokens is GSPO",
        "Eq. 13 to 17",
        "final reward",
        "objective",
        contrasts(whole, "arm", "gspo", (), final_reward),
    )


def length_growth(suite: str, runs: Runs) -> Iterator[Statement]:
    """Growth of the response length: by loss normalisation, all else GRPO's, and of GSPO by advantages."""
    for label, group in arms_of(runs).items():
        found = summary_of(group, growth)
        better, worse = (
            summary_of(group, mean_of(f"response/length_{name}")) for name in ("better", "worse")
        )
        yield Statement(
            LENGTH,
            "Dr.GRPO (2503.20783)",
            suite,
            f"{label}: {found.mean:+.3g} tokens from the first to the last 10 % of steps; responses above "
            f"their group's mean reward have {shown_summary(better)}, those below {shown_summary(worse)}",
            shown_range(found.low, found.high, found.n, signed=True),
            str(found.n),
            ids(group),
        )
    key, usual = "objective.aggregation", "seq-mean-token-mean"
    against = contrasts([r for r in runs if r.arm == "grpo"], key, usual, (), growth)
    yield from compared(suite, LENGTH, "Dr.GRPO (2503.20783)", "grpo, growth in tokens", key, against, True)
    gspo, key = [r for r in runs if r.arm == "gspo"], "advantages"
    for what, measure in (("final reward", final_reward), ("growth in tokens", growth)):
        yield from compared(
            suite,
            "no claim: GSPO without group normalisation",
            "Eq. 3",
            f"gspo, {what}",
            key,
            contrasts(gspo, key, "paper", (), measure),
        )


def models(suite: str, runs: Runs) -> Iterator[Statement]:
    """GSPO and replay against GRPO on every model, dense ones among them, and the drift of GRPO there."""
    rewards = contrasts(runs, "arm", "grpo", TOPOLOGY, final_reward)
    for arm, claim in (("gspo", EXPERTS), ("grpo+replay", NEEDS_REPLAY)):
        mine = [contrast for contrast in rewards if contrast.value == arm]
        yield from compared(suite, claim, "§5.3", "final reward", "arm", mine)
    for words, group in cells_of([run for run in runs if run.arm == "grpo"], TOPOLOGY).items():
        first = summary_of(group, mean_of("drift/first"))
        lost = sum(run.collapse.step is not None for run in group)
        drift = f"{100 * first.mean:.2g} % of experts changed by a first update" if first.n else "no experts"
        yield Statement(
            "no claim: drift and collapse of GRPO by topology",
            "§5.3",
            suite,
            f"{words}: {drift}, {lost} of {len(group)} collapsed",
            shown_range(100 * first.low, 100 * first.high, first.n) if first.n else "none",
            str(len(group)),
            ids(group),
        )


def against_dense(suite: str, runs: Runs) -> Iterator[Statement]:
    """Whether GSPO's advantage, and GRPO's collapses, are larger on the MoE than on each dense model."""
    cells = {
        name: {arm: [run for run in group if run.arm == arm] for arm in ("grpo", "gspo")}
        for name, group in cells_of(runs, ("model.name",)).items()
    }
    moe = cells.pop("tiny", None)
    if moe is None:
        return
    behind_it = {name: ids(*moe.values(), *dense.values()) for name, dense in cells.items()}
    rows = []
    for name, dense in cells.items():
        ahead, behind = (difference("gspo", "grpo", of, final_reward) for of in (moe, dense))
        pair = [gains(of["gspo"], of["grpo"], final_reward) for of in (moe, dense)]
        rows.append(
            Tested(
                EXPERTS,
                "§5.3",
                f"gspo − grpo, final reward, on the MoE ({shown_difference(ahead)}) − on {name} "
                f"({shown_difference(behind)}):",
                Difference("MoE", name, paired_difference(*pair), paired_test(*pair)),
                behind_it[name],
                headline=True,
            )
        )
    yield from tested(suite, rows)
    lives = [(lifetimes(moe["grpo"]), lifetimes(dense["grpo"])) for dense in cells.values()]
    for name, (one, other), words in zip(cells, lives, collapses_compared(lives), strict=True):
        yield Statement(
            EXPERTS,
            "§5.3",
            suite,
            f"grpo on the MoE and on {name}: {words}",
            "none",
            f"{one.n} and {other.n}",
            behind_it[name],
        )


def growth(run: CompactRun) -> float:
    """Mean response length of the last 10 % of steps less that of the first, tokens."""
    lengths = run.steps["response/length"]
    part = max(1, math.ceil(FINAL_SHARE * len(lengths)))
    return float(lengths.tail(part).mean() - lengths.head(part).mean())
