"""kill -9 at random moments, and at every moment that matters: the same command then gives the same run."""

import random
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from moe_rl.store import Run
from moe_rl.store.whole import verify

KILLED = -signal.SIGKILL
STEPS = 3
RESUME_SECONDS = 0.02  # of a resume that has a checkpoint to read; the uninterrupted run has none


def moment(rng: random.Random, phase: str, phases: list[list[Any]], steps: int) -> dict[str, Any]:
    """A random moment of a random occurrence of a phase within the next steps."""
    seconds = [taken for name, _, _, taken in phases if name == phase]
    occurrence = rng.randint(1, max(1, len(seconds) * steps // STEPS))
    duration = max(seconds) if phase != "resume" else RESUME_SECONDS
    return {"phase": phase, "occurrence": occurrence, "delay": rng.uniform(0, duration)}


def kill_through(lives, seed, small_run, whole, results, nothing_torn, tmp_path) -> Counter:
    """Kill a run at each place of a life, one after the other in one directory, then let it end.

    A place is the name of a phase, or the pattern of a file in the middle of whose writing it dies.
    """
    rng = random.Random(seed)
    phases = {phase[0] for phase in whole.ended.phases}
    kills: Counter[str] = Counter()
    for number, life in enumerate(lives):
        output = tmp_path / f"life{number}"
        for left, place in zip(reversed(range(len(life))), life, strict=True):
            if place in phases:
                saved = [int(path.name[5:]) for path in output.glob("single/*/*/checkpoints/step-*")]
                steps = STEPS - max(saved, default=0) - left  # each later place may need a step of its own
                kill = moment(rng, place, whole.ended.phases, steps)
                ended = small_run(output, kill=kill)
                assert ended.killed_in == place, (kill, ended)
            else:
                ended = small_run(output, crash={"at": place, "below": str(output), "torn": True})
            assert ended.code == KILLED, ended
            kills[place] += 1
            nothing_torn(output)
        ended = small_run(output)
        assert ended.code == 0, ended.err
        nothing_torn(output)
        assert results(output) == whole.results, f"life {number}: {life}"
        assert not leftovers(output)
    return kills


def leftovers(output: Path) -> list[Path]:
    return [path for path in output.rglob(".*") if path.name.endswith((".tmp", ".replaced"))]


def kill_reports(times, seed, small_run, nothing_torn, output) -> Counter:
    """Kill reports of one run, then compare with an uninterrupted one."""
    rng = random.Random(seed)
    kills: Counter[str] = Counter()
    plain = small_run.report(output)
    assert plain.code == 0, plain.err
    ((_, _, _, seconds),) = plain.phases
    expected = report_files(output)
    shutil.rmtree(output / "report")
    for _ in range(times):
        kill = {"phase": "report", "occurrence": 1, "delay": rng.uniform(0, seconds)}
        ended = small_run.report(output, kill=kill)
        assert ended.code == KILLED and ended.killed_in == "report"
        kills["report"] += 1
        nothing_torn(output)
        for name, content in report_files(output).items():
            assert content == expected[name], f"{name} is neither absent nor whole"
    assert small_run.report(output).code == 0
    assert report_files(output) == expected
    assert not list(output.glob("report/**/.*.tmp"))
    return kills


def report_files(output: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in (output / "report").rglob("[!.]*")
        if path.is_file()
    }


def test_kills_all_the_way_through_one_run(small_run, whole, results, nothing_torn, tmp_path):
    life = [
        r"\.content\.txt\.tmp",
        r"cold_starts/\..*/SHA256SUMS",
        "cold_start",  # after it the file above may be there already
        "rollout",
        "checkpoint",
        "update",
        "resume",
        r"steps\.jsonl$",
        r"\.final\.tmp/.*config\.json",
        r"\.DONE\.tmp",
    ]
    kills = kill_through([life], 0, small_run, whole, results, nothing_torn, tmp_path)
    assert kills == dict.fromkeys(life, 1)


@pytest.mark.slow
def test_kills_at_random_moments(
    small_run, whole, results, nothing_torn, tmp_path, capsys: pytest.CaptureFixture[str]
):
    rng = random.Random(1)
    lives = []
    for other in ("old_policy", "drift", "evaluate", None, None):
        rest = ["rollout", "update", "checkpoint", "resume"]
        rng.shuffle(rest)
        lives.append(["cold_start", *rest])
        if other:
            lives[-1].insert(rng.randint(1, 5), other)
    kills = kill_through(lives, 2, small_run, whole, results, nothing_torn, tmp_path)
    kills += kill_reports(4, 3, small_run, nothing_torn, tmp_path / "life0")
    with capsys.disabled():
        print(f"\n{kills.total()} kills, all resumed to the identical run:", dict(sorted(kills.items())))
    assert kills.total() == 32
    assert min(kills[phase] for phase in ("cold_start", "rollout", "update", "checkpoint", "resume")) == 5
    assert kills["report"] == 4


@pytest.mark.slow
def test_a_kill_at_every_file_operation_of_a_run(
    small_run, whole, results, nothing_torn, tmp_path, capsys: pytest.CaptureFixture[str]
):
    for at in range(1, len(whole.ended.operations) + 1):
        output = tmp_path / str(at)
        ended = small_run(output, crash={"at": at, "below": str(output), "torn": True})
        assert ended.code == KILLED, ended.err
        nothing_torn(output)
        ended = small_run(output)
        assert ended.code == 0, ended.err
        assert results(output) == whole.results, whole.ended.operations[at - 1]
        assert not leftovers(output)
        shutil.rmtree(output)
    with capsys.disabled():
        print(f"\n{len(whole.ended.operations)} kills, one at every file operation of a run")


# A run without a model has the same files and takes milliseconds.


def store_results(path: Path) -> tuple[Any, ...]:
    run = Run(path)
    names = sorted(entry.name for entry in path.iterdir() if entry.name not in ("events.jsonl", "run.lock"))
    checkpoints = {
        file.relative_to(path): file.read_bytes() for file in path.glob("checkpoints/**/*") if file.is_file()
    }
    streams = [run.steps().to_dict("records"), run.updates().to_dict("records")]
    return names, run.summary, streams, checkpoints


@pytest.mark.parametrize(
    "start", ["fresh", pytest.param("failed with a damaged checkpoint", marks=pytest.mark.slow)]
)
def test_a_kill_at_every_file_operation_of_the_store(warm, tmp_path, start):
    template, plain = tmp_path / "template", tmp_path / "plain"
    if start == "fresh":
        template.mkdir()
    else:
        assert warm(["store", str(template), "0"]).code == 0
        (template / "DONE").rename(template / "FAILED")
        damaged = template / "checkpoints" / "step-00000004" / "model.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    shutil.copytree(template, plain)
    whole = warm(["store", str(plain), "0"], crash={"at": 0, "below": str(plain)})
    assert whole.code == 0, whole.err
    expected = store_results(plain)
    assert expected[1] == {"weight": [58.0, 58.0]}  # ((1·3 + 2)·3 + 3)·3 + 4
    for at in range(1, len(whole.operations) + 1):
        path = tmp_path / str(at)
        shutil.copytree(template, path)
        ended = warm(["store", str(path), "0"], crash={"at": at, "below": str(path), "torn": True})
        assert ended.code == KILLED
        for checkpoint in path.glob("checkpoints/step-*"):
            if start == "fresh":
                verify(checkpoint, ("model.safetensors", "optimizer.safetensors", "state.json"))
        ended = warm(["store", str(path), "0"])
        assert ended.code == 0, ended.err
        assert store_results(path) == expected, whole.operations[at - 1]


def test_a_kill_while_failed_is_written(warm, tmp_path):
    """The failure may be lost to a kill, the run never is."""
    failing = ["store", str(tmp_path / "run"), "4"]
    plain = warm(failing)
    assert plain.code == 1 and Run(tmp_path / "run").failure.endswith("ArithmeticError: planted\n")
    for number, (at, torn) in enumerate([(r"FAILED", True), (r"FAILED", False), ("run.pid$", False)]):
        path = tmp_path / str(number)
        ended = warm(["store", str(path), "4"], crash={"at": at, "below": str(path), "torn": torn})
        assert ended.code == KILLED
        assert Run(path).status == ("failed" if at == "run.pid$" else "unfinished")
        assert warm(["store", str(path), "0"]).code == 0
        assert Run(path).summary == {"weight": [58.0, 58.0]}
