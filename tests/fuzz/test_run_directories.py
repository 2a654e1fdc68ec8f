"""Run directories after damage: a StoreError that names the file, or the numbers that the files say."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import strategies as st

from moe_rl.analysis.comparison import compare
from moe_rl.analysis.curves import bands, layer_curves
from moe_rl.analysis.figures import RECIPES
from moe_rl.analysis.report import write_report
from moe_rl.analysis.tables import arm_table, difference_table, run_table
from moe_rl.store import RunStore, StoreError, find_runs

FILES = [
    "config.yaml",
    "environment.json",
    "steps.jsonl",
    "updates.jsonl",
    "evals.jsonl",
    "events.jsonl",
    "DONE",
]
STEPS = 6


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Two arms of two seeds, one of the four failed as collapsed."""
    root = tmp_path_factory.mktemp("good")
    environment = {
        "git_commit": "c0ffee" * 6,
        "git_dirty": False,
        "versions": {"torch": "2.11"},
        "command": ["python", "-m", "experiments.train", "seed=0"],
    }
    for arm in ("grpo", "gspo"):
        for seed in (0, 1):
            config = {
                "experiment": "demo", "arm": arm, "seed": seed, "steps": STEPS, "model": {"name": "tiny"},
                "task": {"name": "sort"}, "objective": {"name": arm, "clip_low": 0.2},
                "replay": {"source": None}, "optim": {"lr": 3e-4},
                "collapse": {"window": 2, "fraction": 0.5, "patience": 2},
            }  # fmt: skip
            with RunStore.open(root / arm / f"seed{seed}", config, environment) as store:
                write_records(store, seed)
                if (arm, seed) == ("gspo", 1):
                    store.event("collapsed", step=STEPS, reason="non-finite loss")
                    store.fail("collapsed: loss is not finite\n")
                else:
                    store.finish({"steps": STEPS, "layer_ids": [1, 3]})
    return root


def write_records(store, seed):
    random = np.random.default_rng(seed)
    store.log("evals", {"step": 0, "eval/greedy": 0.25, "eval/sampled": 0.2, "eval/n": 128})
    for step in range(1, STEPS + 1):
        drawn = random.random(4).tolist()
        record = {"step": step, "reward/mean": drawn[0], "loss": drawn[1], "grad_norm": drawn[2]}
        record |= {
            "clip_frac/token": drawn[3],
            "drift/old": 0.5,
            "drift/old_by_layer": drawn[:2],
            "time/total": 1.5,
        }
        store.log("steps", record)
        for update in (1, 2):
            store.log(
                "updates", {"step": step, "update": update, "loss": 0.5, "drift/old": 0.25, "drift/step": 0.5}
            )
    store.log("evals", {"step": STEPS, "eval/greedy": 0.75, "eval/sampled": 0.5, "eval/n": 128})


def analysed(root):
    """Every number of a report, without its drawings."""
    tables = []
    for comparison in compare(find_runs(root)):
        runs = run_table(comparison)
        tables.append(runs)
        arm_table(runs), difference_table(runs)
        for recipe in RECIPES:
            for panel in recipe.panels(comparison.members):
                bands(panel.curves)
    return tables


def lines(path):
    """A plain reading of a JSON-lines file: its complete lines."""
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def plainly(path):
    """Figures of a run as its files say them, by code of its own."""
    steps = lines(path / "steps.jsonl")
    evals = lines(path / "evals.jsonl")
    tail = steps[-max(1, math.ceil(len(steps) / 10)) :]
    greedy = [record.get("eval/greedy", math.nan) for record in evals if record["step"] > 0]

    def mean(records, key):
        values = [record[key] for record in records if not math.isnan(record.get(key, math.nan))]
        return sum(values) / len(values) if values else math.nan

    return {
        "seed": yaml.safe_load((path / "config.yaml").read_text()).get("seed", math.nan),
        "steps": len(steps),
        "final_reward": mean(tail, "reward/mean"),
        "clip_token": mean(steps, "clip_frac/token"),
        "final_greedy": greedy[-1] if greedy else math.nan,
    }


def require_what_the_files_say(tables):
    rows = [row for table in tables for row in table.to_dict("records")]
    assert rows
    for row in rows:
        for name, value in plainly(Path(row["path"])).items():
            found = math.nan if row[name] is None else row[name]
            assert found == pytest.approx(value, nan_ok=True), (row["path"], name)


def damage(data, damaged, path, name):
    """One fault of a file of a run."""
    file = path / name
    fault = data.draw(
        st.sampled_from(["bytes"] * 6 + ["lost", "empty", "folder", "line twice", "line lost", "value"])
    )
    content = file.read_bytes()
    if fault == "bytes":
        file.write_bytes(data.draw(damaged(content)))
    elif fault in ("lost", "folder"):
        file.unlink()
        if fault == "folder":
            file.mkdir()
    elif fault == "empty":
        file.write_bytes(b"")
    elif fault == "value":  # of another kind, in place of a number or a text
        text = content.decode()
        at = data.draw(st.integers(0, len(text) - 1))
        start, stop = text.rfind(":", 0, at) + 1, len(text)
        ends = [end for mark in ",\n}" if (end := text.find(mark, at)) >= 0]
        new = data.draw(
            st.sampled_from(['"x"', "null", "[]", "{}", "[[1]]", "true", "-1", "1e999", "NaN", "9" * 30])
        )
        file.write_text(f"{text[:start]} {new}{text[min([*ends, stop]) :]}")
    else:
        parts = content.splitlines(keepends=True)
        at = data.draw(st.integers(0, len(parts) - 1))
        parts[at : at + 1] = [parts[at]] * 2 if fault == "line twice" else []
        file.write_bytes(b"".join(parts))
    return fault


@pytest.mark.parametrize("cases", [60, pytest.param(2_000, marks=pytest.mark.slow)])
def test_a_damaged_run_is_refused_or_reported_as_its_files_say(good, tmp_path, campaign, damaged, cases):
    root = tmp_path / "runs"

    def check(data):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(good, root)
        run = root / data.draw(st.sampled_from(["grpo/seed0", "grpo/seed1", "gspo/seed1"]))
        names = [name for name in [*FILES, "FAILED"] if (run / name).exists()]
        name = data.draw(st.sampled_from([*names, "steps.jsonl", "steps.jsonl"]))
        damage(data, damaged, run, name)
        try:
            tables = analysed(root)
        except StoreError as error:
            assert "\n" not in str(error) and str(run) in str(error)
            return "refused"
        require_what_the_files_say(tables)
        return "reported"

    endings = campaign(check, st.data(), cases=cases)
    assert endings["refused"] > 10 and endings["reported"] > 10


@pytest.mark.parametrize("cases", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_a_whole_report_of_damaged_runs(good, tmp_path, campaign, damaged, cases):
    """With its page and its drawings."""
    root = tmp_path / "runs"

    def check(data):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(good, root)
        names = [name for name in FILES if (root / "gspo" / "seed0" / name).exists()]
        damage(data, damaged, root / "gspo" / "seed0", data.draw(st.sampled_from(names)))
        try:
            page = write_report(find_runs(root), tmp_path / "report", "command")
        except StoreError:
            return "refused"
        assert page.read_text().endswith("</html>\n")
        return "reported"

    campaign(check, st.data(), cases=cases)


def replaced(old, new):
    return lambda text: text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.yaml", replaced("seed: 0", "seed: zero"), "config.yaml is damaged: expected an integer"),
        ("config.yaml", replaced("seed: 0", "seed: 2020-13-45"), "config.yaml is damaged, no YAML: month"),
        ("config.yaml", replaced("window: 2", "window: x"), "at least 1 as collapse.window"),
        ("environment.json", lambda text: text[:20], "environment.json is damaged, no JSON"),
        ("steps.jsonl", replaced('"step": 2', '"step": 3'), "steps 1, 2, 3, … without a gap, got [1, 3, 3"),
        ("steps.jsonl", replaced('"step": 6', '"step": 7'), "steps 1, 2, 3, … without a gap"),
        ("steps.jsonl", replaced("loss", "lost"), "line 2 is damaged: expected 'loss' in every"),
        ("steps.jsonl", replaced('_layer": [', '_layer": [1, '), "line 2 is damaged: expected 3 numbers as"),
        ("steps.jsonl", lambda text: text[: text.rfind("{")], "expected the 6 steps that DONE counts, got 5"),
        ("updates.jsonl", replaced("0.5", '"x"'), "line 2 is damaged: expected a text as 'loss'"),
        ("DONE", replaced("[\n", "[[],\n"), "DONE is damaged: expected a list of integers as layer_ids"),
    ],
)
def test_damage_is_named(good, tmp_path, name, change, message):
    shutil.copytree(good, tmp_path / "runs")
    file = tmp_path / "runs" / "grpo" / "seed0" / name
    file.write_text(change(file.read_text()))
    with pytest.raises(StoreError) as caught:
        analysed(tmp_path / "runs")
    assert message in str(caught.value) and str(file) in str(caught.value)


def test_layer_numbers_that_do_not_fit_give_way_to_the_order_of_execution(good, tmp_path):
    """One doubled line of DONE names three layers where two were measured."""
    shutil.copytree(good, tmp_path / "runs")
    file = tmp_path / "runs" / "grpo" / "seed0" / "DONE"
    file.write_text(file.read_text().replace("    1,\n", "    1,\n    1,\n"))
    (comparison,) = compare(find_runs(tmp_path / "runs"))
    curves = layer_curves(comparison.of("grpo"), "drift/old_by_layer")
    assert curves["x"].tolist() == [0, 1, 1, 3]
