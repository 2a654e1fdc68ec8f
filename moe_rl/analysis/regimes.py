"""The search for a regime in which routing breaks GRPO, and the interventions that separate its causes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from moe_rl.analysis.comparison import flatten, setting
from moe_rl.analysis.evidence import Difference, difference, final_reward, mean_of
from moe_rl.analysis.run_files import CompactRun

# What makes an arm, what follows from other settings, and where a model's weights lie.
NOT_A_REGIME = ("arm", "advantages", "objective.", "replay.", "intervention.", "optim.freeze_routers")
RATE = "optim.lr"


@dataclass(frozen=True)
class Regime:
    """GRPO with minus without replay in one cell of a search; `regime` are its settings off the usual."""

    regime: str
    difference: Difference
    runs: tuple[CompactRun, ...]


def regime_of(run: CompactRun) -> dict[str, str]:
    """The settings of a run that its arm does not make."""
    return {key: value for key, value in flatten(run.config).items() if not key.startswith(NOT_A_REGIME)}


def off_the_usual(runs: Sequence[CompactRun]) -> dict[str, dict[str, str]]:
    """Of every run, by its id, the settings that differ from what most of the runs have."""
    flats = {run.id: regime_of(run) for run in runs}
    usual = {
        key: Counter(flat.get(key) for flat in flats.values()).most_common(1)[0][0]
        for key in {key for flat in flats.values() for key in flat}
    }
    return {
        name: {key: flat.get(key, "absent") for key in sorted(usual) if flat.get(key) != usual[key]}
        for name, flat in flats.items()
    }


def rates_of(runs: Sequence[CompactRun]) -> dict[str, dict[float, list[CompactRun]]]:
    """The runs of every arm by learning rate, the rest of their settings as most of the runs have them."""
    found: dict[str, dict[float, list[CompactRun]]] = defaultdict(lambda: defaultdict(list))
    off = off_the_usual(runs)
    for run in runs:
        if not off[run.id].keys() - {RATE}:
            found[run.arm][float(setting(run, RATE))].append(run)
    return found


def regime_differences(runs: Sequence[CompactRun]) -> list[Regime]:
    """Final reward of grpo+replay minus grpo in every regime that has both, paired by seed."""
    off = off_the_usual(runs)
    cells: dict[str, dict[str, list[CompactRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        settings = ", ".join(f"{key}={value}" for key, value in off[run.id].items())
        cells[settings or "the usual settings"][run.arm].append(run)
    return [
        Regime(
            name,
            difference("grpo+replay", "grpo", arms, final_reward),
            (*arms["grpo+replay"], *arms["grpo"]),
        )
        for name, arms in sorted(cells.items())
        if {"grpo", "grpo+replay"} <= arms.keys()
    ]


@dataclass(frozen=True)
class Dose:
    """At one share of experts changed: the changed experts in the ratio pass alone, minus in both passes."""

    objective: str
    dose: float
    difference: Difference
    alone: tuple[CompactRun, ...]
    replayed: tuple[CompactRun, ...]


def dose_of(run: CompactRun) -> float | None:
    """Share of experts that a run swaps in the ratio pass; None for a run without this intervention."""
    found = setting(run, "intervention.expert_changes")
    return None if found is None else float(found)


def replayed(run: CompactRun) -> bool:
    return setting(run, "replay.source") is not None


def objective_of(run: CompactRun) -> str:
    return str(setting(run, "objective.name"))


def dose_pairs(runs: Sequence[CompactRun]) -> list[Dose]:
    """Every dose above 0 with runs of both kinds, by objective; at 0 both are the same run."""
    cells: dict[tuple[str, float], dict[str, list[CompactRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        dose = dose_of(run)
        if dose:
            cells[objective_of(run), dose]["replayed" if replayed(run) else "alone"].append(run)
    return [
        Dose(
            name,
            dose,
            difference("alone", "replayed", kinds, final_reward),
            tuple(kinds["alone"]),
            tuple(kinds["replayed"]),
        )
        for (name, dose), kinds in sorted(cells.items())
        if {"alone", "replayed"} <= kinds.keys()
    ]


@dataclass(frozen=True)
class Effect:
    """At one share of experts changed in the ratio pass alone, minus none changed; of one objective."""

    objective: str
    dose: float
    difference: Difference
    runs: tuple[CompactRun, ...]


def dose_effects(runs: Sequence[CompactRun]) -> list[Effect]:
    """What changed experts do to each objective, where it has runs at dose 0 too."""
    cells: dict[str, dict[float, list[CompactRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        dose = dose_of(run)
        if dose is not None and not replayed(run):
            cells[objective_of(run)][dose].append(run)
    return [
        Effect(
            name,
            dose,
            difference("changed", "none", {"changed": group, "none": doses[0.0]}, final_reward),
            (*group, *doses[0.0]),
        )
        for name, doses in sorted(cells.items())
        for dose, group in sorted(doses.items())
        if dose and 0.0 in doses
    ]


@dataclass(frozen=True)
class Control:
    """A comparison of an intervention with its control, in words; `dose`: of experts changed, if any were."""

    claim: str
    words: str
    dose: float | None
    difference: Difference
    runs: tuple[CompactRun, ...]


def matched_controls(runs: Sequence[CompactRun]) -> list[Control]:
    """Swapped experts against noise of the nearest KL, frozen against free routers; GRPO without replay."""
    grpo = [run for run in runs if objective_of(run) == "grpo" and not replayed(run)]
    free = [run for run in grpo if dose_of(run) is None]
    plain = [run for run in free if not noise_of(run) and not frozen(run)]
    still = [run for run in free if frozen(run)]
    found = []
    if plain and still:
        groups = {"frozen": still, "free": plain}
        found.append(
            Control(
                "GRPO fails because its routers move",
                "GRPO with frozen − with free routers",
                None,
                difference("frozen", "free", groups, final_reward),
                (*still, *plain),
            )
        )
    noisy: dict[float, list[CompactRun]] = defaultdict(list)
    for run in free:
        if noise_of(run):
            noisy[noise_of(run)].append(run)
    swapped: dict[float, list[CompactRun]] = defaultdict(list)
    for run in grpo:
        dose = dose_of(run)
        if dose:
            swapped[dose].append(run)
    for dose, group in sorted(swapped.items()):
        if not noisy:
            break
        kl = mean_kl(group)
        sigma = min(noisy, key=lambda s: abs(math.log(max(mean_kl(noisy[s]), 1e-12) / max(kl, 1e-12))))
        groups = {"swapped": group, "noise": noisy[sigma]}
        found.append(
            Control(
                "it is the routing, not any noise in the ratio of the same size",
                f"GRPO with {100 * dose:g} % of experts changed in the ratio pass (KL {kl:.2g} nats a token) "
                f"− with noise of {sigma:g} nats (KL {mean_kl(noisy[sigma]):.2g}, the nearest)",
                dose,
                difference("swapped", "noise", groups, final_reward),
                (*group, *noisy[sigma]),
            )
        )
    return found


def noise_of(run: CompactRun) -> float:
    """Standard deviation of the noise in a run's log-ratios, nats."""
    return float(setting(run, "intervention.log_ratio_noise") or 0.0)


def frozen(run: CompactRun) -> bool:
    return bool(setting(run, "optim.freeze_routers"))


def mean_kl(runs: Sequence[CompactRun]) -> float:
    """Mean k3 estimate over steps and runs, nats a token."""
    measure = mean_of("kl/k3")
    values = [value for run in runs if math.isfinite(value := measure(run))]
    return sum(values) / len(values) if values else math.nan
