"""Writes experiments/results/drift.md from finished drift runs:

    python -m experiments.drift_results                  # reads outputs/drift_*
    python -m experiments.drift_results outputs=DIR out=experiments/results

Experiments that have not run are said to be missing, on the page and here.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from moe_rl.analysis.drift_results import Section, crossing, interval, write_results
from moe_rl.analysis.drift_tables import DRIFT_TABLE, DriftRuns, chosen, natural
from moe_rl.store import StoreError, find_runs

PAPER = 0.10  # "roughly 10 %" (GSPO §5.3)
TITLES = {
    "drift_lr": "Small model",
    "drift_paper_topology": "48 layers, 128 experts, top-8",
    "drift_smollm2": "Upcycled SmolLM2",
}


@dataclass(frozen=True)
class Experiment:
    """A file of conf/experiment/ and what its section says."""

    name: str
    title: str
    text: str

    sweep: bool = True

    @property
    def command(self) -> str:
        return f"python -m experiments.measure_drift {'-m ' * self.sweep}experiment={self.name}"


EXPERIMENTS = (
    Experiment(
        "drift_tiny", "A small model: how many, where and why",
        "Qwen3-MoE of 8 layers, 16 experts, top-2, after a cold start on 12-digit sorting; one rollout "
        "batch of 32 prompts x 8 responses, 4 GRPO updates at lr 3e-4, five seeds.",
    ),
    Experiment(
        "drift_paper_topology", "The paper's routing topology",
        "48 MoE layers, 128 experts, top-8 at width 64; one seed a learning rate.",
    ),
    Experiment(
        "drift_smollm2", "A pretrained base: SmolLM2-135M, upcycled",
        "30 layers, each MLP copied into experts with noise, routers warmed up on text; GRPO on "
        "reasoning-gym's worded problems (docs/upcycling.md), one update at lr 1e-5, one seed.",
        sweep=False,
    ),
    Experiment("drift_lr", "Law: learning rate", "The small model again."),
    Experiment("drift_minibatches", "Law: mini-batches per rollout", "One rollout in 1 to 16 updates."),
    Experiment("drift_depth", "Law: depth", "Each depth from a cold start of its own."),
    Experiment("drift_experts", "Law: number of experts", "Each from a cold start of its own, top-2."),
    Experiment("drift_top_k", "Law: top-k", "Of 16 experts, each from a cold start of its own."),
    Experiment(
        "drift_aux_loss", "Law: load-balancing loss of the cold start",
        "The coefficient while the router was trained; off in the measured updates.",
    ),
    Experiment("drift_norm_topk", "Law: normalised gate weights", "Whether the K weights sum to 1."),
    Experiment(
        "drift_precision", "Law: precision",
        "float32, and sampling, passes and updates under bfloat16 autocast with float32 weights.",
    ),
)  # fmt: skip


def main(arguments: list[str]) -> None:
    options = {"outputs": "outputs", "out": "experiments/results"}
    given = dict(argument.partition("=")[::2] for argument in arguments)
    if given.keys() - options.keys():
        raise SystemExit(
            f"expected outputs=DIR and out=DIR, got {sorted(given.keys() - options.keys())[0]!r}"
        )
    options |= given
    sections, missing = [], []
    for experiment in EXPERIMENTS:
        runs = finished(Path(options["outputs"]) / experiment.name)
        if runs is None:
            missing.append(experiment.name)
            continue
        text = " ".join([experiment.text, *reached(runs)])
        sections.append(Section(experiment.title, text, experiment.command, runs))
    if not sections:
        raise SystemExit(f"no finished drift runs under {options['outputs']}: run measure_drift first")
    page = write_results(sections, beside_the_paper(sections), Path(options["out"]))
    print(f"{page} (with figures and tables in {page.with_suffix('')}/)")
    if missing:
        print(f"not run, so not on the page: {', '.join(missing)}", file=sys.stderr)


def finished(folder: Path) -> DriftRuns | None:
    """The measured runs of an experiment; None without any."""
    if not folder.is_dir():
        return None
    try:
        found = [run for run in find_runs(str(folder)) if (run.path / DRIFT_TABLE).exists()]
    except StoreError:
        return None
    return DriftRuns(found) if found else None


def reached(runs: DriftRuns) -> list[str]:
    """Where a sweep of the learning rate shows the paper's 10 %, after the first and the last update."""
    if runs.swept != ["optim.lr"]:
        return []
    last = max(runs.table("drift")["subject"].astype(int))
    said = []
    ends = [("1", "the first update"), *([(str(last), f"update {last}")] if last > 1 else [])]
    for subject, when in ends:
        at = crossing(runs, PAPER, subject, "kl_k3")
        said.append(
            f"10 % is not reached after {when}."
            if at is None
            else f"10 % is reached after {when} at lr {at[0]:.1e}, KL {at[1]:.2g} nats per token."
        )
    return said


def beside_the_paper(sections: list[Section]) -> list[str]:
    """What agrees with GSPO §5.3 and what does not, each statement with the numbers it rests on."""
    runs = {section.runs.runs[0].path.parents[1].name: section.runs for section in sections}
    said = []
    for name, title in TITLES.items():
        if name in runs:
            reads = " ".join([f"{changed(runs[name])}.", *reached(runs[name])])
            said.append(f"- **{title}**, “roughly 10 %” after one gradient update: {reads}")
    if "drift_tiny" in runs:
        said.append(
            f"- **Later layers change more**: {changed(runs['drift_tiny'], by='layer')} in layers 0, 1, … of "
            "the small model. The attribution below says why: nearly all of it comes from hidden states that "
            "the layers below have moved, little from the router's own weights."
        )
    if "drift_depth" in runs:
        said.append(
            "- **“Worse in deeper models”**, at one learning rate, after the first update: "
            f"{changed(runs['drift_depth'])}. Tokens that change in at least one layer are in its table."
        )
    return said


def changed(runs: DriftRuns, by: str = "all") -> str:
    """Experts changed after the first update, with its interval, of each setting or layer."""
    found = chosen(runs.over_seeds("drift"), metric="experts", rows="response", subject="1", by=by)
    found = found.sort_values("label", key=lambda labels: labels.map(natural), kind="stable")
    settings = [label.partition("(")[2].rstrip(")").partition("=") for label in found["label"]]
    names = [f"{key.rpartition('.')[2]}{equals}{value}" for key, equals, value in settings]
    return ", ".join(
        f"{name} {interval(row)}".strip() for name, (_, row) in zip(names, found.iterrows(), strict=True)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
