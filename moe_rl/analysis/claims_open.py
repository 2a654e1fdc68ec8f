"""Statements on what the paper left open: skipped passes, partial rollouts, turns and lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from moe_rl.analysis.comparison import setting
from moe_rl.analysis.contrasts import Contrast, apart, cells_of, compared, contrasts
from moe_rl.analysis.evidence import (
    Measure,
    Statement,
    arms_of,
    final_reward,
    ids,
    mean_of,
    shown_range,
    shown_summary,
    summary_of,
)
from moe_rl.analysis.run_files import CompactRun
from moe_rl.analysis.tables import FINAL_SHARE

Runs = Sequence[CompactRun]
SKIPS = "sequence likelihoods tolerate what two engines differ by, so that the recompute may be skipped"
ALIGNS = "replay of the sampler's experts (R3) brings sampler and trainer closer together"
PARTIAL = "skipping the recompute helps in partial rollouts"
SPANS = "no claim: what responses of two policy versions cost"
TURNS = "GSPO-token serves responses whose tokens have advantages of their own, as in multi-turn RL"
LENGTH = "the loss normalisation sets how long responses become"


def recompute(suite: str, runs: Runs) -> Iterator[Statement]:
    """What training with the sampler's likelihoods loses, and the share of a step that it saves."""
    key, context = "rollout.recompute", ("arm", "rollout.sampler_dtype")
    rewards = contrasts(runs, key, True, context, final_reward)
    yield from compared(suite, SKIPS, "§5.4", "final reward", key, rewards, headline=True)
    yield from gspo_apart(suite, SKIPS, key, rewards)
    redone = [run for run in runs if setting(run, key)]
    differ = contrasts(redone, "arm", "grpo", ("rollout.sampler_dtype",), mean_of("mismatch/kl_k3"))
    rolled = [contrast for contrast in differ if contrast.value == "grpo+rollout_replay"]
    what = "KL(μ‖π_old) per token, nats"
    yield from compared(suite, ALIGNS, "2510.11370", what, "arm", rolled, headline=True)
    for words, cell in cells_of(runs, context).items():
        shares = [
            summary_of([run for run in cell if setting(run, key) == redo], share_of_pass)
            for redo in (True, False)
        ]
        yield Statement(
            SKIPS,
            "§5.4",
            suite,
            f"{words}: the old-policy pass takes {100 * shares[0].mean:.3g} % of a step where it is run, "
            f"{100 * shares[1].mean:.2g} % where it is skipped (steps without drift measured)",
            shown_range(100 * shares[0].low, 100 * shares[0].high, shares[0].n) + " % of a step",
            str(shares[0].n),
            ids(cell),
        )


def share_of_pass(run: CompactRun) -> float:
    """Time of the old-policy pass over that of the whole step, where drift is not measured."""
    times = [where_drift(f"time/{phase}", measured=False)(run) for phase in ("old_policy", "total")]
    return times[0] / times[1]


def gspo_apart(suite: str, claim: str, key: str, rewards: Sequence[Contrast]) -> Iterator[Statement]:
    """Whether GSPO loses less by it than GRPO, which the paper says."""
    by_arm = {contrast.runs[0].arm: contrast for contrast in rewards}
    if by_arm.keys() >= {"gspo", "grpo"}:
        yield from apart(suite, claim, "§5.4", "final reward", key, by_arm["gspo"], [by_arm["grpo"]])


def where_drift(column: str, measured: bool) -> Measure:
    """Mean of a column over the steps that measure drift, or over the others; those that do run the
    old-policy pass anyway."""

    def measure(run: CompactRun) -> float:
        if column not in run.steps:
            return math.nan
        drift = run.steps.get("drift/old")
        chosen = None if drift is None else (drift.notna() if measured else drift.isna())
        return float((run.steps[column] if chosen is None else run.steps[column][chosen]).mean())

    return measure


def partial_rollout(suite: str, runs: Runs) -> Iterator[Statement]:
    """What responses of two policy versions cost, and how far their older tokens are from π_old."""
    key, skips = "rollout.ahead", "rollout.recompute"
    spanning = [run for run in runs if setting(run, key)]
    found = contrasts(spanning, skips, True, ("arm", key), final_reward)
    yield from compared(suite, PARTIAL, "§5.4", "final reward of partial rollouts", skips, found, True)
    yield from gspo_apart(suite, PARTIAL, skips, found)
    found = contrasts(runs, key, 0, ("arm", skips), final_reward)
    yield from compared(suite, SPANS, "§5.4", "final reward", key, found)
    for label, group in arms_of(spanning).items():
        # in the steps that measure drift, which every arm has
        older = summary_of(group, where_drift("mismatch/kl_k3_older", measured=True))
        current = summary_of(group, where_drift("mismatch/kl_k3_current", measured=True))
        share = summary_of(group, mean_of("rollout/older_tokens"))
        yield Statement(
            "no claim: mismatch of a partial rollout",
            "§5.4",
            suite,
            f"{label}: {shown_summary(share)} of tokens from older weights; KL(μ‖π) per token, π the "
            f"trainer's forward of the current weights: {shown_summary(older)} nats on them, "
            f"{shown_summary(current)} on the others",
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
        "no claim: GSPO-token with one advantage beside GSPO, whose gradients are the same but for rounding",
        "Eq. 13 to 17",
        "final reward",
        "arm",
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


def growth(run: CompactRun) -> float:
    """Mean response length of the last 10 % of steps less that of the first, tokens."""
    lengths = run.steps["response/length"]
    part = max(1, math.ceil(FINAL_SHARE * len(lengths)))
    return float(lengths.tail(part).mean() - lengths.head(part).mean())
