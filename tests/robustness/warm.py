"""Runs the real commands in forks of one process that has imported everything, and harms them on request.

A request is one JSON line on stdin, the answer one on stdout.  Request: `argv`, the command's name (train,
report or store) and its arguments, and any of

    kill   {phase, occurrence, delay}: SIGKILL from outside, `delay` seconds after the phase was entered; a
           phase that is over before waits at its end, so that the kill never comes too late
    crash  {at, below, torn}: SIGKILL from inside, before the file operation below a path that is the at-th,
           counted from 1, or the first on a file that the pattern `at` finds; torn: a file that is opened
           for writing is left with the first bytes of a record in it
    fill   {at, below, ballast, leave}: before that operation, fill the disk of `ballast` up to `leave` bytes
    limit  the largest file that may be written, bytes

Answer: `code` (the exit code, or minus the signal), `out`, `err`, `phases` as [name, occurrence, start,
seconds or null where it never ended], and `operations`, the paths that those below `below` were about.
"""

import contextlib
import gc
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

import safetensors.torch
import torch

import experiments.launch
import experiments.report
import experiments.train
from moe_rl.models import ModelConfig, load_model
from moe_rl.store import RunStore
from moe_rl.tasks import get_task
from moe_rl.training import cold_start, loop
from moe_rl.training.measure import PhaseClock

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")  # as Python's audit names them


def serve(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        notes, notes_of_child = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(notes)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            child(request, notes_of_child)
        os.close(notes_of_child)
        lines = follow(pid, notes, request.get("kill"))
        os.close(notes)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        err.seek(0)
        return {"code": code, "out": out.read(), "err": err.read()} | read_notes(lines)


def follow(pid: int, notes: int, kill: dict[str, Any] | None) -> list[str]:
    """What the child notes until it ends; it is killed in the phase that was asked for."""
    text = ""
    wanted = f"+ {kill['phase']} {kill['occurrence']} " if kill else None
    while chunk := os.read(notes, 65536).decode():
        text += chunk
        if kill and wanted and wanted in text:
            time.sleep(kill["delay"])
            os.kill(pid, signal.SIGKILL)
            wanted = None
    return text.splitlines()


def read_notes(lines: list[str]) -> dict[str, Any]:
    phases: list[list[Any]] = []
    operations = []
    for line in lines:
        kind, name, *rest = line.split(" ")
        if kind == "+":
            phases.append([name, int(rest[0]), float(rest[1]), None])
        elif kind == "-":
            entered = next(phase for phase in phases if phase[:2] == [name, int(rest[0])])
            entered[3] = float(rest[1]) - entered[2]
        else:
            operations.append(line.partition(" ")[2])
    return {"phases": phases, "operations": operations}


def child(request: dict[str, Any], notes: int) -> NoReturn:
    code: object = 0
    try:
        os.fsync = lambda descriptor: None  # slow, and no kill can undo what was written
        note_phases(notes, request.get("kill", {}))
        harm(request, notes)
        name, *arguments = request["argv"]
        {"train": train, "report": experiments.report.main, "store": store}[name](arguments)
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(int(code or 0))  # type: ignore[call-overload]


def train(arguments: list[str]) -> None:
    sys.argv = ["train.py", *arguments]
    with experiments.launch.interruptible():
        experiments.train.main()


def store(arguments: list[str]) -> None:
    """A run without a model: `path` and the step before which it fails, 0 for none."""
    path, fails = arguments[0], int(arguments[1])
    with RunStore.open(path, {"seed": 0}, {"python": ""}) as run:
        checkpoint = run.latest_checkpoint()
        done = checkpoint.step if checkpoint else 0
        run.rewind(done)
        weight = checkpoint.model()["weight"] if checkpoint else torch.zeros(64)
        for step in range(done + 1, 5):
            if step == fails:
                raise ArithmeticError("planted")
            weight = weight * 3 + step
            run.log("updates", {"step": step, "weight": weight[:2]})
            run.log("steps", {"step": step, "weight": weight[:2]})
            if step > 1:  # three, of which two stay
                run.save_checkpoint(step, {"weight": weight}, {"moment": -weight}, {"step": step})
        run.finish({"weight": weight[:2]})


def note_phases(notes: int, kill: dict[str, Any]) -> None:
    """Write to the pipe when a phase is entered and left: those of a step's clock, and what is around."""
    entered: Counter[str] = Counter()

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[None]:
        entered[name] += 1
        note = f"{name} {entered[name]}"
        os.write(notes, f"+ {note} {time.monotonic()}\n".encode())
        yield
        if (name, entered[name]) == (kill.get("phase"), kill.get("occurrence")):
            time.sleep(60)
        os.write(notes, f"- {note} {time.monotonic()}\n".encode())

    clock = PhaseClock.__call__

    @contextlib.contextmanager
    def noted_clock(self: PhaseClock, phase: str) -> Iterator[None]:
        with noted(phase), clock(self, phase):
            yield

    def wrap(owner: Any, function: str, name: str) -> None:
        plain = getattr(owner, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            with noted(name):
                return plain(*args, **kwargs)

        setattr(owner, function, call)

    PhaseClock.__call__ = noted_clock  # type: ignore[method-assign]
    wrap(experiments.launch, "cold_start", "cold_start")
    wrap(loop, "resume", "resume")
    wrap(loop, "evaluate", "evaluate")
    wrap(RunStore, "save_checkpoint", "checkpoint")
    wrap(RunStore, "finish", "finish")
    wrap(experiments.report, "write_report", "report")


def harm(request: dict[str, Any], notes: int) -> None:
    if "limit" in request:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], request["limit"]))
    order = request.get("crash") or request.get("fill")
    if not order:
        return
    below, at = os.path.realpath(order["below"]), order["at"]
    count, busy = 0, False

    def operation(path: Any, writes: str) -> None:
        """Count one change below the path, and do the harm at the one that was asked for."""
        nonlocal count, busy
        if busy or not isinstance(path, str | os.PathLike) or not os.path.realpath(path).startswith(below):
            return
        busy = True
        count += 1
        name = os.path.relpath(path, below)
        os.write(notes, f"o {name}\n".encode())
        reached = re.search(at, name) if isinstance(at, str) else count == at
        if reached and "fill" in request:
            fill(order["ballast"], order["leave"])
        elif reached:
            if writes and order.get("torn") and not os.path.isdir(path):  # a directory: a file without a name
                with open(path, writes + "b") as file:
                    file.write(b'{"step": 1, "rew')
            os.kill(os.getpid(), signal.SIGKILL)
        busy = False

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[1], str) and args[1][0] in "wa":
            operation(args[0], args[1][0])
        elif event in CHANGES:
            operation(args[0], "")

    save_file = safetensors.torch.save_file

    def audited_save_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        operation(filename, "w")
        save_file(tensors, filename, *args, **kwargs)

    safetensors.torch.save_file = cold_start.save_file = audited_save_file  # written in Rust, not audited
    sys.addaudithook(audit)


def fill(ballast: str, leave: int) -> None:
    """Take all of a file system's space but `leave` bytes."""
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            disk = os.statvfs(ballast)
            free = disk.f_bavail * disk.f_frsize - leave
            if free <= 0:
                return
            file.write(bytes(min(free, 1 << 20)))


if __name__ == "__main__":
    sort = get_task("sort", min_length=3, max_length=4)
    load_model(ModelConfig(config={"num_hidden_layers": 1}), sort.default_tokenizer)  # imports what it needs
    gc.freeze()  # a fork then shares what is imported instead of copying it
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)
