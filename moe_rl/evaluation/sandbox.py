"""Runs Python code that nobody vouches for, with limits on time, memory, processes, files and output.

    sandbox = open_sandbox()                    # of `probe`: refuses where code cannot be shut in
    outcome = sandbox.run("print(input())", b"7\\n", Limits(seconds=2))

The code never meets the right answers: it gets one input, and what it prints is compared outside.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from moe_rl.evaluation.isolation import ENVIRONMENT, Isolation

DRIVER = Path(__file__).with_name("driver.py")
OWN_PROCESSES = 2  # of the isolating tool, counted with those of the code
START_S = 60.0  # for the namespaces and the interpreter, on a busy machine
END_S = 20.0  # from SIGKILL to the end of every process
ERROR_BYTES = 4096  # of standard error that are kept, the last ones

Status = Literal["ok", "error", "time", "output"]


class SandboxError(RuntimeError):
    """The sandbox itself failed, which says nothing of the code."""


@dataclass
class Limits:
    """Of one run. `memory_mb` (MiB) is each process's address space: all together `processes` times that."""

    seconds: float = 6.0  # wall clock, and CPU time of each process; LiveCodeBench's limit a test
    memory_mb: int = 1024
    processes: int = 4  # processes and threads at a time
    scratch_mb: int = 16  # MiB, all of /box; also of the largest file
    output_mb: int = 8  # MiB of standard output
    open_files: int = 64

    def check(self) -> None:
        """Raise `ValueError` for a limit below its least sensible value."""
        for name, least in (("memory_mb", 64), ("processes", 1), ("scratch_mb", 1), ("output_mb", 1),
                            ("open_files", 16)):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"limits.{name}={getattr(self, name)}: must be at least {least}")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"limits.seconds={self.seconds}: must be above 0")

    def resources(self) -> dict[str, int]:
        """The kernel's limits, by the names of Python's `resource`."""
        return {
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_CPU": math.ceil(self.seconds),
            "RLIMIT_NPROC": self.processes + OWN_PROCESSES,
            "RLIMIT_FSIZE": self.scratch_mb << 20,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    status: "ok" (exit status 0), "error" (another exit status or a signal), "time" or "output" (the limit
    that it met, whereupon all its processes were killed).  stdout: what it printed, up to the limit.  error:
    the end of standard error.  seconds: wall clock, from the first line of the code.
    """

    status: Status
    stdout: bytes
    error: str
    seconds: float


@dataclass(frozen=True)
class Sandbox:
    """Runs code in an isolation as it is; `moe_rl.evaluation.open_sandbox` shows first that it holds."""

    isolation: Isolation

    def python_version(self) -> str:
        """Of the interpreter that runs the code, e.g. 3.11.7."""
        outcome = self.run("import platform; print(platform.python_version())", b"", Limits(seconds=20))
        return outcome.stdout.decode().strip()

    def run(self, code: str, stdin: bytes, limits: Limits, function: str = "") -> Outcome:
        """Run a program on its standard input; or call `function` of it (of its class Solution, where it has
        one) with the arguments in `stdin`, one JSON value a line, and give its result as JSON in `stdout`.

        Whatever the code does is an `Outcome`; raises `SandboxError` where it could not be started or ended.
        """
        with _readable(code.encode("utf-8", "replace")) as source, _readable(stdin) as given:
            ready, ready_end = os.pipe()
            arguments = [
                "-I", "-B", "-c", DRIVER.read_text(encoding="utf-8"), str(source.fileno()), str(ready_end),
                json.dumps(limits.resources()), function,
            ]  # fmt: skip
            try:
                process = subprocess.Popen(
                    self.isolation.command(arguments, limits.scratch_mb << 20),
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(source.fileno(), ready_end),
                    env=ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                os.close(ready)
                raise SandboxError(f"{error.filename} could not be started: {error.strerror}") from error
            finally:
                os.close(ready_end)
            with process:
                try:
                    return _watch(process, ready, limits)
                finally:
                    os.close(ready)
                    _kill(process)


def _watch(process: subprocess.Popen[bytes], ready: int, limits: Limits) -> Outcome:
    """Read until every process is gone or a limit is met; then kill what is left and see it gone."""
    assert process.stdout is not None and process.stderr is not None
    room = limits.output_mb << 20
    stdout, stderr = bytearray(), bytearray()
    began: float | None = None
    status: Status | None = None
    deadline = time.monotonic() + START_S
    with selectors.DefaultSelector() as selector:
        for descriptor in (ready, process.stdout.fileno(), process.stderr.fileno()):
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0 and began is None:
                raise SandboxError(f"the sandbox was not set up within {START_S:g} s: {_text(stderr)}")
            if left <= 0 and status is None:
                status = "time"
            elif left <= 0:
                raise SandboxError(f"processes in the sandbox survived SIGKILL for {END_S:g} s")
            for key, _ in selector.select(max(left, 0) if status is None else 0.1):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fd)
                elif key.fd == ready:
                    began = time.monotonic()
                    deadline = began + limits.seconds
                elif key.fd == process.stderr.fileno():
                    stderr = (stderr + data)[-ERROR_BYTES:]
                elif status is None:
                    stdout += data
                    if len(stdout) > room:
                        del stdout[room:]
                        status = "output"
            if status is not None and process.poll() is None:
                _kill(process)
                deadline = time.monotonic() + END_S
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"the sandbox did not end within {END_S:g} s of its last output") from error
    if began is None:
        raise SandboxError(f"the sandbox could not be set up (exit status {code}): {_text(stderr)}")
    return Outcome(
        status or ("ok" if code == 0 else "error"), bytes(stdout), _text(stderr), time.monotonic() - began
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Process 1 of the namespace, with which the kernel ends the rest; the tool, its parent, then ends too.

    The tool is killed only where it does not: whoever inherits its child may leave it a zombie.
    """
    if process.poll() is not None:
        return
    with contextlib.suppress(OSError):  # gone, or a kernel without lists of children
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.5)
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _readable(content: bytes) -> Iterator[BinaryIO]:
    """A file without a name, open for reading only: the code cannot write through its descriptor."""
    handle, name = tempfile.mkstemp(prefix="moe_rl-")
    with contextlib.ExitStack() as stack:
        try:
            with open(handle, "wb") as writer:
                writer.write(content)
            file = stack.enter_context(open(name, "rb"))
        finally:
            os.unlink(name)
        yield file


def _text(data: bytes | bytearray) -> str:
    return bytes(data).decode("utf-8", "replace").strip()
