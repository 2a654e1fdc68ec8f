"""Which clip width would give the loss: one unknown, solved for where no documented range fits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch

from moe_rl.objectives.diagnose.choices import Choice, Settings
from moe_rl.objectives.diagnose.dump import Dump
from moe_rl.objectives.diagnose.evaluate import Unit, evaluate
from moe_rl.objectives.diagnose.inputs import Advantages, Mask, advantages, ratios
from moe_rl.objectives.diagnose.policies import ROUND_WIDTHS, guessed_range
from moe_rl.objectives.diagnose.reductions import Aggregation, Factor, Term, aggregations
from moe_rl.objectives.diagnose.search import Match, agreeing_counts

_GRID = (1e-5, *ROUND_WIDTHS, 3.0, 10.0)
_HALVINGS = 40
SOLVED = 12  # conventions of an objective, the likeliest first: each takes a pass over the tokens per halving


def solve_clip_width(dump: Dump, settings: Settings) -> list[Match]:
    """Conventions of GRPO and GSPO that give the loss under some width, the same on both sides of 1.

    Documented advantages and aggregations alone, and of these the first SOLVED. A width that fits one number
    proves nothing, unless the dump has a clip_frac: then only those are returned whose counts equal it under
    the width that was solved for.
    """
    group_size = settings.group_size or dump.group_size
    choices = [choice for choice in advantages(dump, group_size) if not choice.cost]
    means = [choice for choice in aggregations(dump.mask, settings) if not choice.cost]
    found = []
    for family in ("grpo", "gspo"):
        grid_WCM = np.stack([_losses(family, width, dump, choices, means) for width in _GRID])
        for c, m, low, high in islice(_brackets(grid_WCM, dump.loss), SOLVED):
            match = _bisect(family, low, high, dump, choices[c], means[m])
            if dump.clip_frac is None or agreeing_counts(match.counts, dump.clip_frac):
                found.append(match)
    return found


def _brackets(grid_WCM: np.ndarray, target: float) -> Iterator[tuple[int, int, float, float]]:
    """(advantages, aggregation, width, next width) between which a loss passes the target.

    min(r A, clip(r) A) never falls as the interval widens, so that each loss passes it once at most.
    """
    above_WCM = grid_WCM > target
    for c, m in np.argwhere(above_WCM[0] & ~above_WCM[-1]):
        first = int(np.argmin(above_WCM[:, c, m]))
        yield int(c), int(m), _GRID[first - 1], _GRID[first]


def _bisect(family: str, low: float, high: float, dump: Dump, choice: Advantages, mean: Aggregation) -> Match:
    for _ in range(_HALVINGS):
        width = (low + high) / 2
        above = _losses(family, width, dump, [choice], [mean])[0, 0] > dump.loss
        low, high = (width, high) if above else (low, width)
    loss = float(_losses(family, high, dump, [choice], [mean])[0, 0])
    unit, term, factor = _unit(family, high, dump), Term("", parts=()), Factor("", value=1.0)
    return Match(unit, choice, mean, term, factor, loss, dump.loss, abs(loss), dump)


def _unit(family: str, width: float, dump: Dump) -> Unit:
    return Unit(guessed_range(family, width), ratios(dump)[0], Mask("", values=dump.mask), Choice(""))


def _losses(
    family: str, width: float, dump: Dump, choices: list[Advantages], means: list[Aggregation]
) -> np.ndarray:
    """Losses [C, M] under a width, for every advantage convention and aggregation."""
    sums = evaluate(_unit(family, width, dump), dump, choices)
    weights_MB = torch.stack([mean.weights(sums.counts) for mean in means])
    return -(sums.objective @ weights_MB.T).numpy()
