import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl.store import Run, RunStore, StoreError, environment, find_runs


def make(path: Path, **config: object) -> Path:
    with RunStore.open(path, {"seed": 0, **config}, {"python": ""}):
        pass
    return path


def test_frames_keep_lists_and_ignore_a_torn_line(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, {"seed": 0}, {"python": ""}) as store:
        store.log("steps", {"step": 1, "reward/mean": 0.5, "drift/old_by_layer": [0.1, 0.2]})
        store.log("steps", {"step": 2, "reward/mean": float("nan"), "drift/old_by_layer": [0.3, 0.4]})
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"step": 3, "reward/m')
    steps = Run(tmp_path).steps()
    assert steps["step"].tolist() == [1, 2] and steps["step"].dtype == "int64"
    assert steps["drift/old_by_layer"].tolist() == [[0.1, 0.2], [0.3, 0.4]]
    assert steps["reward/mean"].isna().tolist() == [False, True]
    assert Run(tmp_path).updates().empty


def test_damage_inside_a_file_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "steps.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(StoreError, match=r"steps\.jsonl, line 2: expected a JSON object"):
        Run(tmp_path).steps()


def test_arm_falls_back_to_objective_and_replay(tmp_path: Path) -> None:
    assert Run(make(tmp_path / "a", arm="mine", objective={"name": "grpo"})).arm == "mine"
    replayed = make(tmp_path / "b", objective={"name": "grpo"}, replay={"source": "old_policy"})
    assert Run(replayed).arm == "grpo+replay"
    assert Run(make(tmp_path / "c", objective={"name": "gspo"}, replay={"source": None})).arm == "gspo"


def test_find_runs_skips_launcher_folders_and_doubles(tmp_path: Path) -> None:
    first, second = make(tmp_path / "b" / "seed0"), make(tmp_path / "a")
    hydra = first / ".hydra"
    hydra.mkdir()
    (hydra / "config.yaml").write_text("seed: 0\n")
    runs = find_runs(tmp_path, first, tmp_path / "b" / ".." / "a")
    assert sorted(run.path.resolve() for run in runs) == [second, first]


def test_find_runs_says_when_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="found none"):
        find_runs(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="expected a run directory"):
        Run(tmp_path)


def test_environment_records_versions_threads_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    record = environment()
    assert record["torch_threads"] == 3
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(record["versions"]) == {"moe_rl", "torch", "transformers", "safetensors", "numpy"}
    if record["git_commit"] is not None:
        assert len(record["git_commit"]) == 40 and isinstance(record["git_dirty"], bool)


def test_reading_and_writing_metrics_does_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from moe_rl.store import RunStore, Run\n"
        "with RunStore.open(sys.argv[1], {'seed': 0}) as store: store.log('steps', {'step': 1})\n"
        "assert len(Run(sys.argv[1]).steps()) == 1\n"
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
