"""Statements on noise: variance against length, clip fractions by length, the sampler's error, gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd

from moe_rl.analysis.comparison import differing, flatten, setting
from moe_rl.analysis.evidence import Statement, says, shown_p, shown_range
from moe_rl.analysis.measured_files import Measured
from moe_rl.analysis.statistics import Summary, holm, paired_difference, paired_test, summarise

Group = Sequence[Measured]
RATIOS = {"update": "log π_θ/π_old", "sampler": "log π_old/μ"}


def noise_statements(measured: Sequence[Measured]) -> list[Statement]:
    """Every statement that the measurements allow, each of the seeds of one configuration."""
    return [
        statement
        for words, group in by_settings(measured).items()
        for section in (length, clipping, precision, gradients)
        for statement in section(words, group)
    ]


def by_settings(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    """The measurements of each configuration, named by the settings in which they differ."""
    flats = {one.id: flatten(one.config) for one in measured}
    keys = differing(list(flats.values()))
    groups: dict[str, list[Measured]] = defaultdict(list)
    for one in measured:
        words = ", ".join(f"{key}={flats[one.id].get(key, 'absent')}" for key in keys)
        groups[f"{words}: " if words else ""].append(one)
    return groups


def over_seeds(group: Group, measure: Callable[[Measured], float]) -> Summary:
    """Mean and interval of one number a seed."""
    return summarise([measure(one) for one in group])


def exponent(variance: pd.Series) -> float:
    """The slope of log variance against log length; NaN with fewer than two positive variances."""
    found = variance[variance > 0]
    if len(found) < 2:
        return float("nan")
    return float(np.polyfit(np.log(found.index.to_numpy(float)), np.log(found.to_numpy(float)), 1)[0])


def lengths_of(group: Group) -> list[int]:
    """The lengths that every one of them measured."""
    found = [set(one.values("length", "update", "inflation").index) for one in group]
    return sorted(set.intersection(*found)) if found else []


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
            f"which no length averages out; {100 * at(subject, 'product/outside'):.2g} % of products leave "
            f"GRPO's range, {100 * at(subject, 'product/not_float32'):.2g} % float32's",
            f"{shown_range(inflation.low, inflation.high, inflation.n)} times independent",
            _seeds(group, lengths),
            tuple(one.id for one in group),
            headline=True,
        )


def clipping(words: str, group: Group) -> Iterator[Statement]:
    """Clip fractions of one update, by length."""
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
        "clipping amplifies the noise of token ratios",
        "§3",
        group[0].suite,
        f"{words}after an update, outside the paper's ranges at {lengths[0]} and {lengths[-1]} tokens: "
        f"{100 * tokens[0].mean:.2g} and {100 * tokens[1].mean:.2g} % of tokens (GRPO), "
        f"{100 * responses[0].mean:.3g} and {100 * responses[1].mean:.3g} % of responses (GSPO)",
        shown_range(responses[1].low, responses[1].high, responses[1].n) + " of the longest responses",
        _seeds(group, lengths),
        tuple(one.id for one in group),
        headline=True,
    )


def precision(words: str, group: Group) -> Iterator[Statement]:
    """The sampler's error in units of each objective's clip range, in rollouts and by length."""
    dtype = str(setting(group[0], "noise.sampler_dtype"))
    subject, lengths = f"{dtype} sampler", lengths_of(group)

    def mean(metric: str, of: str = subject) -> float:
        return over_seeds(group, lambda one: one.value("clip_units", of, metric)).mean

    outside = over_seeds(group, lambda one: one.value("clip_units", subject, "gspo/sequence_outside"))
    if not outside.n:
        return
    said = (
        f"{words}{dtype} sampler with KV cache against a float32 trainer, rollouts of "
        f"{setting(group[0], 'rollout.max_new_tokens')} tokens at most: the log-ratio of a token is "
        f"{mean('grpo/token'):.2g} GRPO ranges off ({100 * mean('grpo/token_outside'):.2g} % outside), of a "
        f"response {mean('gspo/sequence'):.2g} GSPO ranges off ({100 * outside.mean:.3g} % outside)"
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
        shown_range(outside.low, outside.high, outside.n) + " of responses outside",
        f"{len(group)} seeds",
        tuple(one.id for one in group),
        headline=True,
    )


def gradients(words: str, group: Group) -> Iterator[Statement]:
    """How alike the gradients of mini-batches are, of each objective at the same policies."""
    arms = [arm for arm in ("grpo", "grpo+replay", "gspo") if _cosines(group, arm)]
    if not arms:
        return
    said = []
    for arm in arms:
        cosine = summarise(list(_cosines(group, arm).values()))
        scale = over_seeds(group, lambda one: one.value("gradients", arm, "noise_scale"))  # noqa: B023
        known = f", of {scale.n} seeds" * (scale.n < cosine.n)  # none where noise hides the gradient
        said.append(f"{arm} {cosine.mean:.3g} (noise scale {scale.mean:.3g} mini-batches{known})")
    others = arms[1:] if arms[0] == "grpo" else []
    tests = [paired_test(_cosines(group, arm), _cosines(group, "grpo")) for arm in others]
    gaps = [paired_difference(_cosines(group, arm), _cosines(group, "grpo")) for arm in others]
    for arm, gap, p, test in zip(others, gaps, holm([test.p for test in tests]), tests, strict=True):
        note = f"; {test.note}" if test.note else ""
        said.append(f"{arm} − grpo {gap.mean:+.2g} ({shown_p(p)}{note}: {says(p)})")
    last = gaps[-1] if gaps else summarise([])
    yield Statement(
        "no claim: gradient noise of token-level and sequence-level objectives",
        "§3",
        group[0].suite,
        f"{words}mean cosine of the gradients of two mini-batches: " + ", ".join(said),
        f"{arms[-1]} − grpo {shown_range(last.low, last.high, last.n, signed=True)}" if gaps else "none",
        f"{len(group)} seeds",
        tuple(one.id for one in group),
        headline=True,
    )


def _cosines(group: Group, arm: str) -> dict[int, float]:
    found = {one.seed: one.value("gradients", arm, "cosine_pairs") for one in group}
    return {seed: value for seed, value in found.items() if np.isfinite(value)}


def _seeds(group: Group, lengths: Sequence[int]) -> str:
    responses = setting(group[0], "noise.responses")
    return f"{len(group)} seeds of {responses} responses of {lengths[-1]} tokens"
