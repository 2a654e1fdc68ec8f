"""Try every convention, fewest departures first, and say which reproduce the loss or come nearest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import product

import numpy as np
import torch

from moe_rl.objectives.diagnose.choices import Choice, Settings
from moe_rl.objectives.diagnose.dump import Dump
from moe_rl.objectives.diagnose.evaluate import Sums, Unit, clip_counts, evaluate
from moe_rl.objectives.diagnose.inputs import (
    Advantages,
    advantages,
    corrections,
    from_rewards,
    group_sizes,
    masks,
    ratios,
)
from moe_rl.objectives.diagnose.policies import policies
from moe_rl.objectives.diagnose.reductions import (
    Aggregation,
    Factor,
    Term,
    aggregations,
    factors,
    sum_norm,
    terms,
)

# A convention with departures that chance would produce more often than this is no finding.
MAX_CHANCE = 0.5
# Losses this many tolerances away are counted to estimate how densely conventions lie around the loss.
NEIGHBOURHOOD = 50
KEPT_NEAREST = 40
MAX_LENGTH = 2**17  # tokens
COUNTED = 40  # matches whose clip counts are compared with the dump's clip_frac


@dataclass(frozen=True)
class Match:
    """One convention and what it makes of the dump."""

    unit: Unit
    advantages: Advantages
    aggregation: Aggregation
    term: Term
    factor: Factor
    loss: float
    target: float
    scale: float  # what errors are relative to: |loss| + responses' terms in quadrature
    dump: Dump = field(repr=False)

    @property
    def choices(self) -> tuple[Choice, ...]:
        unit = self.unit
        inputs = (unit.policy, unit.ratio, unit.mask, unit.correction)
        return (*inputs, self.advantages, self.aggregation, self.term, self.factor)

    @property
    def departures(self) -> tuple[str, ...]:
        """Names of the choices that no paper or framework documents, or whose value was guessed."""
        return tuple(choice.name for choice in self.choices if choice.cost)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(choice.note for choice in self.choices if choice.note)

    @property
    def error(self) -> float:
        """|loss - target| / |target|, a fraction; relative to the terms' size where the target is 0."""
        return abs(self.loss - self.target) / (abs(self.target) or self.scale or 1.0)

    @cached_property
    def counts(self) -> dict[str, float]:
        """Clip fractions and KL of this convention, under the names of the objectives' metrics."""
        return clip_counts(self.unit, self.dump, self.advantages.values)


@dataclass(frozen=True)
class Diagnosis:
    """What was found. `matches` is empty where nothing reproduces the loss."""

    matches: tuple[Match, ...]  # equally few departures, best first
    nearest: tuple[Match, ...]  # best first: up to three without departures, then up to three with
    tried: int
    tolerance: float  # that `matches` meet, or the widest tried
    chance: float  # how many conventions would meet it by chance
    coincidences: int = 0  # conventions that meet it but are no more than chance would give


def diagnose(dump: Dump, settings: Settings | None = None) -> Diagnosis:
    """Search the conventions up to `settings.departures` departures; see Diagnosis."""
    search = _Search(dump, settings or Settings())
    tolerances = search.tolerances
    hits, chance = search.hits(tolerances[0], 0)
    if len(hits):  # the usual case, and quick: the rest of the space stays untouched
        return Diagnosis(tuple(search.ranked(hits, tolerances[0])), (), search.tried, tolerances[0], chance)
    for cost in range(1, search.settings.departures + 1):
        search.add_units(cost)
    coincidences = 0
    for tolerance in tolerances:
        for cost in range(search.settings.departures + 1):
            hits, chance = search.hits(tolerance, cost)
            if len(hits) and (cost == 0 or chance < MAX_CHANCE):
                matches = search.ranked(hits, tolerance)
                return Diagnosis(tuple(matches), (), search.tried, tolerance, chance)
            coincidences = max(coincidences, len(hits))
        solved, chance_of_solved = search.with_solved_length(tolerance)
        if solved and chance_of_solved < MAX_CHANCE:
            return Diagnosis(tuple(solved), (), search.tried, tolerance, chance_of_solved)
    nearest = (*search.nearest(0), *search.nearest(1))
    return Diagnosis((), nearest, search.tried, tolerances[-1], chance, coincidences)


def reproduce_advantages(
    dump: Dump, group_size: int | None, tolerance: float
) -> list[tuple[Advantages, float]]:
    """Conventions that make the dump's advantages [B] of its rewards, or the nearest one, with their errors.

    The error is the largest difference, relative to the largest advantage. Empty unless the dump has both.
    """
    given = dump.advantages
    if given is None or dump.rewards is None or given.ndim != 1:
        return []
    size = float(given.abs().max()) or 1.0
    found = [
        (choice, float((choice.values - given).abs().max()) / size)
        for choice in from_rewards(dump.rewards, group_size)
    ]
    found.sort(key=lambda pair: (pair[1] > tolerance, pair[0].cost if pair[1] <= tolerance else pair[1]))
    return [pair for pair in found if pair[1] <= tolerance] or found[:1]


class _Search:
    """The losses of all conventions, kept where they lie near the dump's."""

    def __init__(self, dump: Dump, settings: Settings) -> None:
        self.dump, self.settings = dump, settings
        given = settings.tolerance
        self.tolerances = dump.tolerances if given is None else (given,)
        self.group_size = group_size = settings.group_size or dump.group_size
        self.advantages = advantages(dump, group_size)
        self.aggregations = aggregations(dump.mask, settings)
        self.terms = terms(settings, reference=dump.ref_logp is not None, entropy=dump.entropy is not None)
        self.factors = factors(len(dump.mask), group_size)
        self.combinations = {budget: self._combinations(budget) for budget in range(settings.departures + 1)}
        self.units: list[Unit] = []
        self.tried = 0
        self.candidates = list(self._units())
        self.kept: list[tuple[np.ndarray, ...]] = []
        self.add_units(0)

    def add_units(self, cost: int) -> None:
        """Evaluate the units of exactly this cost and pool their losses with the others'."""
        self.kept += [self._losses(unit) for unit in self.candidates if unit.cost == cost]
        columns = zip(*self.kept, strict=True)
        self.loss, self.scale, self.cost, self.unit, self.combination = map(np.concatenate, columns)
        self.off = np.abs(self.loss - self.dump.loss)

    def hits(self, tolerance: float, cost: int) -> tuple[np.ndarray, float]:
        """(indices of exactly this cost within the tolerance, how many chance would put there up to it)."""
        allowed = (self.cost <= cost) & (self.off <= NEIGHBOURHOOD * tolerance * self.scale)
        near = self.off <= tolerance * self.scale
        around = np.unique(np.round(self.loss[allowed & ~near] / (abs(self.dump.loss) or 1.0), 12))
        return np.flatnonzero(near & (self.cost == cost)), len(around) / (NEIGHBOURHOOD - 1)

    def ranked(self, hits: np.ndarray, tolerance: float) -> list[Match]:
        """Best first: agreeing with the dump's clip_frac, by error in coarse steps, likeliest."""
        # The scale is 0 where every advantage is.
        steps = np.round(self.off[hits] / np.maximum(tolerance * self.scale[hits], 1e-300), 1)
        matches = [self._match(index) for index in hits[np.lexsort((hits, steps))]]
        # A bare factor explains less than the aggregation that has it.
        matches.sort(key=lambda match: match.factor.cost)
        logged = self.dump.clip_frac
        if logged is None:
            return matches
        head, tail = matches[:COUNTED], matches[COUNTED:]
        return sorted(head, key=lambda match: not agreeing_counts(match.counts, logged)) + tail

    def nearest(self, cost: int) -> list[Match]:
        """The three nearest distinct losses among the conventions of this cost."""
        indices = np.flatnonzero(self.cost == cost)
        order = indices[np.argsort(self.off[indices], kind="stable")]
        _, first = np.unique(np.round(self.loss[order], 12), return_index=True)
        return [self._match(index) for index in order[np.sort(first)[:3]]]

    def with_solved_length(self, tolerance: float) -> tuple[list[Match], float]:
        """(Dr.GRPO forms without other departures whose divisor comes out a whole number, chance of one).

        The divisor L is a constant of the trainer that a dump does not show, so it is solved for.
        """
        if not self.dump.loss or self.settings.length_divisor is not None or not self.settings.departures:
            return [], 0.0
        sums = [
            match
            for match in map(self._match, np.flatnonzero(self.cost == 0).tolist())
            if match.aggregation.mode == "seq-mean-token-sum" and not match.term.parts
        ]
        found, chance_of_length = [], {}
        for match in sums:
            length, slack = match.loss / self.dump.loss, tolerance * match.scale / abs(self.dump.loss)
            whole = round(length)
            if not 1 < whole <= MAX_LENGTH:
                continue
            chance_of_length[round(length, 9)] = min(2 * slack, 1.0)
            if abs(length - whole) <= slack:
                note = "the divisor was solved for and comes out whole"
                norm = sum_norm(len(self.dump.mask), whole, 1, note)
                size = match.scale / whole
                found.append(replace(match, aggregation=norm, loss=match.loss / whole, scale=size))
        return found, sum(chance_of_length.values())

    def _units(self) -> Iterator[Unit]:
        dump, settings = self.dump, self.settings
        sizes = [size for size in group_sizes(len(dump.mask), self.group_size) if size > 1]
        per_token = dump.advantages is not None and dump.advantages.ndim == 2
        router_shift = dump.router_shift is not None
        readings = list(product(ratios(dump), masks(dump), corrections(dump)))
        reference = dump.ref_logp is not None and len(dump.mask) % 2 == 0
        found = policies(settings, sizes, per_token=per_token, router_shift=router_shift, reference=reference)
        for policy in found:
            for ratio, mask, correction in readings:
                unit = Unit(policy, ratio, mask, correction)
                # Each pass of a comparison serves one advantage convention alone: only the dump as it is.
                plain = not policy.compares or unit.cost == policy.cost
                if policy.family in ratio.families and plain and unit.cost <= settings.departures:
                    yield unit

    def _combinations(self, budget: int) -> tuple[np.ndarray, ...]:
        """Indices of advantages, aggregation, term and factor that cost at most `budget`, and their costs."""
        axes = (self.advantages, self.aggregations, self.terms, self.factors)
        costs = [np.array([choice.cost for choice in axis]) for axis in axes]
        total = reduce(np.add, np.ix_(*costs))
        indices = np.nonzero(total <= budget)
        return (*indices, total[indices])

    def _losses(self, unit: Unit) -> tuple[np.ndarray, ...]:
        """(loss, scale, cost, unit, combination) of the unit's conventions that lie near the dump's loss."""
        number = len(self.units)
        self.units.append(unit)
        sums = evaluate(unit, self.dump, self.advantages)
        weights_MB = torch.stack([choice.weights(sums.counts) for choice in self.aggregations])
        objective_CM = (sums.objective @ weights_MB.T).numpy()
        spread_CM = (sums.magnitude.square() @ weights_MB.square().T).sqrt().numpy()
        term_DM, term_size_DM = self._regularisers(sums, weights_MB)
        factor_F = np.array([choice.value for choice in self.factors])
        a, g, t, f, cost = self.combinations[self.settings.departures - unit.cost]
        modes = np.array([choice.mode == "seq-mean-token-mean" for choice in self.aggregations])
        sensible = modes[g] if unit.policy.compares else np.ones(len(g), dtype=bool)
        with np.errstate(invalid="ignore"):  # whatever padding holds may overflow under another mask
            loss = factor_F[f] * (term_DM[t, g] - objective_CM[a, g])
            # Rounding errs independently from response to response: their terms add in quadrature.
            scale = np.abs(loss) + np.abs(factor_F[f]) * (spread_CM[a, g] + term_size_DM[t, g])
            finite = sensible & np.isfinite(loss) & np.isfinite(scale)
            off = np.where(finite, np.abs(loss - self.dump.loss), np.inf)
            near = off <= NEIGHBOURHOOD * self.tolerances[-1] * scale
        self.tried += int(sensible.sum())
        cost = cost + unit.cost
        keep = finite & (near | (cost == 0))
        for level in range(1, self.settings.departures + 1):
            nearest = np.argsort(np.where(cost == level, off, np.inf), kind="stable")[:KEPT_NEAREST]
            keep[nearest] |= (cost[nearest] == level) & finite[nearest]
        kept = np.flatnonzero(keep)
        return loss[kept], scale[kept], cost[kept], np.full(len(kept), number), kept

    def _regularisers(self, sums: Sums, weights_MB: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Regularisers' part of the loss [D, M] for every term and aggregation, and its size."""
        totals = {name: weights_MB @ rows_B for name, rows_B in sums.regularisers.items()}
        if "entropy" in totals:  # TRL's entropy bonus is a token-mean whatever the objective is
            mean = sums.regularisers["entropy"].sum() / sums.counts.sum()
            totals["token-mean entropy"] = mean.expand(len(weights_MB))
        value_DM = np.zeros((len(self.terms), len(weights_MB)))
        size_DM = np.zeros_like(value_DM)
        for index, term in enumerate(self.terms):
            for name, coefficient in term.parts:
                value_DM[index] += coefficient * totals[name].numpy()
                size_DM[index] += abs(coefficient) * totals[name].abs().numpy()
        return value_DM, size_DM

    def _match(self, index: int) -> Match:
        unit = self.units[self.unit[index]]
        a, g, t, f, _ = (
            column[self.combination[index]]
            for column in self.combinations[self.settings.departures - unit.cost]
        )
        return Match(
            unit,
            self.advantages[a],
            self.aggregations[g],
            self.terms[t],
            self.factors[f],
            float(self.loss[index]),
            self.dump.loss,
            float(self.scale[index]),
            self.dump,
        )


def agreeing_counts(counts: dict[str, float], logged: float) -> list[str]:
    """Which of the clip fractions a logged one equals, up to its rounding."""
    return [
        name
        for name, value in counts.items()
        if name.startswith("clip_frac/") and abs(value - logged) <= 1e-5 + 1e-3 * abs(logged)
    ]
