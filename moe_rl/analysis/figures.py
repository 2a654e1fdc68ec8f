"""The figures of a report: what each shows, in which units, and what its caption says."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from moe_rl.analysis.comparison import Comparison, Member
from moe_rl.analysis.curves import bands, bin_width, layer_curves, run_curves, seed_of
from moe_rl.analysis.plots import STEP, Look, Panel, draw
from moe_rl.analysis.statistics import BOOTSTRAP, RANGE


@dataclass(frozen=True)
class Drawn:
    """A finished figure and what is behind it.

    data: rows of panel, arm, seed, x, value.  bands: rows of panel, arm, x, n, mean, low, high, interval.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    data: pd.DataFrame
    bands: pd.DataFrame


@dataclass(frozen=True)
class Recipe:
    """How a figure is made from the runs of a comparison; panels that nobody logged are left out."""

    name: str
    title: str
    caption: str
    panels: Callable[[Sequence[Member]], list[Panel]]
    columns: int = 2


def draw_all(comparison: Comparison, look: Mapping[str, Look]) -> list[Drawn]:
    """Every figure of a comparison for which something was logged, in the order of the report."""
    return [drawn for recipe in RECIPES if (drawn := _draw(recipe, comparison, look)) is not None]


def _draw(recipe: Recipe, comparison: Comparison, look: Mapping[str, Look]) -> Drawn | None:
    ended = frozenset((member.arm, seed_of(member)) for member in comparison.members if member.short)
    panels = [panel for panel in recipe.panels(comparison.members) if not panel.curves.empty]
    panels = [replace(panel, ended=ended) if panel.xlabel == STEP else panel for panel in panels]
    if not panels:
        return None
    data = pd.concat([panel.curves.assign(panel=panel.title) for panel in panels], ignore_index=True)
    band = pd.concat([bands(panel.curves).assign(panel=panel.title) for panel in panels], ignore_index=True)
    caption = " ".join([recipe.caption, *_zeros(panels), *_reading(panels, band, comparison)])
    return Drawn(recipe.name, recipe.title, caption, draw(panels, look, recipe.columns), data, band)


def _reading(panels: Sequence[Panel], band: pd.DataFrame, comparison: Comparison) -> Iterator[str]:
    """How lines and bands are to be read, for the runs at hand."""
    yield "Thin lines: runs; thick line: their mean."
    kinds = set(band["interval"])
    if BOOTSTRAP in kinds:
        yield "Band, 5 seeds or more: 95 % bootstrap interval of the mean."
    if RANGE in kinds:
        yield "Band, fewer than 5 seeds: smallest to largest seed, not a confidence interval."
    width = bin_width(comparison.members)
    if width > 1 and any(panel.xlabel == STEP and not panel.markers for panel in panels):
        yield f"A point is the mean of up to {width} consecutive steps."
    if any(panel.ended for panel in panels):
        yield "×: where a run ends short of its last step; from there on the mean is over the others alone."


def _zeros(panels: Sequence[Panel]) -> list[str]:
    values = pd.concat([panel.curves["value"] for panel in panels if panel.log] or [pd.Series(dtype=float)])
    zeros = int((values <= 0).sum())
    if not zeros:
        return []
    return [f"{zeros} of {len(values)} values are zero and lie on the dotted line marked 0."]


def _reward(members: Sequence[Member]) -> list[Panel]:
    return [Panel("mean reward of the rollout batch", "reward", run_curves(members, "reward/mean"))]


def _accuracy(members: Sequence[Member]) -> list[Panel]:
    return [
        Panel(
            f"{name} decoding",
            "accuracy (fraction)",
            run_curves(members, f"eval/{name}", "evals"),
            markers=True,
        )
        for name in ("greedy", "sampled")
    ]


def _clip(members: Sequence[Member]) -> list[Panel]:
    curves = run_curves(members, "clip_frac/token")
    means = curves.groupby(["arm", "seed"], sort=False)["value"].mean().reset_index().assign(x=0)
    unit = "fraction of tokens"
    return [
        Panel("tokens clipped", unit, curves, log=True),
        Panel("mean over steps (dots: runs)", unit, means, xlabel="", log=True, bars=True),
    ]


def _drift(members: Sequence[Member]) -> list[Panel]:
    first, last = run_curves(members, "drift/first"), run_curves(members, "drift/old")
    within, single = (run_curves(members, f"drift/{name}", "updates") for name in ("old", "step"))
    changed, update = "experts changed", "gradient update within the batch"
    return [
        Panel("after the first update of a batch", changed, first, percent=True),
        Panel("after all updates of a batch", changed, last, percent=True),
        Panel("within a batch, mean over steps", changed, within, update, percent=True, markers=True),
        Panel("by a single update, mean over steps", changed, single, update, percent=True, markers=True),
    ]


def _layers(members: Sequence[Member]) -> list[Panel]:
    curves = layer_curves(members, "drift/old_by_layer")
    return [Panel("mean over steps", "experts changed", curves, "MoE layer", percent=True, markers=True)]


def _ratios(members: Sequence[Member]) -> list[Panel]:
    token = run_curves(members, "ratio/token_log_sq", transform=np.sqrt)
    sequence = run_curves(members, "ratio/sequence_std")
    return [
        Panel("token log-ratio, root mean square", "nats", token, log=True),
        Panel("sequence ratio, standard deviation", "ratio (dimensionless)", sequence, log=True),
    ]


def _health(members: Sequence[Member]) -> list[Panel]:
    return [
        Panel(title, unit, run_curves(members, column), log=log)
        for title, unit, column, log in (
            ("response length", "tokens", "response/length", False),
            ("truncated responses", "fraction", "response/truncated", False),
            ("entropy", "nats per token", "entropy", False),
            ("gradient norm before clipping", "norm", "grad_norm", True),
            ("KL(old ‖ new), k3 estimate", "nats per token", "kl/k3", True),
            ("groups without a reward difference", "fraction", "reward/zero_std_groups", False),
        )
    ]


RECIPES = (
    Recipe(
        "reward",
        "Reward",
        "Mean reward of the sampled responses at every step, before the step's updates.",
        _reward,
    ),
    Recipe(
        "accuracy",
        "Held-out accuracy",
        "Accuracy on held-out prompts, greedy and sampled at the rollout temperature; step 0 is the cold "
        "start.",
        _accuracy,
    ),
    Recipe(
        "clip_fraction",
        "Clip fraction",
        "Fraction of response tokens whose gradient is clipped away, by each arm's own clip range, on a log "
        "axis; a sequence objective clips all tokens of a response together. Right: mean over steps, the "
        "mean over runs written above (GSPO, Figure 2, reports 0.0013 for GRPO and 0.15 for GSPO).",
        _clip,
    ),
    Recipe(
        "drift",
        "Expert drift",
        "Share of the experts chosen by π_old that the updated policy no longer chooses, 1 − |A ∩ B| / K, "
        "on the response tokens of the same rollout batch, both routed natively. “By a single update” "
        "compares with the policy just before that update, the other panels with π_old. GSPO (§5.3) reports "
        "“roughly 10 %” for one update of a 48-layer, 128-expert, top-8 model.",
        _drift,
    ),
    Recipe(
        "drift_by_layer",
        "Expert drift by depth",
        "Experts changed after all updates of a batch, by MoE layer (number of the decoder layer), mean over "
        "steps.",
        _layers,
        columns=1,
    ),
    Recipe(
        "ratio_spread",
        "Spread of the importance ratios",
        "Left: root mean square of log π_θ/π_old over response tokens. Right: standard deviation over "
        "responses of the length-normalised sequence ratio (GSPO Eq. 7). Over all updates of a step, each "
        "with the policy that the update starts from; a replay arm's are those of its replayed forward.",
        _ratios,
    ),
    Recipe(
        "health",
        "Length, entropy, gradients, KL",
        "Signals to read beside the reward. The gradient norm is the mean over a step's updates; entropy is "
        "π_old's; KL is estimated on its samples over all updates of the step.",
        _health,
        columns=3,
    ),
)
