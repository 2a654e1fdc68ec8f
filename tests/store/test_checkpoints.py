import os
from pathlib import Path

import pytest
import torch

from moe_rl.store import Run, RunStore

CONFIG = {"seed": 0}


def save(store: RunStore, step: int, value: float) -> None:
    store.save_checkpoint(
        step,
        {"weight": torch.full((2, 3), value)},
        {"weight.exp_avg": torch.tensor([value])},
        {"updates": 4 * step},
    )


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "checkpoints").iterdir())


def test_round_trip_keeps_dtypes_ties_and_state(tmp_path: Path) -> None:
    tied = torch.arange(6.0).view(2, 3)
    model = {"embed": tied, "head": tied, "transposed": tied.T, "half": torch.ones(2, dtype=torch.bfloat16)}
    optimizer = {"embed.exp_avg": torch.rand(2, 3), "step": torch.tensor(7)}
    with RunStore.open(tmp_path, CONFIG, {"python": ""}) as store:
        assert store.latest_checkpoint() is None
        store.save_checkpoint(20, model, optimizer, {"rng": [1, 2], "best": 0.25})
        checkpoint = store.latest_checkpoint()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.state) == (20, {"rng": [1, 2], "best": 0.25})
    assert checkpoint.path == tmp_path / "checkpoints" / "step-00000020"
    for saved, loaded in ((model, checkpoint.model()), (optimizer, checkpoint.optimizer())):
        assert saved.keys() == loaded.keys()
        for name in saved:
            assert loaded[name].dtype == saved[name].dtype
            assert torch.equal(loaded[name], saved[name]), name


def test_the_last_two_stay(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, CONFIG, {"python": ""}) as store:
        for step in (10, 20, 30):
            save(store, step, float(step))
    assert names(tmp_path) == ["step-00000020", "step-00000030"]


def test_a_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, CONFIG, {"python": ""}) as store:
        save(store, 10, 1.0)
        save(store, 10, 2.0)
        checkpoint = store.latest_checkpoint()
    assert checkpoint is not None and checkpoint.model()["weight"][0, 0] == 2.0


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "state"])
def test_a_damaged_checkpoint_is_reported_and_passed_over(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunStore.open(tmp_path, CONFIG, {"python": ""}) as store:
        save(store, 10, 1.0)
        save(store, 20, 2.0)
        newest = tmp_path / "checkpoints" / "step-00000020"
        tensors = newest / "optimizer.safetensors"
        content = bytearray(tensors.read_bytes())
        if damage == "flip":
            content[-1] ^= 1
            tensors.write_bytes(content)
        elif damage == "truncate":
            os.truncate(tensors, len(content) // 2)
        elif damage == "remove":
            tensors.unlink()
        else:
            (newest / "state.json").write_text('{"step": 20, "sha')
        checkpoint = store.latest_checkpoint()
    assert checkpoint is not None and checkpoint.step == 10 and checkpoint.state == {"updates": 40}
    assert "checkpoint of step 20 passed over" in capsys.readouterr().err
    (event,) = Run(tmp_path).events()
    assert (event["event"], event["step"]) == ("damaged_checkpoint", 20)


def test_a_kill_while_saving_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with RunStore.open(tmp_path, CONFIG, {"python": ""}) as store:
        save(store, 10, 1.0)
        monkeypatch.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save(store, 20, 2.0)
        monkeypatch.undo()
        checkpoint = store.latest_checkpoint()
        assert checkpoint is not None and checkpoint.step == 10
    assert names(tmp_path) == [".step-00000020.tmp", "step-00000010"]
    with RunStore.open(tmp_path, CONFIG, {"python": ""}):
        assert names(tmp_path) == ["step-00000010"]
