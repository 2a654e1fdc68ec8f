"""The real command on a model that is measured in seconds, offline traces, the report, and the notebook."""

import sys
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pandas as pd
import pytest

from experiments import report
from experiments.measure_drift import main
from moe_rl.analysis.drift_sweep import sweep_table
from moe_rl.analysis.drift_tables import DriftRuns
from moe_rl.store import find_runs

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "model.config.num_experts=8",
    "model.config.moe_intermediate_size=16",
    "+model.config.initializer_range=0.2",
    "task.min_length=2",
    "task.max_length=3",
    "rollout.prompts=4",
    "rollout.responses=8",
    "rollout.max_new_tokens=5",
    "optim.minibatches=2",
    "optim.lr=3e-3",
    "cold_start.target_accuracy=0",
    "cold_start.steps=60",
    "cold_start.eval_every=60",
    "cold_start.batch_size=32",
    "cold_start.eval_prompts=8",
    "drift.resamples=50",
]


def command(*overrides):
    """Run it in this process; its exit status."""
    argv, sys.argv = sys.argv, ["measure_drift.py", *overrides]
    try:
        main()
    except SystemExit as stop:
        return stop.code
    finally:
        sys.argv = argv
    return 0


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Two seeds, and a second learning rate for one of them."""
    output = tmp_path_factory.mktemp("outputs")
    more = ["drift.floor=false", "drift.reasons=false"]
    for overrides in (["seed=0"], ["seed=1", *more], ["seed=1", "optim.lr=1e-2", *more]):
        assert command(*SMALL, *overrides, f"output={output}") == 0
    return output


@pytest.fixture(scope="module")
def run(output):
    return next(run for run in find_runs(output) if run.seed == 0)


def value(path, **equal):
    table = pd.read_csv(path, keep_default_na=False, dtype={"subject": str})
    for key, wanted in equal.items():
        table = table[table[key] == wanted]
    (row,) = table.to_dict("records")
    return row


WHOLE = {"rows": "response", "metric": "experts", "by": "all"}


def test_a_run_has_its_tables_figures_and_page(output, run, capsys):
    assert len(find_runs(output)) == 3
    assert len(list((output / "cold_starts").glob("*/result.json"))) == 1, "one cold start for all"
    assert run.status == "done"
    assert {file.stem for file in (run.path / "tables").glob("*.csv")} == {
        "drift", "updates", "causes", "floor", "attribution", "margins", "prediction", "ratio_variance",
    }  # fmt: skip
    assert {file.stem for file in (run.path / "figures").glob("*.png")} == {
        "drift_by_layer", "drift_by_position", "drift_by_update", "floor", "attribution", "margins",
    }  # fmt: skip
    row = value(run.path / "tables" / "drift.csv", subject="2", **WHOLE)
    assert row["value"] == run.summary["experts_changed_last"] > 0
    assert row["sum"] / row["count"] == pytest.approx(row["value"], abs=1e-15)
    assert (row["n"], row["unit"]) == (4, "prompts")
    page = (run.path / "index.html").read_text()
    assert f"{100 * row['value']:#.3g}" in page
    assert "python -m experiments.measure_drift" in page
    assert page.count("data:image/png") == 6
    assert run.environment["command"][:3] == ["python", "-m", "experiments.measure_drift"]

    before = (run.path / "DONE").read_bytes()
    assert command(*SMALL, "seed=0", f"output={output}") == 0
    assert "done already" in capsys.readouterr().out
    assert (run.path / "DONE").read_bytes() == before


def test_two_traces_give_the_same_numbers_without_a_model(output, run, capsys):
    """The traces that the run itself left."""
    old, new = (run.path / "traces" / f"{name}.safetensors" for name in ("old", "update-1"))
    prompt = run.summary["prompt_tokens"]
    files = [f"old={old}", f"new={new}", f"trace_files.prompt_tokens={prompt}", "drift.resamples=50"]
    assert command(*files, f"output={output / 'offline'}") == 0
    assert "of experts changed" in capsys.readouterr().out
    (offline,) = (output / "offline" / "drift").glob("traces-*")
    expected = value(run.path / "tables" / "drift.csv", subject="1", **WHOLE)
    found = value(offline / "tables" / "drift.csv", subject="1", **WHOLE)
    assert (found["sum"], found["count"]) == (expected["sum"], expected["count"])
    assert found["unit"] == "responses", "whose prompts are not in a trace"
    assert (offline / "index.html").exists() and not (offline / "tables" / "floor.csv").exists()


def test_imported_traces_by_hand(tmp_path, capsys):
    """Two sequences of two rows, one layer, K = 2: one expert of eight slots differs."""
    old = np.array([[[[0, 1]], [[2, 3]], [[0, 0]]], [[[1, 2]], [[0, 3]], [[0, 0]]]], np.int32)
    new = old.copy()
    new[0, 1, 0] = [2, 1]
    for name, batch in (("old", old), ("new", new)):
        np.save(tmp_path / f"{name}.npy", batch)
    sizes = ["layers=1", "experts=4", "top_k=2", "format=verl"]
    files = [f"old={tmp_path / 'old.npy'}", f"new={tmp_path / 'new.npy'}"]
    files += [f"trace_files.{size}" for size in sizes]
    assert command(*files, f"output={tmp_path}") == 0
    assert "12.50% of experts changed" in capsys.readouterr().out
    (path,) = (tmp_path / "drift").glob("traces-*")
    assert value(path / "tables" / "drift.csv", rows="all", metric="tokens", by="all")["value"] == 0.25
    new[1, 0, 0] = [3, 0]  # the file changes under its name: another measurement
    np.save(tmp_path / "new.npy", new)
    assert command(*files, f"output={tmp_path}") == 0
    assert "37.50% of experts changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["old=a.safetensors"], "old=FILE and new=FILE go together"),
        (["old=/nowhere/a", "new=/nowhere/b"], "/nowhere/a"),
        (["drift.precision=int8"], "expected null or bfloat16"),
        (["drift.resamples=0"], "drift.resamples=0: must be at least 1"),
        (["drift.floors=false"], "Key 'floors' not in 'DriftOptions'"),
        (["rollout.refill=1", "cold_start.enabled=false"], "rollout.refill"),
        (["rollout.ahead=2"], "rollout.ahead=2: one rollout batch is measured"),
        (["rollout.recompute=false"], "the old-policy pass that this leaves out"),
        (["model=dense", "cold_start.enabled=false"], "no MoE layers"),
    ],
)
def test_a_mistake_is_one_clear_line(tmp_path, overrides, message, capfd):
    assert command(*overrides, f"output={tmp_path}") == 1
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("**/DONE"))


def test_a_report_over_seeds_and_learning_rates(output, tmp_path, capsys):
    report.main([f"runs={output / 'drift'}", f"out={tmp_path}"])
    assert "3 runs" in capsys.readouterr().out
    sweep = pd.read_csv(tmp_path / "tables" / "sweep.csv")
    assert set(sweep["x"]) == {0.003, 0.01}, "the one key in which the runs differ"
    seeds = pd.read_csv(tmp_path / "tables" / "drift_over_seeds.csv")
    row = seeds.query("by == 'all' and metric == 'experts' and rows == 'response' and subject == 2")
    two = row[row["label"].str.contains("0.003")].iloc[0]
    values = [
        value(run.path / "tables" / "drift.csv", subject="2", **WHOLE)["value"]
        for run in find_runs(output / "drift")
        if run.config["optim"]["lr"] == 0.003
    ]
    assert two["value"] == pytest.approx(sum(values) / 2) and two["seeds"] == 2
    assert (two["low"], two["high"]) == pytest.approx((min(values), max(values)))
    assert (tmp_path / "figures" / "sweep.png").exists()
    page = (tmp_path / "index.html").read_text()
    assert "min–max of the seeds" in page and "optim.lr" in page

    measured = sweep_table(DriftRuns(find_runs(output / "drift")), "kl_k3")
    kl = [
        value(Path(path) / "tables" / "updates.csv", subject="2", metric="kl_k3")["value"]
        for path in measured["path"].unique()
    ]
    last = measured.query("subject == '2' and rows == 'response' and metric == 'experts'")
    assert sorted(last["x"]) == pytest.approx(sorted(kl))
    with pytest.raises(SystemExit, match=r"x=no\.such: expected a key"):
        report.main([f"runs={output / 'drift'}", f"out={tmp_path / 'no'}", "x=no.such"])


def test_the_notebook_reads_runs(output):
    """Executed from top to bottom; its first table holds the drift of the runs it was given."""
    notebook = nbformat.read(ROOT / "notebooks" / "drift.ipynb", as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert first.source.startswith("RUNS = ")
    first.source = f"RUNS = {[str(output / 'drift')]!r}"
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(ROOT))
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert sum("image/png" in out.get("data", {}) for out in outputs) >= 8
    assert not any(out.output_type == "error" for out in outputs)
    # the configuration of one run: its own value
    (alone,) = (run for run in find_runs(output / "drift") if run.config["optim"]["lr"] == 0.01)
    tables = " ".join(out.data.get("text/html", "") for out in outputs if "data" in out)
    assert f"{100 * alone.summary['experts_changed_last']:.2f} % [" in tables
