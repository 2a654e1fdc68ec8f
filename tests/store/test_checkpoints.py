import hashlib
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


def damage(checkpoint: Path, how: str) -> None:
    tensors, state = checkpoint / "optimizer.safetensors", checkpoint / "state.json"
    if how == "flipped byte of tensors":
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(content)
    elif how == "truncated tensors":
        os.truncate(tensors, tensors.stat().st_size // 2)
    elif how == "empty tensors":
        os.truncate(tensors, 0)
    elif how == "tensors missing":
        tensors.unlink()
    elif how == "a directory for tensors":
        tensors.unlink()
        tensors.mkdir()
    elif how == "flipped byte of the state":  # still JSON: step 20 would be taken for step 24
        state.write_text(state.read_text().replace('"step": 20', '"step": 24'))
    elif how == "truncated state":
        state.write_text('{"step": 20, "sta')
    elif how == "state missing":
        state.unlink()
    elif how == "sums missing":
        (checkpoint / "SHA256SUMS").unlink()
    else:
        assert how == "empty sums"
        os.truncate(checkpoint / "SHA256SUMS", 0)


DAMAGES = [
    "flipped byte of tensors",
    "truncated tensors",
    "empty tensors",
    "tensors missing",
    "a directory for tensors",
    "flipped byte of the state",
    "truncated state",
    "state missing",
    "sums missing",
    "empty sums",
]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_passed_over(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunStore.open(tmp_path, CONFIG, {"python": ""}) as store:
        save(store, 10, 1.0)
        save(store, 20, 2.0)
        damage(tmp_path / "checkpoints" / "step-00000020", how)
        checkpoint = store.latest_checkpoint()
        assert checkpoint is not None and checkpoint.step == 10 and checkpoint.state == {"updates": 40}
        assert "checkpoint of step 20 passed over" in capsys.readouterr().err
        (event,) = Run(tmp_path).events()
        assert (event["event"], event["step"]) == ("damaged_checkpoint", 20)

        damage(tmp_path / "checkpoints" / "step-00000010", "truncated tensors")
        assert store.latest_checkpoint() is None
        assert "no good checkpoint is left, the run starts over" in capsys.readouterr().err
        assert [event["event"] for event in Run(tmp_path).events()[1:]] == [
            "damaged_checkpoint",
            "damaged_checkpoint",
            "started_over",
        ]


def test_sums_are_those_of_the_sha256sum_command(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, CONFIG, {"python": ""}) as store:
        save(store, 10, 1.0)
    for line in (tmp_path / "checkpoints" / "step-00000010" / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        content = (tmp_path / "checkpoints" / "step-00000010" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
