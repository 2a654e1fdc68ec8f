import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_rl.store import Run, RunStore, StoreError

CONFIG = {"arm": "grpo", "seed": 3, "optim": {"lr": 3e-4, "minibatches": 4}, "steps": 80}
ENVIRONMENT = {"python": "3.11"}


def open_store(path: Path, config: dict | None = None) -> RunStore:
    return RunStore.open(path, config or CONFIG, ENVIRONMENT)


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


def test_open_writes_config_and_environment(tmp_path: Path) -> None:
    with open_store(tmp_path / "run"):
        pass
    run = Run(tmp_path / "run")
    assert run.config == CONFIG
    assert run.environment == ENVIRONMENT
    assert not (tmp_path / "run" / "run.pid").exists()


def test_log_keeps_non_finite_numbers_and_takes_tensors(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.log("steps", {"step": 1, "loss": math.nan, "grad_norm": math.inf})
        store.log(
            "steps", {"step": 2, "loss": torch.tensor(0.5), "drift/old_by_layer": torch.tensor([0.25, 1.0])}
        )
    assert (tmp_path / "steps.jsonl").read_text().splitlines() == [
        '{"step": 1, "loss": NaN, "grad_norm": Infinity}',
        '{"step": 2, "loss": 0.5, "drift/old_by_layer": [0.25, 1.0]}',
    ]


def test_log_rejects_unknown_streams_and_values(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(
            StoreError, match="expected a stream of steps, updates, evals, events, got 'stepz'"
        ):
            store.log("stepz", {"step": 1})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="got object"):
            store.log("steps", {"step": object()})
    assert not (tmp_path / "steps.jsonl").exists()


def test_second_process_is_refused_and_told_the_holder(tmp_path: Path) -> None:
    holder = python(
        "import sys; from moe_rl.store import RunStore\n"
        "with RunStore.open(sys.argv[1], {'seed': 3}, {'python': ''}):\n"
        "    print('held', flush=True); sys.stdin.read()",
        str(tmp_path),
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(StoreError, match=rf"is in use by another process \(pid {holder.pid}\)"):
        open_store(tmp_path, {"seed": 3})
    holder.communicate()
    with open_store(tmp_path, {"seed": 3}):  # released: the refusal left nothing behind
        assert (tmp_path / "run.pid").read_text() == f"{os.getpid()}\n"


def test_killed_process_leaves_a_readable_run_and_no_lock(tmp_path: Path) -> None:
    writer = python(
        "import sys; from moe_rl.store import RunStore\n"
        "store = RunStore.open(sys.argv[1], {'seed': 3}, {'python': ''})\n"
        "for step in range(1, 10**9):\n"
        "    store.log('steps', {'step': step, 'pad': 'x' * 200})\n"
        "    if step == 100: print('running', flush=True)",
        str(tmp_path),
    )
    assert writer.stdout is not None and writer.stdout.readline() == "running\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    run = Run(tmp_path)
    assert run.status == "unfinished"
    steps = run.steps()["step"].tolist()
    assert len(steps) >= 100 and steps == list(range(1, len(steps) + 1))
    with open_store(tmp_path, {"seed": 3}) as store:
        store.rewind(50)
    assert run.steps()["step"].tolist() == list(range(1, 51))


def test_reopening_with_another_config_shows_the_differing_keys(tmp_path: Path) -> None:
    with open_store(tmp_path):
        pass
    other = {**CONFIG, "optim": {"lr": 1e-3, "minibatches": 4}, "collapse": {"window": 5}}
    with pytest.raises(StoreError) as error:
        open_store(tmp_path, other)
    assert "optim.lr: stored 0.0003, given 0.001" in str(error.value)
    assert "collapse.window: stored absent, given 5" in str(error.value)
    assert "minibatches" not in str(error.value)
    with open_store(tmp_path):  # the refusal released the lock
        pass


def test_tuples_in_a_config_compare_equal_after_reopening(tmp_path: Path) -> None:
    for _ in range(2):
        with open_store(tmp_path, {"lengths": (2, 20)}):
            pass
    assert Run(tmp_path).config == {"lengths": [2, 20]}


def test_config_of_objects_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="expected a config of plain values"):
        open_store(tmp_path, {"path": object()})


def test_reopening_cuts_a_torn_line_before_appending(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.log("steps", {"step": 1})
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"step": 2, "rew')
    with open_store(tmp_path) as store:
        store.log("steps", {"step": 2})
    assert (tmp_path / "steps.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_failure_is_recorded_and_cleared_by_the_next_try(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_store(tmp_path):
        1 / 0  # noqa: B018
    run = Run(tmp_path)
    assert run.status == "failed"
    assert run.failure.endswith("ZeroDivisionError: division by zero\n")
    with open_store(tmp_path):
        assert run.status == "unfinished"
    reopened, earlier = run.events()
    assert reopened["event"] == "reopened" and reopened["environment"] == ENVIRONMENT
    assert earlier["event"] == "earlier_failure" and "ZeroDivisionError" in earlier["text"]


def test_an_interrupt_leaves_the_run_unfinished(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_store(tmp_path):
        raise KeyboardInterrupt
    assert Run(tmp_path).status == "unfinished"


def test_finish_writes_the_summary(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.finish({"layer_ids": (1, 3), "final": torch.tensor(0.5)})
    run = Run(tmp_path)
    assert run.status == "done"
    assert run.summary == {"layer_ids": [1, 3], "final": 0.5}


def test_rewind_drops_later_metrics_and_checkpoints_but_no_events(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for step in range(1, 5):
            store.log("steps", {"step": step, "loss": 0.1 * step})
            store.log("updates", {"step": step, "update": 1})
            store.log("updates", {"step": step, "update": 2})
            store.save_checkpoint(step, {}, {}, {})
        store.log("evals", {"step": 0})
        store.log("evals", {"step": 4})
        store.event("note", step=4)
        store.rewind(3)
        checkpoint = store.latest_checkpoint()
    run = Run(tmp_path)
    assert run.steps()["loss"].tolist() == [0.1, 0.2, 0.1 * 3]
    assert run.updates()["step"].tolist() == [1, 1, 2, 2, 3, 3]
    assert run.evals()["step"].tolist() == [0]
    assert [event["event"] for event in run.events()] == ["note"]
    assert checkpoint is not None and checkpoint.step == 3


def test_whole_files_are_replaced_not_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the middle of writing DONE leaves no DONE."""

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    with open_store(tmp_path) as store:
        monkeypatch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            store.finish({"layer_ids": [0]})
        monkeypatch.undo()
        assert Run(tmp_path).status == "unfinished"
        store.finish({"layer_ids": [0]})
    assert json.loads((tmp_path / "DONE").read_text()) == {"layer_ids": [0]}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.yaml", "a: [", r"config\.yaml is damaged, no YAML"),
        ("steps.jsonl", '{"loss": 1}\n', r"steps\.jsonl, line 1 is damaged: expected a step"),
        (
            "updates.jsonl",
            '{"step": 1}\n\x00\n{"step": 2}\n',
            r"updates\.jsonl, line 2: expected a JSON object",
        ),
    ],
)
def test_a_damaged_run_is_not_continued(tmp_path: Path, file: str, content: str, message: str) -> None:
    with open_store(tmp_path):
        pass
    (tmp_path / file).write_text(content)
    with pytest.raises(StoreError, match=message), open_store(tmp_path) as store:
        store.rewind(1)
