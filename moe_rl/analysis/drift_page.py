"""The page of a drift report: the numbers with their intervals, the figures, and how to make it again."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import pandas as pd

from moe_rl.analysis.comparison import setting
from moe_rl.analysis.drift_figures import DriftFigure
from moe_rl.analysis.drift_tables import DriftRuns, chosen, first_and_last, over_seeds, rows_named
from moe_rl.analysis.html import commit, distinct, document, embedded, machine, table
from moe_rl.analysis.tables import three_digits

METRICS = {
    "experts": "Experts changed, 1 − |A ∩ B| / K",
    "sets": "Expert sets changed, of (token, layer)",
    "tokens": "Tokens with a change in at least one layer",
    "top1": "Expert of the largest gate weight changed",
    "gate_mass": "Gate mass moved to other experts",
    "router_shift": "Router shift γ of RSPO (1: none)",
}
UPDATES = {
    "lr": "Learning rate",
    "grad_norm": "Gradient norm before clipping",
    "relative_update_norm": "‖Δθ‖ / ‖θ‖ since sampling",
    "kl_k1": "KL(old ‖ new), k1 (nats per token)",
    "kl_k3": "KL(old ‖ new), k3 (nats per token)",
    "log_ratio_sq": "Mean square token log-ratio (nats²)",
}
CAUSES = {
    "staleness": "staleness, π_θ against π_old",
    "mismatch": "mismatch, π_old against the sampler",
    "product": "cross term",
    "both": "both, π_θ against the sampler",
}
CAUSE_METRICS = {
    "experts": "Experts changed",
    "mean_square": "Mean square token log-ratio (nats²)",
    "share": "Share of it",
}
PREDICTION = {
    "first_order/precision": "First order: precision",
    "first_order/recall": "First order: recall",
    "margin_only/precision": "Smallest margins: precision",
    "margin_only/recall": "Smallest margins: recall",
}
ATTRIBUTION = {
    "both": "Experts changed",
    "router": "… by the new router on the old hidden states",
    "hidden": "… by the old router on the new hidden states",
    "interaction": "… interaction",
}
RATIO_VARIANCE = {
    "native": "Mean square log-ratio, native routing (nats²)",
    "replayed": "… with the old experts replayed",
    "native/changed": "… native, tokens whose experts changed",
    "native/unchanged": "… native, the other tokens",
    "tokens_changed": "Tokens whose experts changed",
    "share_changed": "Their share of the sum of squares",
    "share_removed": "Share of the sum of squares that replay takes away",
}
FRACTIONS = {
    *METRICS,
    *PREDICTION,
    *ATTRIBUTION,
    "share",
    "tokens_changed",
    "share_changed",
    "share_removed",
} - {"router_shift"}


def render(runs: DriftRuns, figures: Sequence[DriftFigure], out: Path, command: str) -> str:
    """The whole page; figures are read from out/figures and embedded."""
    labels = list(dict.fromkeys(runs.labels.values()))
    title = "Expert drift" if len(labels) > 1 else f"Expert drift: {labels[0]}"
    drawn = [embedded(one.title, one.caption, out / "figures" / f"{one.name}.png") for one in figures]
    parts = ["<h3>What was measured</h3>", _overview(runs)]
    if len(labels) == 1:
        parts += [*_numbers(runs, labels[0]), *drawn]
    else:
        parts += ["<h3>By configuration, response tokens</h3>", _by_configuration(runs, labels), *drawn]
        for label in labels:
            parts += [f"<h2>{escape(label)}</h2>", *_numbers(runs, label)]
    parts += ["<h3>Runs</h3>", _runs(runs), "<h2>How to reproduce</h2>", _reproduce(runs, command)]
    return document(title, "\n".join(parts))


def _overview(runs: DriftRuns) -> str:
    keys = {
        "experiment": "Experiment",
        "model.name": "Model",
        "task.name": "Task",
        "optim.lr": "Learning rate",
        "optim.minibatches": "Updates per rollout batch",
        "steps": "Rollout batch measured",
        "drift.precision": "Precision",
        "old": "Old trace",
        "new": "New trace",
    }
    rows = [
        (label, distinct(str(value) for run in runs.runs if (value := setting(run, key)) is not None))
        for key, label in keys.items()
    ]
    environments = [run.environment for run in runs.runs]
    rows += [
        ("Seeds", distinct(str(run.seed) for run in runs.runs if run.seed is not None)),
        ("Commit", distinct(commit(found) for found in environments)),
        ("torch", distinct(str((found.get("versions") or {}).get("torch", "–")) for found in environments)),
        ("Machine", distinct(machine(found) for found in environments)),
    ]
    return table([], [[escape(label), escape(value)] for label, value in rows if value])


def _by_configuration(runs: DriftRuns, labels: Sequence[str]) -> str:
    """One line a configuration: drift, and the size of the updates that made it."""
    drift = over_seeds(chosen(runs.table("drift"), by="all"))
    updates = runs.over_seeds("updates")
    rows = rows_named(drift)[0]
    ends = first_and_last(drift)
    columns = [
        (f"{name}, {title}", chosen(points, metric=metric, subject=subject, rows=kind))
        for name, metric, points, kind in (
            ("experts changed", "experts", drift, rows),
            ("tokens changed", "tokens", drift, rows),
            ("KL, k3 (nats)", "kl_k3", updates, rows),
            ("‖Δθ‖/‖θ‖", "relative_update_norm", updates, ""),
        )
        for subject, title in ends
    ]
    columns = [(head, points) for head, points in columns if len(points)]
    lines = [
        [escape(label), *(_cell(found, found["metric"].isin(FRACTIONS).any()) for found in cells)]
        for label in labels
        for cells in [[chosen(points, label=label) for _, points in columns]]
    ]
    note = f'<p class="note">{escape(_note(drift))}</p>'
    return table(["", *(escape(head) for head, _ in columns)], lines) + note


def _numbers(runs: DriftRuns, label: str) -> list[str]:
    """The tables of one configuration."""

    def read(name: str, by: str = "all") -> pd.DataFrame:
        return over_seeds(chosen(runs.table(name), label=label, by=by))

    drift = read("drift")
    parts = ["<h3>Drift</h3>", _drift(drift)]
    floor = read("floor")
    if len(floor):
        paths = {path: path.replace("_", " ") for path in dict.fromkeys(floor["subject"])}
        heads = {"response": "response tokens", "prompt": "prompt tokens"}
        cells = chosen(floor, metric="experts")
        parts += [
            "<h3>Noise floor: experts changed with unchanged weights</h3>",
            _grid(cells, "subject", paths, "rows", heads),
        ]
    for heading, name, metrics in (
        ("Size of the updates", "updates", UPDATES),
        ("Why, over all layers", "attribution", ATTRIBUTION),
        ("Prediction of the changes", "prediction", PREDICTION),
        ("Tokens whose experts changed, in the token log-ratio", "ratio_variance", RATIO_VARIANCE),
    ):
        points = read(name)
        if len(points):
            columns = dict(first_and_last(points))
            parts += [f"<h3>{heading}</h3>", _grid(points, "metric", metrics, "subject", columns)]
    causes = read("causes", "cause")
    if len(causes):
        last, title = first_and_last(causes)[-1]
        cells = chosen(causes, subject=last)
        parts += [f"<h3>Two causes, {title}</h3>", _grid(cells, "metric", CAUSE_METRICS, "at", CAUSES)]
    return parts


def _drift(points: pd.DataFrame) -> str:
    """Every metric, after the first and the last update, for each kind of token."""
    heads, columns = [], []
    for rows in rows_named(points):
        for subject, title in first_and_last(points):
            heads.append(f"{rows} tokens, {title}")
            columns.append(chosen(points, rows=rows, subject=subject))
    lines = [
        [escape(name), *(_cell(chosen(column, metric=metric), metric in FRACTIONS) for column in columns)]
        for metric, name in METRICS.items()
        if any(len(chosen(column, metric=metric)) for column in columns)
    ]
    note = f'<p class="note">{escape(_note(points))}</p>'
    return table(["", *(escape(head) for head in heads)], lines) + note


def _grid(points: pd.DataFrame, down: str, rows: dict[str, str], across: str, columns: dict[str, str]) -> str:
    """A table of the points: `down` and `across` name the columns of `points` that rows and columns hold."""
    lines = [
        [
            escape(name),
            *(
                _cell(
                    chosen(points, **{down: row, across: column}),
                    (row if down == "metric" else "experts") in FRACTIONS,
                )
                for column in columns
            ),
        ]
        for row, name in rows.items()
        if (points[down] == row).any()
    ]
    return table(["", *(escape(head) for head in columns.values())], lines)


def _cell(point: pd.DataFrame, percent: bool) -> str:
    """Value and interval of the one point; a dash for none."""
    if len(point) != 1 or pd.isna(point["value"].iloc[0]):
        return "–"
    value, low, high = (_shown(float(point[name].iloc[0]), percent) for name in ("value", "low", "high"))
    around = "" if pd.isna(point["low"].iloc[0]) else f"<small>{low} to {high}</small>"
    return f"{value}{around}"


def _shown(value: float, percent: bool) -> str:
    return f"{three_digits(100 * value)} %" if percent else three_digits(value)


def _note(points: pd.DataFrame) -> str:
    kinds = [kind for kind in dict.fromkeys(points["interval"]) if kind]
    seeds = int(points["seeds"].max())
    over = f"Mean over {seeds} seeds. " if seeds > 1 else ""
    counts = points.loc[points["metric"] == "experts", "n"]
    n = f", n = {int(counts.max())}" if seeds == 1 and len(counts) else ""
    return f"{over}Below a value: {' or '.join(kinds)}{n}." if kinds else over.strip()


def _runs(runs: DriftRuns) -> str:
    lines = []
    for run in runs.runs:
        missing = run.summary.get("missing") or {}
        notes = "; ".join(f"no {name}: {reason}" for name, reason in missing.items())
        lines.append(
            [
                escape(runs.labels[run]),
                escape(str(run.seed)),
                f"<code>{escape(str(run.path))}</code>",
                escape(notes),
            ]
        )
    found = table(["Configuration", "Seed", "Directory", "Not measured"], lines)
    for run in runs.left_out:
        found += f'<p class="note">Left out, {run.status}: <code>{escape(str(run.path))}</code></p>'
    return found


def _reproduce(runs: DriftRuns, command: str) -> str:
    recorded = dict.fromkeys(" ".join(run.environment.get("command") or []) for run in runs.runs)
    commands = "\n".join(dict.fromkeys([*filter(None, recorded), command]))
    return (
        f"<pre>{escape(commands)}</pre>"
        "<p>Every run's <code>config.yaml</code> is its resolved configuration and its "
        "<code>tables/*.csv</code> hold every number (sum, count, value, interval) that is drawn here; the "
        "figures are in <code>figures/*.png</code>, beside this page.</p>"
    )
