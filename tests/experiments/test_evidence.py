"""The blocks compose and fit their time; where recovery starts; one block from training to the table."""

import json
import re
import shutil

import pandas as pd
import pytest
import yaml
from hydra import compose, initialize_config_dir

from experiments import blocks, evidence
from experiments.blocks import Block, continued, read_blocks, runs_of, sources, starts
from experiments.config import build_objective, register, train_config
from experiments.cost_config import register_cost
from experiments.launch import CONF
from experiments.noise_config import register_noise
from moe_rl.analysis.run_files import compact, read_all
from moe_rl.store import Run, RunStore

FULL = read_blocks("full")
QUICK = read_blocks("quick")
CONFIRMED = [
    block for block in FULL.values() if block.suite.startswith("fig1_") and block.suite != "fig1_longer"
]


def jobs_of(sweeps):
    """The first job of all, and the last of the sweeps over each set of options."""
    by_options = {tuple(word.split("=")[0] for word in sweep): sweep for sweep in sweeps}
    for which, sweep in [(0, sweeps[0]), *((-1, sweep) for sweep in by_options.values())]:
        yield [
            word
            if "={" in word or "=[" in word
            else word.split("=")[0] + "=" + word.split("=")[1].split(",")[which]
            for word in sweep
        ]


@pytest.mark.parametrize("block", [*FULL.values(), *QUICK.values()], ids=lambda b: b.name)
def test_every_sweep_composes_into_runs_of_its_suite(block):
    register()
    register_noise()
    register_cost()
    treated = [[word.format(seed=0) for word in treatment] for treatment in block.treatments]
    sweeps = block.sweeps or [["experiment=recovery", "model.path=x", *words] for words in treated]
    with initialize_config_dir(CONF, version_base="1.3"):
        for overrides in jobs_of(sweeps):
            cfg = compose("config" if block.entry == "train" else block.entry, overrides=overrides)
            config = train_config(cfg)
            build_objective(cfg)
            assert config.experiment == block.suite
            if block.name in QUICK and "size=quick" in overrides:
                assert config.steps * config.rollout.prompts < 200


def test_blocks_fit_their_time_and_seeds_are_fresh():
    assert all(block.minutes <= 45 for block in FULL.values())
    assert sum(block.minutes for block in FULL.values()) <= 13 * 60
    searched = {seed for block in FULL.values() if block.suite == "search" for seed in block.seeds}
    assert searched == {0, 1, 2, 3}
    for block in CONFIRMED:
        assert len(block.seeds) >= 8 and not searched & set(block.seeds)
    assert {block.suite for block in QUICK.values()} >= {
        "search", "fig1_sort", "fig1_chain_sum", "fig1_longer", "intervention", "fig2_clip", "recovery",
    }  # fmt: skip


def test_pairs_of_seeds_go_outermost_and_runs_are_counted(tmp_path):
    block = Block("b", "search", 1, seeds=(4, 5, 6), sweeps=(["a=1,2", "b={x: 1, y: 2}"], ["c=3"]))
    assert list(block.commands(tmp_path)) == [
        ["a=1,2", "b={x: 1, y: 2}", "seed=4,5", f"output={tmp_path}"],
        ["c=3", "seed=4,5", f"output={tmp_path}"],
        ["a=1,2", "b={x: 1, y: 2}", "seed=6", f"output={tmp_path}"],
        ["c=3", "seed=6", f"output={tmp_path}"],
    ]
    assert runs_of(block.sweeps[0]) == [["a=1", "b={x:1,y:2}"], ["a=2", "b={x:1,y:2}"]]
    assert runs_of(["a=1e-4,null", "c=[[1,2]]", "d=x"])[1] == ["a=null", "c=[[1,2]]", "d=x"]
    assert "fig1_sort        fig1_sort        32 runs" in evidence.listing()
    assert evidence.commands()["fig1_sort_again"] == (
        "make evidence size=full block=fig1_sort_again && make evidence size=full block=fig1_sort_again_more"
    )


def run_of_20(tmp_path, arm, rewards, seed=10):
    """A run of 20 steps, with models of steps 4, 8, 12 and 16."""
    path = tmp_path / "fig1_sort" / f"{arm}-0123abcd" / f"seed{seed}"
    command = ["python", "-m", "experiments.train", "experiment=fig1_sort", f"arm={arm}", "optim.lr=1e-2",
               "snapshot_every=4", f"seed={seed}", f"output={tmp_path}"]  # fmt: skip
    config = {
        "arm": arm,
        "objective": {"name": "grpo"},
        "seed": seed,
        "steps": 20,
        "collapse": {"window": 2, "fraction": 0.5, "patience": 3},
    }
    with RunStore.open(path, config, {"command": command}) as store:
        for step, reward in enumerate(rewards, start=1):
            store.log("steps", {"step": step, "reward/mean": reward, "loss": 0.0, "grad_norm": 1.0})
        store.finish({})
    for folder in ("final", *(f"snapshots/step_{step}" for step in (4, 8, 12, 16))):
        (path / folder).mkdir(parents=True)
    return path


@pytest.fixture
def collapsed(tmp_path):
    return run_of_20(tmp_path, "grpo", [0.8] * 10 + [0.1] * 10)


@pytest.fixture
def healthy(tmp_path):
    return run_of_20(tmp_path, "grpo", [0.8] * 20, seed=11)


def test_a_run_that_two_arms_share_counts_once(tmp_path, collapsed, healthy):
    same = run_of_20(tmp_path, "grpo+replay", [0.8] * 10 + [0.1] * 10)
    other = run_of_20(tmp_path, "grpo+rollout_replay", [0.7] * 10 + [0.1] * 10)
    found = [[run.path for run, _ in kind] for kind in sources(tmp_path / "fig1_sort")]
    assert found == [[collapsed, other], [healthy]] and same.exists()


def test_recovery_starts_from_before_the_decline_and_from_the_collapse(tmp_path, collapsed, healthy):
    pair = (Run(collapsed), compact(Run(collapsed), "fig1_sort"))
    assert pair[1].collapse.step == 14  # the trailing mean is below half of 0.8 from step 12 on
    # at step 11 the mean of two steps is 0.45, below 0.9 * 0.8 for good: the model of step 8 is of before
    models = [collapsed / "snapshots" / f"step_{step}" for step in (8, 16)]
    assert starts(pair) == models
    assert continued(pair) == ["experiment=recovery", "arm=grpo", "optim.lr=1e-2", "seed=10"]
    other = (Run(healthy), compact(Run(healthy), "fig1_sort"))
    middle = [healthy / "snapshots" / "step_8", healthy / "final"]
    assert starts(other) == middle
    block = Block("r", "recovery", 1, from_suite="fig1_sort", at_most=3, treatments=([], ["seed=1{seed}"]))
    same, path = ["experiment=recovery", "arm=grpo", "optim.lr=1e-2"], "model.path={},{}".format
    assert list(block.commands(tmp_path)) == [
        [*same, "seed=10", path(*models), f"output={tmp_path}"],
        [*same, path(*models), "seed=110", f"output={tmp_path}"],
        [*same, "seed=11", path(*middle), f"output={tmp_path}"],
    ]
    assert list(block.commands(tmp_path / "none")) == []


def test_nothing_collapsed_leaves_nothing_to_compare_healthy_runs_with(tmp_path, healthy):
    block = Block("r", "recovery", 1, from_suite="fig1_sort", at_most=3, treatments=([],))
    assert healthy.exists() and list(block.commands(tmp_path)) == []


def test_a_block_stops_when_its_time_is_up(monkeypatch, capsys, tmp_path):
    ran = []
    clock = iter([0.0, 1.0, 2.0, evidence.LIMIT_S + 1])
    monkeypatch.setattr(evidence, "sweep", lambda entry, words: ran.append(words) or len(ran) == 1)
    monkeypatch.setattr(evidence.time, "monotonic", lambda: next(clock))
    block = Block("b", "search", 1, seeds=(0, 1, 2, 3, 4), sweeps=(["a=1"],))
    assert evidence.run_block(block, tmp_path, tmp_path / "tables") == 1  # of two sweeps one failed
    assert len(ran) == 2 and "time is up after 2 of 3 sweeps" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["size=big"], ["size=full", "block=none"], ["bild"], ["list", "size=full"], []]
)
def test_what_cannot_be_run_is_one_line(words):
    with pytest.raises(SystemExit, match=r"expected: python|block=none: search_optim"):
        evidence.main(words)


SMALL = ["model.config.num_hidden_layers=1", "model.config.hidden_size=32", "rollout.prompts=2",
         "rollout.responses=2", "evaluation.prompts=4", "cold_start.enabled=false", "task.min_length=2",
         "task.max_length=2", "rollout.max_new_tokens=3", "steps=1", "launcher=basic"]  # fmt: skip


def test_one_block_from_training_to_the_table(monkeypatch, tmp_path, capsys):
    """In this process, on a model of one layer; the same command again runs nothing."""
    sweep = ["experiment=search", "arm=grpo,grpo_replay", *SMALL]
    file = tmp_path / "evidence.yaml"
    file.write_text(
        yaml.safe_dump({"b": {"suite": "search", "minutes": 1, "quick_seeds": [0], "quick": [sweep]}})
    )
    monkeypatch.setattr(blocks, "BLOCKS", file)
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    assert evidence.main(["size=quick"]) == 0
    results = tmp_path / "outputs" / "evidence" / "quick" / "results"
    runs = read_all(results / "runs")
    assert [(run.arm, run.seed, len(run.steps)) for run in runs] == [("grpo", 0, 1), ("grpo+replay", 0, 1)]
    for run in runs:
        folder = (
            tmp_path / "outputs/evidence/quick/search" / f"{run.arm}-{run.header['config_hash']}" / "seed0"
        )
        steps = pd.DataFrame(map(json.loads, (folder / "steps.jsonl").read_text().splitlines()))
        assert run.steps["kl/k3"].tolist() == pytest.approx(steps["kl/k3"].tolist(), rel=1e-5)
        assert run.header["command"][3:5] == ["experiment=search", f"arm={run.arm.replace('+', '_')}"]
    (table,) = re.findall(r"^\| where routing.*$", (results / "claims.md").read_text(), re.MULTILINE)
    assert "in 1 regimes" in table and "no test of 1 pair: not tested" in table
    capsys.readouterr()
    shutil.rmtree(folder.parents[1])  # another machine: the tables are there, the run directories are not
    assert evidence.main(["size=quick"]) == 0
    assert "the tables of its runs are in" in capsys.readouterr().out and not folder.exists()
    (results / "runs" / "search" / f"{runs[0].id.removeprefix('search/')}.csv").unlink()
    assert evidence.main(["size=quick"]) == 0
    assert (folder / "DONE").exists()
    assert read_all(results / "runs")[0].steps["loss"].equals(runs[0].steps["loss"])
