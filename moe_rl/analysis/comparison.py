"""Which runs may be averaged: same experiment, model, task and configuration, different seed."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pandas as pd

from moe_rl.analysis.collapse import FRACTION, PATIENCE, WINDOW, Collapse, detect_collapse
from moe_rl.analysis.readable import require_readable
from moe_rl.store import Run, dotted

ARM_ORDER = ("grpo", "grpo+replay", "gspo")
RULE = {"window": WINDOW, "fraction": FRACTION, "patience": PATIENCE}
# How people say a value of a setting; without a line here it is `key=value`.
SAID = {
    "arm": "{}",
    "model.name": "{}",
    "model.config.num_experts": "{} experts",
    "model.config.num_experts_per_tok": "top-{}",
    "optim.aux_loss_coef": "auxiliary loss × {}",
    "rollout.sampler_dtype": "sampler in {}",
    "rollout.ahead": "{} tokens a step older",
    "rollout.ahead=0": "no token older",
    "rollout.query_set_steps": "queries replaced every {} steps",
    "rollout.query_set_steps=None": "the same queries throughout",
    "rollout.recompute=True": "π_old recomputed",
    "rollout.recompute=False": "π_old from the sampler",
    "advantages_by": "advantages by {}",
    "advantages=paper": "Â normalised in its group",
    "advantages=mean": "Â without ÷ std",
    "advantages=none": "Â = reward",
    "objective.aggregation": "loss by {}",
}
# what may differ between runs of one arm without making them another arm
NOT_COMPARED = ("seed", "device", "threads", "checkpoint_every")


@dataclass(frozen=True)
class Member:
    """One run of a comparison, its metrics read once.

    arm: the run's arm, followed by the settings that tell it from other runs of that arm, if any.
    steps, updates, evals: the run's streams, one row a record.
    """

    run: Run
    arm: str
    steps: pd.DataFrame
    updates: pd.DataFrame
    evals: pd.DataFrame
    collapse: Collapse

    @property
    def short(self) -> bool:
        """Whether it has not reached its last step: unfinished, failed, or ended as collapsed."""
        return self.run.status != "done" or len(self.steps) < int(self.run.config.get("steps", 0))


@dataclass(frozen=True)
class Comparison:
    """Runs of one experiment, model and task.

    members: ordered by arm, then seed.  left_out: runs that repeat the configuration and seed of a member,
    which would count one seed twice, as (left out, kept).
    """

    experiment: str
    model: str
    task: str
    members: tuple[Member, ...]
    left_out: tuple[tuple[Run, Run], ...]

    @property
    def arms(self) -> list[str]:
        """Labels of the arms, in the order of the tables and figures."""
        return list(dict.fromkeys(member.arm for member in self.members))

    def of(self, arm: str) -> list[Member]:
        """Members of one arm, by seed."""
        return [member for member in self.members if member.arm == arm]


def compare(runs: Iterable[Run]) -> list[Comparison]:
    """Group runs by experiment, model and task, sorted by these names."""
    groups: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        key = (str(run.config.get("experiment") or "no experiment"), named(run, "model"), named(run, "task"))
        groups[key].append(run)
    return [_comparison(key, group) for key, group in sorted(groups.items())]


def named(run: Run, section: str) -> str:
    """`<section>.name` of a run's configuration."""
    return str(setting(run, f"{section}.name") or f"unnamed {section}")


class Configured(Protocol):
    """A run directory, or what is left of one."""

    @property
    def config(self) -> dict[str, Any]: ...


def setting(run: Configured, dotted: str) -> Any:
    """A value of a run's configuration by its dotted key; None when absent."""
    value: Any = run.config
    for key in dotted.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def collapse_rule(run: Run) -> dict[str, Any]:
    """Window, fraction and patience of the collapse rule by which a run was trained."""
    given = run.config.get("collapse") or {}
    return {key: given.get(key, default) for key, default in RULE.items()}


def ended_as_collapsed(run: Run) -> bool:
    """Whether the run stopped itself at a value that is not finite, rather than crashed."""
    return run.failure.startswith("collapsed:")


def collapse_of(run: Run, steps: pd.DataFrame) -> Collapse:
    """When a run collapsed: by the rule on its steps, or at the step where it ended as collapsed."""
    columns = ("reward/mean", "loss", "grad_norm", "updates/skipped")
    found = detect_collapse(
        *(steps[column].tolist() if column in steps else [] for column in columns), **collapse_rule(run)
    )
    if found.step is not None or not ended_as_collapsed(run):
        return found
    ends = [event for event in run.events() if event.get("event") == "collapsed"]
    return Collapse(ends[-1]["step"], None, ends[-1]["reason"]) if ends else found


def differing_settings(comparison: Comparison) -> list[str]:
    """Dotted keys that differ between the members, besides what makes an arm (objective and replay)."""
    keys = differing([flatten(member.run.config) for member in comparison.members])
    return [key for key in keys if key != "arm" and not key.startswith(("objective.", "replay."))]


def _comparison(key: tuple[str, str, str], runs: list[Run]) -> Comparison:
    labels = arm_labels(runs)
    kept: dict[tuple[str, int | None], Member] = {}
    left_out = []
    for run in runs:
        member = _load(run, labels[run])
        other = kept.get((member.arm, run.seed))
        if other is None or len(member.steps) > len(other.steps):
            kept[member.arm, run.seed] = member
        if other is not None:
            kept_run = kept[member.arm, run.seed].run
            left_out.append((other.run if kept_run is run else run, kept_run))
    members = sorted(kept.values(), key=lambda member: (*_arm_rank(member), member.run.seed or 0))
    return Comparison(*key, members=tuple(members), left_out=tuple(left_out))


def _arm_rank(member: Member) -> tuple[int, str, str]:
    arm = member.run.arm
    return (ARM_ORDER.index(arm) if arm in ARM_ORDER else len(ARM_ORDER), arm, member.arm)


def arm_labels(runs: Sequence[Run], ignore: Collection[str] = ()) -> dict[Run, str]:
    """Arm names, extended by the settings in which runs of one arm differ: those are never averaged.

    ignore: dotted keys that make no difference, the x axis of a sweep for one.
    """
    labels = {}
    for arm in {run.arm for run in runs}:
        same = [run for run in runs if run.arm == arm]
        for run, settings in zip(same, told_apart([run.config for run in same], ignore), strict=True):
            labels[run] = f"{arm} ({settings})" if settings else arm
    return labels


def told_apart(configs: Sequence[dict[str, Any]], ignore: Collection[str] = ()) -> list[str]:
    """For each configuration its values of the settings in which not all agree, in words; "" if all agree.

    ignore: dotted keys that make no difference.
    """
    flats = [flatten(config) for config in configs]
    keys = [key for key in differing(flats) if key not in ignore]
    return [
        ", ".join(said(key, flat[key]) if key in flat else f"{key}=absent" for key in keys) for flat in flats
    ]


def said(key: str, value: Any) -> str:
    """A value of a setting in words, for people: "top-2", "π_old recomputed"."""
    exact = f"{key}={value}"
    if exact in SAID:
        return SAID[exact]
    return SAID[key].format(value) if key in SAID else exact


def differing(settings: Collection[dict[str, str]]) -> list[str]:
    """The dotted keys of which not all have the same value."""
    keys = sorted({key for flat in settings for key in flat})
    return [key for key in keys if len({flat.get(key) for flat in settings}) > 1]


def flatten(config: dict[str, Any]) -> dict[str, str]:
    """A configuration by dotted keys, without what may differ between runs of one arm and empty sections."""
    return {
        key: str(value) for key, value in dotted(config).items() if key not in NOT_COMPARED and value != {}
    }


def _load(run: Run, arm: str) -> Member:
    steps, updates, evals = run.steps(), run.updates(), run.evals()
    require_readable(run, steps, updates, evals)
    return Member(
        run=run, arm=arm, steps=steps, updates=updates, evals=evals, collapse=collapse_of(run, steps)
    )
