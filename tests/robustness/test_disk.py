"""Full disks and folders that cannot be written: one clear line, and nothing that was good is lost."""

import errno
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_rl.store import Run, RunStore, StoreError
from moe_rl.store.checkpoints import load_checkpoint

FULL = r"cannot be written \(No space left on device\): free space there and give the same command again"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def failure(ended) -> str:
    """The one line that says what went wrong."""
    assert ended.code == 1, (ended.out, ended.err)
    assert "Traceback" not in ended.err
    (line,) = [line for line in ended.err.splitlines() if "failed: " in line]
    return line


@pytest.mark.parametrize(
    ("at", "leave", "path", "last_good"),
    [
        (r"evals\.jsonl", 0, r"seed0/evals\.jsonl", None),  # the first metric line
        pytest.param(r"cold_starts/\..*/model", 8192, r"cold_starts/\w+", None, marks=pytest.mark.slow),
        (r"\.step-00000002\.tmp/optimizer", 16384, r"seed0/checkpoints/step-00000002", 1),
        pytest.param(r"\.final\.tmp/.*config\.json", 0, r"seed0/final", 3, marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_fills_up(small_run, whole, results, nothing_torn, disk, at, leave, path, last_good):
    output, ballast = disk / "output", disk / "ballast"
    ended = small_run(output, fill={"at": at, "below": str(output), "ballast": str(ballast), "leave": leave})
    assert ballast.exists()
    assert re.search(rf"failed: \S*/{path} {FULL}$", failure(ended)), failure(ended)
    nothing_torn(output)
    run = Run(small_run.directory(output))
    assert run.status in ("failed", "unfinished")  # FAILED too needs space
    saved = sorted((run.path / "checkpoints").glob("step-*"))
    assert [load_checkpoint(checkpoint).step for checkpoint in saved][-1:] == [last_good] * bool(last_good)

    again = small_run(output)  # no space was freed: the same line
    assert re.search(FULL, failure(again))
    ballast.unlink()
    ended = small_run(output)
    assert ended.code == 0, ended.err
    assert results(output) == whole.results


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free))
    return ballast


def test_a_metric_line_cut_by_a_full_disk(disk):
    """The last page of the file still takes the beginning of a record."""
    path = disk / "run"
    with RunStore.open(path, {"seed": 0}, {"python": ""}) as store:
        store.log("steps", {"step": 1, "pad": "x" * 3900})
        ballast = fill(disk)
        with pytest.raises(StoreError, match=rf"steps\.jsonl {FULL}"):
            store.log("steps", {"step": 2, "pad": "y" * 500})
        assert (path / "steps.jsonl").stat().st_size == 4096
        assert Run(path).steps()["step"].tolist() == [1]
        ballast.unlink()
    with RunStore.open(path, {"seed": 0}, {"python": ""}) as store:
        store.log("steps", {"step": 2})
    assert Run(path).steps()["step"].tolist() == [1, 2]


def test_a_file_size_limit(small_run, whole, results, nothing_torn, tmp_path):
    """As a quota would: needs no privileges."""
    assert small_run(tmp_path, kill={"phase": "rollout", "occurrence": 1, "delay": 0}).code == -signal.SIGKILL
    line = failure(small_run(tmp_path, limit=60_000))
    assert re.search(
        r"failed: \S*/checkpoints/step-00000001 cannot be written \(File too large\): free", line
    )
    run = Run(small_run.directory(tmp_path))
    assert run.failure.splitlines()[-1].endswith("give the same command again")
    nothing_torn(tmp_path)
    assert small_run(tmp_path).code == 0
    assert results(tmp_path) == whole.results


@pytest.fixture
def read_only(request: pytest.FixtureRequest, disk: Path):
    """Makes the small file system read-only, and writable again."""

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)

    yield remount
    remount("rw")


@pytest.mark.slow
def test_a_read_only_file_system(small_run, whole, results, disk, read_only):
    output = disk / "output"
    assert small_run(output, kill={"phase": "checkpoint", "occurrence": 2, "delay": 1}).code < 0
    read_only("ro")
    ended = small_run(output)
    assert re.search(
        r"failed: \S*output cannot be written \(Read-only file system\): make it wr", failure(ended)
    )
    assert ended.phases == [], "nothing was computed"
    new = small_run(disk / "other")
    assert re.search(r"failed: \S*other cannot be written \(Read-only file system\)", failure(new))
    assert new.phases == []
    read_only("rw")
    assert small_run(output).code == 0
    assert results(output) == whole.results


def test_a_run_directory_without_write_permission(small_run, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root writes whatever the permissions say")
    assert small_run(tmp_path, kill={"phase": "checkpoint", "occurrence": 1, "delay": 1}).code < 0
    directory = small_run.directory(tmp_path)
    directory.chmod(0o555)
    try:
        ended = small_run(tmp_path)
    finally:
        directory.chmod(0o755)
    assert re.search(r"failed: \S*seed0 cannot be written \(Permission denied\)", failure(ended))
    assert ended.phases == [], "nothing was computed"


@pytest.mark.parametrize("name", [".steps.jsonl.tmp", "FAILED"])
def test_what_an_earlier_try_left_and_cannot_be_removed(tmp_path, monkeypatch, name):
    with RunStore.open(tmp_path, {"seed": 0}, {"python": ""}):
        pass
    (tmp_path / name).write_text("planted")
    unlink = Path.unlink

    def refused(path: Path, **options: bool) -> None:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refused)
    message = rf"{re.escape(name)} cannot be written \(Permission denied\): make it writable"
    with pytest.raises(StoreError, match=message):
        RunStore.open(tmp_path, {"seed": 0}, {"python": ""})


def test_the_first_error_is_not_lost_behind_a_failed_that_cannot_be_written(disk):
    with (
        pytest.raises(ArithmeticError, match="planted") as caught,
        RunStore.open(disk / "run", {"seed": 0}, {"python": ""}),
    ):
        fill(disk)
        raise ArithmeticError("planted")
    (note,) = caught.value.__notes__
    assert re.search(r"run/FAILED cannot be written \(No space left on device\)", note)
    assert Run(disk / "run").status == "unfinished"
    assert not (disk / "run" / "run.pid").exists()
