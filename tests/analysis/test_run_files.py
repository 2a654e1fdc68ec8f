from pathlib import Path

import pytest

from experiments.config import digest
from moe_rl.analysis.run_files import compact, config_hash, export, read_all, read_compact, write_compact
from moe_rl.store import RunStore, StoreError


def test_a_finished_run_survives_the_way_through_its_file(make_run, tmp_path: Path) -> None:
    rewards = (0.5, 0.6, 1 / 3, *(0.7,) * 17)
    run = make_run("a", seed=3, rewards=rewards, clip=0.25, rollout={"prompts": 4, "responses": 2})
    path = write_compact(compact(run, "fig1"), tmp_path / "out")
    found = read_compact(path)
    assert path == tmp_path / "out" / "fig1" / f"grpo-{config_hash(run.config)}-seed3.csv"
    assert (found.id, found.arm, found.seed) == (f"fig1/{path.stem}", "grpo", 3)
    assert found.config == run.config and found.collapse.censored_at == 20
    assert found.steps["reward/mean"].tolist() == pytest.approx(list(rewards), rel=1e-5)
    assert found.evaluations("eval/greedy").values.tolist() == [[0, 0.25], [20, 0.75]]
    assert found.evaluations("eval/other").empty
    # 20 tokens a response, 4 x 2 responses; a quarter of them clipped in every other step
    assert found.steps["tokens/trained"].tolist() == [160] * 20
    assert found.steps["tokens/unclipped"].tolist() == [120, 160] * 10
    assert path.stat().st_size < 8_000


def test_the_hash_is_that_of_the_run_directory(make_run) -> None:
    config = make_run("a").config
    assert config_hash(config) == digest({key: value for key, value in config.items() if key != "seed"})
    assert config_hash(config | {"seed": 9}) == config_hash(config)


def test_epochs_train_on_every_token_again(make_run) -> None:
    run = make_run("a", rollout={"prompts": 4, "responses": 2}, optim={"epochs": 3})
    assert compact(run, "x").steps["tokens/trained"].tolist() == [480] * 20


def test_only_what_has_ended_is_exported(make_run, tmp_path: Path) -> None:
    done, running = make_run("done"), make_run("running", seed=1, finish=False)
    broken = make_run("broken", seed=2, finish=False)
    (broken.path / "FAILED").write_text("disk full\n\ntraceback")
    collapsed = make_run("collapsed", seed=4, finish=False)
    with RunStore.open(collapsed.path, collapsed.config) as store:
        store.event("collapsed", step=20, reason="non-finite loss")
        store.fail("collapsed: step 20, update 1: loss nan\n\ntraceback")
    paths = export([done, running, broken, collapsed], "s", tmp_path / "out")
    found = {run.seed: run for run in read_all(tmp_path / "out")}
    assert len(paths) == 2 and found.keys() == {0, 4}
    assert found[4].header["status"] == "collapsed" and found[4].collapse.step == 20


@pytest.mark.parametrize("content", ["", "# {}\nstep\n1\n", "step,reward/mean\n1,2\n", "# [1]\n\n"])
def test_another_file_is_one_clear_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "s" / "a.csv"
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(StoreError, match=r"a\.csv is no table of a run"):
        read_compact(file)


def test_a_file_in_the_place_of_another_is_refused(make_run, tmp_path: Path) -> None:
    path = write_compact(compact(make_run("a"), "fig1"), tmp_path)
    moved = path.with_name(path.name.replace("seed0", "seed1"))
    path.rename(moved)
    with pytest.raises(StoreError, match="it says that it is fig1/grpo-"):
        read_compact(moved)


def test_options_that_a_table_is_older_than_have_their_defaults(make_run, tmp_path: Path) -> None:
    export([make_run("a", optim={"lr": 1e-4}), make_run("b", seed=1)], "s", tmp_path)
    defaults = {"optim": {"lr": 1.0, "epochs": 1}, "precision": "float32"}
    old, plain = read_all(tmp_path, defaults)
    assert old.config["optim"] == {"lr": 1e-4, "epochs": 1}
    assert plain.config["precision"] == "float32"
    assert "precision" not in read_all(tmp_path)[0].config


def test_runs_of_a_seed_start_from_one_cold_start(make_run, tmp_path: Path) -> None:
    """Two machines' arms are no pair; another seed, another model, or a table that does not say are."""
    out = tmp_path / "out"

    def add(name: str, weights: str | None, **options) -> None:
        summary = {} if weights is None else {"starting_weights": weights}
        export([make_run(name, summary=summary, **options)], "s", out)

    add("a", "one")
    add("b", "one", arm="gspo")
    add("c", "two", seed=1)
    add("d", "three", model={"name": "dense"})
    add("e", None, arm="ppo")
    assert len(read_all(out)) == 5
    add("f", "two", arm="dpo")
    with pytest.raises(StoreError, match=r"s/dpo-\w+-seed0 and s/grpo-\w+-seed0 would be paired, but their"):
        read_all(out)
