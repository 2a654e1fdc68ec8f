"""A small run of the real command line, the process that runs it, and what must be the same in the end."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from moe_rl.store import Run, find_runs
from moe_rl.store.whole import SUMS, verify

ROOT = Path(__file__).resolve().parents[2]
# Two-digit sorting, warm enough that rewards differ and every update moves the weights.
SMALL = [
    "steps=3",
    "checkpoint_every=1",
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=1",
    "model.config.num_experts=4",
    "model.config.moe_intermediate_size=16",
    "+model.config.initializer_range=0.2",
    "task.min_length=2",
    "task.max_length=2",
    "rollout.prompts=4",
    "rollout.responses=4",
    "rollout.max_new_tokens=4",
    "optim.minibatches=2",
    "optim.lr=3e-3",
    "optim.warmup_updates=1",
    "evaluation.prompts=8",
    "evaluation.every=2",
    "cold_start.target_accuracy=0",
    "cold_start.steps=40",
    "cold_start.batch_size=16",
    "cold_start.eval_every=40",
    "cold_start.eval_prompts=8",
    "cold_start.lr=1e-2",
    "cold_start.warmup_steps=2",
]


@dataclass(frozen=True)
class Ended:
    """A command that has ended; the fields are warm.py's answer."""

    code: int
    out: str
    err: str
    phases: list[list[Any]]
    operations: list[str]

    @property
    def killed_in(self) -> str:
        """The innermost phase that was entered and never left."""
        return next((phase[0] for phase in reversed(self.phases) if phase[3] is None), "between phases")


Warm = Callable[..., Ended]


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Run a command in a fork of one process that has imported everything: see warm.py."""
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("warm.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )

    def run(argv: list[str], **harm: Any) -> Ended:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps({"argv": argv} | harm) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the warmed process has died"
        return Ended(**json.loads(answer))

    yield run
    server.kill()  # it holds nothing, and torch takes seconds to leave
    server.wait()


@dataclass(frozen=True)
class SmallRun:
    """The small run in any output folder."""

    warm: Warm

    def __call__(self, output: Path, **harm: Any) -> Ended:
        return self.warm(["train", *SMALL, f"output={output}"], **harm)

    def report(self, output: Path, **harm: Any) -> Ended:
        return self.warm(["report", f"runs={output}", f"out={output / 'report'}"], **harm)

    def directory(self, output: Path) -> Path:
        (run,) = find_runs(output)
        return run.path


@pytest.fixture(scope="session")
def small_run(warm: Warm) -> SmallRun:
    return SmallRun(warm)


@dataclass(frozen=True)
class Whole:
    """The uninterrupted run: what it left, and how it went."""

    results: dict[str, Any]
    ended: Ended


@pytest.fixture(scope="session")
def whole(small_run: SmallRun, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    output = tmp_path_factory.mktemp("whole")
    # No operation is the 0th: none is harmed, all are listed.
    ended = small_run(output, crash={"at": 0, "below": str(output)})
    assert ended.code == 0, ended.err
    updates = find_runs(output)[0].updates()
    assert updates["grad_norm"].iloc[-1] > 0 and updates["drift/old"].iloc[-1] > 0, "the run trains"
    return Whole(read_results(output), ended)


@pytest.fixture(scope="session")
def results() -> Callable[[Path], dict[str, Any]]:
    """Everything that a run leaves, times and start time apart."""
    return read_results


def read_results(output: Path) -> dict[str, Any]:
    (run,) = find_runs(output)
    found: dict[str, Any] = {"DONE": run.summary, "config": run.config}
    for stream in ("steps", "updates", "evals"):
        records = map(json.loads, (run.path / f"{stream}.jsonl").read_text().splitlines())
        found[stream] = [
            {key: value for key, value in record.items() if not key.startswith(("time/", "memory/"))}
            for record in records
        ]
    sums = [*run.path.glob("checkpoints/*/" + SUMS), run.path / "final" / SUMS]
    sums += output.glob("cold_starts/*/" + SUMS)
    for file in sums:  # of the weights, the moments and everything beside them
        verify_all(file.parent)
        found[str(file.parent.relative_to(output))] = file.read_text()
    return found


def verify_all(directory: Path) -> None:
    lines = (directory / SUMS).read_text().splitlines()
    assert lines
    verify(directory, [line.partition("  ")[2] for line in lines])


@pytest.fixture(scope="session")
def nothing_torn() -> Callable[[Path], None]:
    """Assert that every file under its own name is whole, whatever happened."""
    return check_nothing_torn


def check_nothing_torn(output: Path) -> None:
    for directory in [
        *output.glob("single/*/*/checkpoints/step-*"),
        *output.glob("single/*/*/final"),
        *(path for path in output.glob("cold_starts/[!.]*") if path.is_dir()),
    ]:
        verify_all(directory)
    for content in output.glob("single/*/*/content.txt"):
        assert len(content.read_text()) == 33
    for file in output.glob("single/*/*/config.yaml"):
        run = Run(file.parent)
        assert run.config["steps"] == 3 and run.environment["versions"]
        assert run.status in ("done", "failed", "unfinished")
        assert run.summary.get("steps", 3) == 3
        for frame in (run.steps(), run.updates(), run.evals()):
            assert frame.empty or not frame["step"].isna().any()
        run.events()
    for page in output.glob("report/index.html"):
        assert page.read_text().rstrip().endswith("</html>")
    for picture in output.glob("report/figures/*.png"):
        assert picture.read_bytes()[-8:-4] == b"IEND"
    for table in output.glob("report/tables/*.csv"):
        assert table.read_text().endswith("\n")
        pd.read_csv(table)
