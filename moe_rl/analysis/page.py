"""The HTML of a report: escaped, self-contained, readable without a script."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import pandas as pd

from moe_rl.analysis.comparison import (
    Comparison,
    collapse_rule,
    differing_settings,
    ended_as_collapsed,
    setting,
)
from moe_rl.analysis.figures import Drawn
from moe_rl.analysis.html import commit, distinct, document, embedded, machine, table
from moe_rl.analysis.statistics import BOOTSTRAP, RANGE
from moe_rl.analysis.tables import MEASURES, Measure, three_digits

SETTINGS = {
    "objective.name": "Objective",
    "objective.clip_low": "Clip range, width below 1",
    "objective.clip_high": "Clip range, width above 1",
    "replay.source": "Routing replay",
    "optim.lr": "Learning rate",
    "optim.minibatches": "Updates per rollout batch",
    "rollout.prompts": "Prompts per step",
    "rollout.responses": "Responses per prompt",
    "rollout.max_new_tokens": "Longest response (tokens)",
    "steps": "Steps",
}


@dataclass(frozen=True)
class Section:
    """What the page shows of one comparison; `prefix` starts the names of its files."""

    comparison: Comparison
    runs: pd.DataFrame
    arms: pd.DataFrame
    differences: pd.DataFrame
    figures: Sequence[Drawn]
    prefix: str


def render(sections: Sequence[Section], out: Path, command: str) -> str:
    """The whole page; figures are read from out/figures and embedded."""
    body = "\n".join(_section(section, out) for section in sections)
    contents = ""
    if len(sections) > 1:
        links = (f'<li><a href="#{s.prefix}">{escape(_name(s.comparison))}</a></li>' for s in sections)
        contents = f"<p>{len(sections)} comparisons, never averaged together:</p><ul>{''.join(links)}</ul>"
    title = f"moe_rl: {_name(sections[0].comparison)}" if len(sections) == 1 else "moe_rl: comparisons"
    body = f"{contents}\n{body}\n<h2>How to reproduce</h2>\n{_reproduce(sections, command)}"
    return document(title, body)


def _section(section: Section, out: Path) -> str:
    heading = f'<h2 id="{section.prefix}">{escape(_name(section.comparison))}</h2>' if section.prefix else ""
    parts = [
        heading,
        "<h3>What was compared</h3>",
        _overview(section.comparison),
        "<h3>Arms</h3>",
        _arms(section.arms),
    ]
    if len(section.differences):
        parts += ["<h3>Differences, paired by seed</h3>", _differences(section.differences)]
    parts += [
        _figure(figure, out / "figures" / f"{section.prefix}{figure.name}.png") for figure in section.figures
    ]
    if not section.figures:
        parts.append("<p>No step was recorded yet: there is nothing to draw.</p>")
    elif not any(figure.name == "drift" for figure in section.figures):
        parts.append("<p class='note'>No expert drift was recorded: the model has no MoE layers.</p>")
    parts += ["<h3>Runs</h3>", _runs(section), "<h3>Collapse rule</h3>", _rule(section.comparison)]
    return "\n".join(parts)


def _name(comparison: Comparison) -> str:
    return f"{comparison.experiment} · {comparison.model} · {comparison.task}"


def _overview(comparison: Comparison) -> str:
    runs = [member.run for member in comparison.members]
    environments = [run.environment for run in runs]
    rows = [
        ("Model", comparison.model),
        ("Task", comparison.task),
        ("Experiment", comparison.experiment),
        ("Arms", ", ".join(comparison.arms)),
        ("Seeds", distinct(sorted(str(run.seed) for run in runs))),
    ]
    others = {key: f"{key} (differs)" for key in differing_settings(comparison) if key not in SETTINGS}
    rows += [(label, _by_arm(comparison, key)) for key, label in (SETTINGS | others).items()]
    rows += [
        ("Commit", distinct(commit(found) for found in environments)),
        ("torch", distinct(str((found.get("versions") or {}).get("torch", "–")) for found in environments)),
        ("Machine", distinct(machine(found) for found in environments)),
    ]
    return table([], [[escape(label), escape(value)] for label, value in rows if value])


def _by_arm(comparison: Comparison, key: str) -> str:
    """A setting's value, or its values by arm where arms differ; empty where no run has it."""
    values = {
        arm: distinct(_plain(setting(m.run, key)) for m in comparison.of(arm)) for arm in comparison.arms
    }
    if set(values.values()) == {"none"}:
        return ""
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{arm}: {value}" for arm, value in values.items())


def _plain(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _arms(arms: pd.DataFrame) -> str:
    """The table of arms, turned: a column an arm stays readable with many measures."""
    columns = [arm for _, arm in arms.iterrows()]
    rows = [["Seeds", *(_seeds(arm) for arm in columns)]]
    for measure in MEASURES:
        if arms[measure.key].notna().any():
            rows.append([escape(measure.label), *(_cell(arm, measure) for arm in columns)])
        if measure.key == "clip_token" and arms["clip_ratio"].notna().any():
            times = (
                f"{three_digits(arm['clip_ratio'])} ×" if pd.notna(arm["clip_ratio"]) else "–"
                for arm in columns
            )
            rows.append(["… relative to grpo", *times])
    rows.append(["Collapse", *(escape(arm["collapse"]) for arm in columns)])
    note = f"{_around(set(arms['interval']))} Runs short of their last step count as far as they got."
    layout = "equal" if len(columns) < 6 else ""
    by_arm = table(["", *(escape(arm["arm"]) for arm in columns)], rows, layout)
    return f'{by_arm}<p class="note">{escape(note)}</p>'


def _around(intervals: set[str]) -> str:
    """What the small numbers of a cell are."""
    named = " or ".join(f"the {name}" for name in (BOOTSTRAP, RANGE) if name in intervals)
    if not named:
        return "One seed: nothing is known of the spread between seeds."
    reason = ", since fewer than five seeds support no confidence interval" if RANGE in intervals else ""
    return f"Mean over seeds; below it {named}{reason}."


def _seeds(arm: pd.Series) -> str:
    short = f"<small>{arm['short']} short of the last step</small>" if arm["short"] else ""
    return f"{arm['seeds']}{short}"


def _cell(arm: pd.Series, measure: Measure) -> str:
    n, low, high = arm[f"{measure.key}_n"], arm[f"{measure.key}_low"], arm[f"{measure.key}_high"]
    around = f"{measure.show(low)} to {measure.show(high)}" if n > 1 else ""
    fewer = f" (n = {n})" if 0 < n < arm["seeds"] else ""
    return f"{measure.show(arm[measure.key])}<small>{around}{fewer}</small>"


def _differences(differences: pd.DataFrame) -> str:
    labels = {measure.key: measure.label for measure in MEASURES}
    rows = [
        [
            escape(f"{row.arm} − {row.minus}"),
            escape(labels[row.measure]),
            _signed(row.difference),
            f"{_signed(row.low)} to {_signed(row.high)}" if row.pairs > 1 else "–",
            escape(row.interval),
            str(row.pairs),
        ]
        for row in differences.itertuples()
        if row.pairs
    ]
    return table(["Arms", "Measure", "Difference", "Around it", "What that is", "Pairs"], rows)


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _figure(figure: Drawn, file: Path) -> str:
    return embedded(figure.title, figure.caption, file)


def _runs(section: Section) -> str:
    rows = [
        [
            escape(row.arm),
            escape(str(row.seed)),
            f'<span class="{row.status}">{row.status}</span>',
            escape(f"{row.steps} of {row.steps_planned}" if pd.notna(row.steps_planned) else str(row.steps)),
            escape(row.collapse),
            f"<code>{escape(row.path)}</code>",
        ]
        for row in section.runs.itertuples()
    ]
    html = table(["Arm", "Seed", "Status", "Steps", "Collapse", "Directory"], rows)
    for member in section.comparison.members:
        lines = member.run.failure.strip().splitlines()
        if lines:
            verb, why = ("collapsed", lines[0]) if ended_as_collapsed(member.run) else ("failed", lines[-1])
            html += (
                f'<p class="note">{escape(member.arm)}, seed {escape(str(member.run.seed))} {verb}: '
                f"<code>{escape(why.removeprefix('collapsed: '))}</code></p>"
            )
    for left, kept in section.comparison.left_out:
        html += (
            f'<p class="note">Left out: <code>{escape(str(left.path))}</code> repeats the configuration and '
            f"seed of <code>{escape(str(kept.path))}</code>.</p>"
        )
    return html


def _rule(comparison: Comparison) -> str:
    rules = {tuple(collapse_rule(member.run).items()) for member in comparison.members}
    sentences = [
        "A run collapses at the step that completes {patience} steps in a row in which the mean reward of "
        "the last {window} steps lies below {fraction} times its best value so far, or at the first step "
        "with a reward, loss or gradient norm that is not finite, unless updates were skipped there. A run "
        "that never earned reward has not collapsed. “None by step n” is a censored observation: n is as far "
        "as the run was seen.".format(**dict(rule))
        for rule in sorted(rules)
    ]
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _reproduce(sections: Sequence[Section], command: str) -> str:
    recorded = (member.run.environment.get("command") for s in sections for member in s.comparison.members)
    training = dict.fromkeys(" ".join(words) for words in recorded if words and "experiments.train" in words)
    commands = "\n".join([*training, command])
    return (
        f"<pre>{escape(commands)}</pre>"
        "<p>The resolved configuration of every run is the <code>config.yaml</code> of its directory; the "
        "numbers behind every table and figure are in <code>tables/*.csv</code>, the figures in "
        "<code>figures/*.png</code>, beside this page.</p>"
    )
