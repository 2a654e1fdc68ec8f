"""The results page from run directories written by hand."""

import pandas as pd
import pytest
import yaml

from experiments.drift_results import main
from moe_rl.analysis.drift_results import crossing
from moe_rl.analysis.drift_tables import DriftRuns, ends_of_each
from moe_rl.store import find_runs

COLUMNS = ["subject", "rows", "metric", "by", "at", "sum", "count", "value", "low", "high", "n", "unit"]


def row(subject, metric, value, *, rows="response", by="all", at=""):
    return [subject, rows, metric, by, at, 1000 * value, 1000, value, 0.9 * value, 1.1 * value, 32, "prompts"]


def write_run(folder, lr, seed, drift, kl):
    """A measured run: experts changed in two layers after one update, and how large the update was."""
    path = folder / f"grpo-{lr:g}" / f"seed{seed}"
    (path / "tables").mkdir(parents=True)
    config = {
        "drift": {"floor": True},
        "optim": {"lr": lr},
        "seed": seed,
        "arm": "grpo",
        "experiment": folder.name,
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    layers = [row(1, "experts", drift * part, by="layer", at=at) for at, part in ((0, 0.5), (1, 1.5))]
    tables = {
        "drift": [row(1, "experts", drift), *layers, row(1, "tokens", 2 * drift)],
        "updates": [row(1, "kl_k3", kl), row(1, "relative_update_norm", lr, rows="")],
        "floor": [row("decode", metric, 0.001) for metric in ("experts", "sets", "tokens")],
    }
    for name, lines in tables.items():
        pd.DataFrame(lines, columns=COLUMNS).to_csv(path / "tables" / f"{name}.csv", index=False)
    for name in ("DONE", "environment.json"):
        (path / name).write_text("{}")


@pytest.fixture
def sweep(tmp_path):
    folder = tmp_path / "outputs" / "drift_lr"
    for seed, off in ((0, 0.98), (1, 1.02)):
        write_run(folder, 1e-4, seed, 0.05 * off, 0.01)
        write_run(folder, 1e-3, seed, 0.20 * off, 0.09)
    return folder


def test_where_a_sweep_reaches_a_share(sweep):
    """0.05 at 1e-4 and 0.2 at 1e-3: 0.1 lies halfway in logarithms, and so do its rate and its KL."""
    runs = DriftRuns(find_runs(sweep))
    assert crossing(runs, 0.1, "1", "kl_k3") == pytest.approx((1e-4 * 10**0.5, 0.03), rel=1e-9)
    assert crossing(runs, 0.5, "1", "kl_k3") is None
    assert crossing(runs, 0.01, "1", "kl_k3") is None, "below the smallest rate it would be a guess"


def test_the_page_and_its_tables(sweep, tmp_path, capsys):
    outputs = sweep.parent
    main([f"outputs={outputs}", f"out={tmp_path / 'results'}"])
    page = (tmp_path / "results" / "drift.md").read_text()
    assert "10 % is reached after the first update at lr 3.2e-04, KL 0.03 nats per token." in page
    assert (
        "| grpo (optim.lr=0.0001) | 1 | 5.00 [4.90, 5.10] % | 2.50 %, 7.50 % | 10.00 [9.80, 10.20] %" in page
    )
    assert (
        "`python -m experiments.measure_drift -m experiment=drift_lr`: runs grpo-0.0001, grpo-0.001" in page
    )
    assert (tmp_path / "results" / "drift" / "drift_lr_sweep.png").stat().st_size > 1000
    numbers = pd.read_csv(tmp_path / "results" / "drift" / "drift_lr.csv")
    assert set(numbers["seeds"]) == {2}
    assert "drift_tiny" in capsys.readouterr().err, "what has not run is named"


def test_one_seed_shows_its_own_interval_and_the_floor(tmp_path):
    write_run(tmp_path / "outputs" / "drift_tiny", 3e-4, 0, 0.06, 0.2)
    main([f"outputs={tmp_path / 'outputs'}", f"out={tmp_path / 'results'}"])
    page = (tmp_path / "results" / "drift.md").read_text()
    assert "| grpo | 1 | 6.00 [5.40, 6.60] % |" in page
    assert "| decode | 0.10 [0.09, 0.11] % |" in page


def test_nothing_to_show_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match="no finished drift runs under"):
        main([f"outputs={tmp_path}"])
    with pytest.raises(SystemExit, match="expected outputs=DIR and out=DIR, got 'runs'"):
        main(["runs=x"])


def test_the_last_update_is_each_runs_own():
    table = pd.DataFrame(
        [("1", "a", 0.1), ("2", "a", 0.2), ("1", "b", 0.3)], columns=["subject", "path", "value"]
    )
    (_, first), (title, last) = ends_of_each(table)
    assert first["value"].tolist() == [0.1, 0.3]
    assert (title, last["value"].tolist()) == ("after the last update", [0.2, 0.3])
