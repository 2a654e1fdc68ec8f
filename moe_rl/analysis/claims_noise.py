"""Statements on noise: of ratios against length, of the sampler in clip units, of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from moe_rl.analysis.comparison import ARM_ORDER, setting
from moe_rl.analysis.evidence import Difference, Statement, Tested, ids, shown_range, tested
from moe_rl.analysis.measured_files import Group, Measured, by_settings, over_seeds, places_of
from moe_rl.analysis.statistics import Summary, paired_difference, paired_test, summarise

GRADIENTS = "no claim: gradient noise of token-level and sequence-level objectives"
AMPLIFIES = "clipping amplifies the noise of token ratios"
RATIOS = {"update": "log π_θ/π_old", "sampler": "log π_old/μ"}


def noise_statements(measured: Sequence[Measured]) -> list[Statement]:
    """Every statement that the measurements allow, each of the seeds of one configuration."""
    return [
        statement
        for words, group in by_settings(measured).items()
        for section in (length, outside, precision, gradients, clipping)
        for statement in section(words, group)
    ]


def exponent(variance: pd.Series) -> float:
    """The slope of log variance against log length; NaN with fewer than two positive variances."""
    found = variance[variance > 0]
    if len(found) < 2:
        return float("nan")
    return float(np.polyfit(np.log(found.index.to_numpy(float)), np.log(found.to_numpy(float)), 1)[0])


def lengths_of(group: Group) -> list[int]:
    """The lengths that every one of them measured, in tokens."""
    return places_of(group, "length", "update", "inflation")


def length(words: str, group: Group) -> Iterator[Statement]:
    """Whether token noise accumulates with length, and what length normalisation does to it."""
    lengths = lengths_of(group)
    if len(lengths) < 2:
        return
    longest = lengths[-1]

    def at(subject: str, metric: str) -> float:
        return over_seeds(group, lambda one: one.value("length", subject, metric, longest)).mean

    for subject, ratio in RATIOS.items():
        inflation = over_seeds(group, lambda one: one.value("length", subject, "inflation", longest))  # noqa: B023
        slopes = [
            over_seeds(group, lambda one: exponent(one.values("length", subject, f"{kind}/variance"))).mean  # noqa: B023
            for kind in ("sequence", "product")
        ]
        yield Statement(
            "token-level ratio noise accumulates with response length; length normalisation holds it",
            "§3, Eq. 7",
            group[0].suite,
            f"{words}{ratio} at {longest} tokens: variance {at(subject, 'sequence/variance'):.2g} nats² with "
            f"and {at(subject, 'product/variance'):.2g} without length normalisation, {inflation.mean:.3g} "
            f"times that of independent tokens; from {lengths[0]} tokens on they go as n^{slopes[0]:.2f} and "
            f"n^{slopes[1]:.2f} (independent: −1 and 1); mean log s {at(subject, 'sequence/mean'):.2g}, "
            f"which no length averages out; {100 * at(subject, 'product/outside'):.3g} % of products leave "
            f"GRPO's range, {100 * at(subject, 'product/not_float32'):.2g} % float32's",
            f"{shown_range(inflation.low, inflation.high, inflation.n)} times independent",
            _seeds(group, lengths),
            ids(group),
            headline=True,
        )


def outside(words: str, group: Group) -> Iterator[Statement]:
    """Shares of tokens and responses outside the clip ranges after one update, by length."""
    lengths = lengths_of(group)
    if not lengths:
        return

    def shares(metric: str) -> list[Summary]:
        return [
            over_seeds(group, lambda one: one.value("length", "update", metric, n))  # noqa: B023
            for n in (lengths[0], lengths[-1])
        ]

    tokens, responses = shares("grpo/token_outside"), shares("gspo/sequence_outside")
    yield Statement(
        "no claim: outside the clip ranges by response length",
        "§3",
        group[0].suite,
        f"{words}after an update, outside the paper's ranges at {lengths[0]} and {lengths[-1]} tokens: "
        f"{100 * tokens[0].mean:.2g} and {100 * tokens[1].mean:.2g} % of tokens (GRPO), "
        f"{100 * responses[0].mean:.3g} and {100 * responses[1].mean:.3g} % of responses (GSPO)",
        shown_range(responses[1].low, responses[1].high, responses[1].n) + " of the longest responses",
        _seeds(group, lengths),
        ids(group),
        headline=True,
    )


def precision(words: str, group: Group) -> Iterator[Statement]:
    """The sampler's error in units of each objective's clip range, in rollouts and by length."""
    dtype = str(setting(group[0], "noise.sampler_dtype"))
    subject, lengths = f"{dtype} sampler", lengths_of(group)

    def mean(metric: str, of: str = subject) -> float:
        return over_seeds(group, lambda one: one.value("clip_units", of, metric)).mean

    beyond = over_seeds(group, lambda one: one.value("clip_units", subject, "gspo/sequence_outside"))
    if not beyond.n:
        return
    said = (
        f"{words}{dtype} sampler with KV cache against a float32 trainer, rollouts of "
        f"{setting(group[0], 'rollout.max_new_tokens')} tokens at most: the log-ratio of a token is "
        f"{mean('grpo/token'):.2g} GRPO ranges off ({100 * mean('grpo/token_outside'):.2g} % outside), of a "
        f"response {mean('gspo/sequence'):.2g} GSPO ranges off ({100 * beyond.mean:.3g} % outside)"
    )
    if lengths:
        units, share = (
            over_seeds(group, lambda one: one.value("length", "sampler", metric, lengths[-1])).mean  # noqa: B023
            for metric in ("gspo/sequence", "gspo/sequence_outside")
        )
        said += f"; of {lengths[-1]} tokens {units:.2g} GSPO ranges ({100 * share:.3g} % outside)"
    said += (
        f"; a float32 sampler: {mean('grpo/token', 'float32 sampler'):.1g} and "
        f"{mean('gspo/sequence', 'float32 sampler'):.1g}; the update: {mean('grpo/token', 'update'):.2g} and "
        f"{mean('gspo/sequence', 'update'):.2g}"
    )
    yield Statement(
        "sequence likelihood tolerates precision differences better: π_old need not be recomputed",
        "§5.4",
        group[0].suite,
        said,
        shown_range(beyond.low, beyond.high, beyond.n) + " of responses outside",
        f"{len(group)} seeds",
        ids(group),
        headline=True,
    )


def gradients(words: str, group: Group) -> Iterator[Statement]:
    """How alike the gradients of mini-batches are, of each objective at the same policies."""
    arms = [arm for arm in ARM_ORDER if _cosines(group, arm)]
    for arm in arms:
        cosine = summarise(list(_cosines(group, arm).values()))
        signal, noise = (
            over_seeds(group, lambda one: one.value("gradients", arm, name)).mean  # noqa: B023
            for name in ("signal", "noise")
        )
        scale = (
            f"noise scale {noise / signal:.3g} mini-batches" if signal > 0 else "nothing shared to be seen"
        )
        yield Statement(
            GRADIENTS,
            "§3",
            group[0].suite,
            f"{words}{arm}: mean cosine of the gradients of two mini-batches {cosine.mean:.3g} ({scale})",
            shown_range(cosine.low, cosine.high, cosine.n),
            f"{cosine.n} seeds",
            ids(group),
        )
    yield from _less_alike(GRADIENTS, words, group, [(arm, "grpo") for arm in arms if arm != "grpo"])


def clipping(words: str, group: Group) -> Iterator[Statement]:
    """Whether clipping makes the gradients of mini-batches less alike than they are without it."""
    pairs = [(arm, f"{arm} unclipped") for arm in ("grpo", "gspo")]
    yield from _less_alike(AMPLIFIES, words, group, pairs)


def _less_alike(
    claim: str, words: str, group: Group, pairs: Sequence[tuple[str, str]]
) -> Iterator[Statement]:
    rows = []
    for arm, minus in pairs:
        pair = _cosines(group, arm), _cosines(group, minus)
        if all(pair):
            difference = Difference(arm, minus, paired_difference(*pair), paired_test(*pair))
            said = f"{words}mean cosine of the gradients of two mini-batches, {arm} − {minus}:"
            rows.append(Tested(claim, "§3", said, difference, ids(group), headline=True))
    yield from tested(group[0].suite, rows)


def _cosines(group: Group, arm: str) -> dict[int, float]:
    found = {one.seed: one.value("gradients", arm, "cosine_pairs") for one in group}
    return {seed: value for seed, value in found.items() if np.isfinite(value)}


def _seeds(group: Group, lengths: Sequence[int]) -> str:
    responses = setting(group[0], "noise.responses")
    return f"{len(group)} seeds of {responses} responses of {lengths[-1]} tokens"
