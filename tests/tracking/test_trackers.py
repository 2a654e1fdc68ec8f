"""What the trackers' own files hold after an interruption or a kill, compared with the store."""

import json
import os
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

from moe_rl.store import Run
from moe_rl.tracking.rows import stored_rows


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No account, no network, nothing outside the test's folder."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    found = pytest.importorskip("trackio", reason="the extra trackio is not installed")
    from trackio import sqlite_storage, utils

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which trackio reads when it is imported
    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    return found


def tensorboard_rows(path):
    """{step: {tag: value}} as TensorBoard shows a run directory; a step that is there twice fails."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tracking"), size_guidance={"scalars": 0})
    events.Reload()
    rows = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            row = rows.setdefault(event.step, {})
            assert tag not in row, f"{tag} twice at step {event.step}"
            row[tag] = event.value
    text = events.Tensors("config/text_summary")[-1]
    return rows, text.tensor_proto.string_val[0].decode()


def wandb_records(path):
    """The records of an offline run: LevelDB's log format behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def wandb_rows(path):
    """Rows, the run's record and the exit code of an offline run's file."""
    rows, run, code = {}, None, None
    for record in wandb_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            step = items["_step"]
            assert step not in rows, f"step {step} twice"
            rows[step] = {key: value for key, value in items.items() if not key.startswith("_")}
        elif kind == "run":
            run = record.run
        elif kind == "exit":
            code = record.exit.exit_code
    return rows, run, code


def trackio_rows(name):
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("moe_rl", name)
    steps = [log["step"] for log in logs]
    assert len(set(steps)) == len(steps), f"a step twice: {steps}"
    return {log.pop("step"): {k: v for k, v in log.items() if k != "timestamp"} for log in logs}


def test_tensorboard(example):
    """Interrupted after step 5, which the checkpoint of step 2 takes back; the second try finishes."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    example.interrupted("tensorboard", 1, 5)
    rows, config = tensorboard_rows(example.path)
    assert sorted(rows) == [0, 1, 2, 3, 4]
    assert "lr: 0.001" in config and "arm: grpo+replay" in config
    example.finished("tensorboard", 3, 6)
    rows, _ = tensorboard_rows(example.path)
    single = {s: {k: np.float32(v) for k, v in row.items()} for s, row in stored_rows(example.path).items()}
    np.testing.assert_equal(rows, single)
    assert sorted(rows) == list(range(7))


def test_tensorboard_whose_folder_cannot_be_made(example, capsys):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    example.path.mkdir(parents=True)
    (example.path / "tracking").write_text("in the way")
    example.finished("tensorboard", 1, 2)
    assert Run(example.path).status == "done"
    assert capsys.readouterr().err.count("tracking=tensorboard stopped: ") == 1


def test_wandb_offline(example):
    """The later of two offline runs holds everything, under the id and the name of the first."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    example.interrupted("wandb", 1, 3, mode="offline")
    (first,) = (example.path / "tracking").glob("wandb/offline-run-*/run-*.wandb")
    rows, run, code = wandb_rows(first)
    assert (sorted(rows), code) == ([0, 1, 2], 1)
    first.parent.rename(first.parent.with_name("first"))  # two within a second have one name
    example.finished("wandb", 3, 4, mode="offline")
    (later,) = (example.path / "tracking").glob("wandb/offline-run-*/run-*.wandb")
    rows, again, code = wandb_rows(later)
    np.testing.assert_equal(rows, stored_rows(example.path))
    assert (sorted(rows), code) == ([0, 1, 2, 3, 4], 0)
    assert again.run_id == run.run_id == (example.path / "tracking" / "id").read_text().strip()
    named = (again.display_name, again.run_group, again.job_type, again.project)
    assert named == ("grpo+replay seed 3", "grpo+replay-1a2b3c4d", "exp", "moe_rl")
    config = {item.key: json.loads(item.value_json) for item in again.config.update}
    assert config["optim"] == {"lr": 1e-3}


def test_wandb_without_a_network(example, monkeypatch, capsys):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr("moe_rl.tracking.wandb.CONNECT_S", 1.0)
    example.finished("wandb", 1, 2, mode="online")
    assert Run(example.path).status == "done"
    assert capsys.readouterr().err.count("tracking=wandb stopped: ") == 1


def test_trackio(example, trackio):
    """Interrupted at step 5 it holds steps 0 to 4; resumed from step 2, steps 3 and 4 are not sent again."""
    example.interrupted("trackio", 1, 5)
    name = "grpo+replay seed 3 " + (example.path / "tracking" / "id").read_text().strip()
    assert sorted(trackio_rows(name)) == [0, 1, 2, 3, 4]
    example.finished("trackio", 3, 6)
    rows = trackio_rows(name)
    np.testing.assert_equal(rows, stored_rows(example.path))
    assert sorted(rows) == list(range(7))
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("moe_rl") == [name]
    config = SQLiteStorage.get_run_config("moe_rl", name)
    assert (config["_Group"], config["optim"]) == ("grpo+replay-1a2b3c4d", {"lr": 1e-3})


KILLED = """
import os, sys
from pathlib import Path
from moe_rl.store import RunStore
from moe_rl.tracking import Tracking, get_tracker
name, path, options = sys.argv[1], Path(sys.argv[2]), eval(sys.argv[3])
config = {"experiment": "exp", "arm": "grpo+replay", "seed": 3, "optim": {"lr": 1e-3}}
store = RunStore.open(path, config, {"started": "now"})
store.follow(Tracking(store, get_tracker(name, **options), name))
store.rewind(-1)
for step in range(4):
    store.log("steps", {"step": step, "reward/mean": 0.5, "loss": 1.0, "grad_norm": 1.0})
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_kill_9(example, name, request):
    """Whatever a killed process had not handed over is sent by the next one."""
    pytest.importorskip(name, reason=f"the extra {name} is not installed")
    if name == "trackio":
        request.getfixturevalue("trackio")
    options = {"mode": "offline"} if name == "wandb" else {}
    example.path.mkdir(parents=True)
    script = [sys.executable, "-c", KILLED, name, str(example.path), repr(options)]
    environment = {
        key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"
    }  # one of its own
    assert subprocess.run(script, check=False, env=environment).returncode == -9
    time.sleep(1.1)  # TensorBoard and wandb tell files apart by the second
    example.finished(name, 3, 4, **options)
    if name == "tensorboard":
        rows, _ = tensorboard_rows(example.path)
    elif name == "wandb":
        later = max((example.path / "tracking").glob("wandb/offline-run-*/run-*.wandb"))
        rows, _, _ = wandb_rows(later)
    else:
        rows = trackio_rows("grpo+replay seed 3 " + (example.path / "tracking" / "id").read_text().strip())
    assert sorted(rows) == [0, 1, 2, 3, 4]
    assert [rows[step]["reward/mean"] for step in (1, 3, 4)] == [0.5, pytest.approx(1 / 3), 0.25]
