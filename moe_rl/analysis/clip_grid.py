"""Clip fractions over a grid of clip ranges, as multiples of the paper's (GSPO §5.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moe_rl.analysis.evidence import by_seed, mean_of
from moe_rl.analysis.run_files import CompactRun

PAPER = {"grpo": (0.2, 0.27), "gspo": (3e-4, 4e-4)}  # widths to the left and to the right
Cells = dict[str, dict[float, list[CompactRun]]]


def clip_scale(run: CompactRun) -> float | None:
    """The factor by which both of a run's clip widths differ from the paper's; None where there is no one."""
    widths = PAPER.get(run.arm)
    objective = run.config.get("objective") or {}
    if widths is None or not {"clip_low", "clip_high"} <= objective.keys():
        return None
    left, right = objective["clip_low"] / widths[0], objective["clip_high"] / widths[1]
    return round(left, 6) if math.isclose(left, right, rel_tol=1e-6) else None


def clip_cells(runs: Sequence[CompactRun]) -> Cells:
    """Runs of GRPO and GSPO by factor."""
    cells: Cells = {arm: {} for arm in PAPER}
    for run in runs:
        scale = clip_scale(run)
        if scale is not None:
            cells[run.arm].setdefault(scale, []).append(run)
    return cells


def ratio_by_seed(cells: Cells, scale: float) -> dict[int, float]:
    """log10 of GSPO's mean clip fraction over GRPO's, of the seeds in which both clip something."""
    grpo, gspo = (by_seed(cells[arm].get(scale, ()), mean_of("clip_frac/token")) for arm in ("grpo", "gspo"))
    shared = sorted(grpo.keys() & gspo.keys())
    return {seed: math.log10(gspo[seed] / grpo[seed]) for seed in shared if grpo[seed] > 0 and gspo[seed] > 0}
