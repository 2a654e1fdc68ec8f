"""Hostile code: each kind is contained, and the next run goes on as before."""

import os
import signal
import time
from pathlib import Path

import pytest

from moe_rl.evaluation import Limits, Sandbox, SandboxError, SandboxUnavailableError, open_sandbox, probe
from moe_rl.evaluation import isolation as isolation_module
from moe_rl.evaluation import sandbox as sandbox_module
from moe_rl.evaluation.isolation import Isolation, find_isolation
from moe_rl.evaluation.probe import find_faults

SHORT = Limits(seconds=0.5, memory_mb=128, processes=3, scratch_mb=2, output_mb=1)
LONG = Limits(seconds=20, memory_mb=128, processes=3, scratch_mb=2, output_mb=1)


def test_a_program_and_a_function(sandbox):
    program = sandbox.run("print(int(input()) * 2)", b"21\n", LONG)
    assert (program.status, program.stdout, program.error) == ("ok", b"42\n", "")
    code = "class Solution:\n    def add(self, a: List[int], b):\n        print('aside'); return (sum(a), b)"
    function = sandbox.run(code, b'[1, 2]\n"x"', LONG, "add")
    assert (function.status, function.stdout) == ("ok", b'[3, "x"]')


def test_an_exit_status_and_an_exception_are_errors(sandbox):
    assert sandbox.run("import sys; sys.exit(3)", b"", LONG).status == "error"
    failed = sandbox.run("1 / 0", b"", LONG)
    assert failed.status == "error" and failed.error.endswith("ZeroDivisionError: division by zero")


# --- the trial that comes first ---


def test_the_process_cap_and_all_else_hold(sandbox):
    assert find_faults(sandbox.isolation) == []


WEAKER = {  # words of either tool's command, and what replaces them
    "with a network": {"--net": [], "--unshare-all": ["--unshare-all", "--share-net"]},
    "as root": {"--map-user=1000": ["--map-user=0"], "1000": ["0"]},
}


@pytest.mark.parametrize("fault", WEAKER)
def test_the_trial_finds_a_weaker_isolation(sandbox, fault):
    class Weaker(Isolation):
        def command(self, arguments, scratch_bytes):
            words = super().command(arguments, scratch_bytes)
            return [new for word in words for new in WEAKER[fault].get(word, [word])]

    assert fault in find_faults(Weaker(**vars(sandbox.isolation)))


def test_the_trial_finds_a_process_cap_that_does_not_hold(sandbox, monkeypatch):
    monkeypatch.setattr(sandbox_module, "OWN_PROCESSES", 30)  # the trial itself stops at ten
    assert find_faults(sandbox.isolation) == ["able to start more than 3 processes"]


# --- without isolation there is no grading ---


def test_a_fault_is_a_refusal_that_says_why(monkeypatch):
    monkeypatch.setattr(probe, "find_isolation", lambda: Isolation("util-linux", "unshare", "python", "/usr"))
    monkeypatch.setattr(probe, "find_faults", lambda isolation: ["with a network", "as root"])
    with pytest.raises(SandboxUnavailableError, match="leaves graded code with a network, as root"):
        open_sandbox()


def test_a_tool_that_cannot_start_is_a_refusal(monkeypatch):
    broken = Isolation("util-linux", "/nonexistent/unshare", "/usr/bin/python3", "/usr")
    monkeypatch.setattr(probe, "find_isolation", lambda: broken)
    with pytest.raises(SandboxUnavailableError, match=r"cannot be shut in by util-linux here: .*docker run"):
        open_sandbox()


def test_missing_tools_are_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(isolation_module.shutil, "which", lambda name, path: None)
    with pytest.raises(SandboxUnavailableError, match=r"util-linux with setpriv, .*apt install bubblewrap"):
        find_isolation()


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(isolation_module.sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailableError, match="namespaces of Linux, this is darwin"):
        find_isolation()


# --- hostile code ---

WITHIN = {  # name: (code, how it must end, a part of what it must have said)
    "infinite loop": ("while True: pass", "time", ""),
    "sleeping forever": ("import time; time.sleep(1e6)", "time", ""),
    "closing stdout and sleeping": ("import os, time\nos.close(1); os.close(2); time.sleep(1e6)", "time", ""),
    "no reaction to signals": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass", "time", ""),
    "huge output": ("while True: print('7' * 65536)", "output", ""),
    "huge standard error": ("import sys\nwhile True: sys.stderr.write('x' * 65536)", "time", ""),
    "memory": ("hoard = []\nwhile True: hoard.append(bytearray(1 << 22))", "error", "MemoryError"),
    "shared memory": ("import os\nos.memfd_create('x')", "error", "Operation not permitted"),
    "filling the disk": (
        "for n in range(64):\n    open(f'/box/{n}', 'wb').write(bytes(1 << 17))", "error", "No space left"),
    "endless recursion": ("def f(): return f()\nf()", "error", "RecursionError"),
    "recursion in C": (
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __eq__(s, o): return s == o\nA() == A()",
        "error", ""),
    "a socket": (
        "import socket; socket.create_connection(('127.0.0.1', 22), timeout=1)", "error", "Errno 1"),
    "a socket abroad": ("import socket; socket.create_connection(('1.1.1.1', 53), timeout=1)", "error",
                        "Errno 1"),
    "killing its process group": ("import os, signal; os.killpg(0, signal.SIGKILL)", "error", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHIN)
def test_contained(sandbox, name):
    code, status, said = WITHIN[name]
    began = time.monotonic()
    outcome = sandbox.run(code, b"", SHORT if status == "time" else LONG)
    assert outcome.status == status and said in outcome.error
    assert len(outcome.stdout) <= 1 << 20 and len(outcome.error) <= 4096
    assert time.monotonic() - began < 60  # of a machine however busy: it did end
    assert sandbox.run("print(input())", b"7\n", LONG).stdout == b"7\n"


def test_a_fork_bomb_gets_no_further_than_the_cap(sandbox):
    """Bounded all the same: without a cap there would be 2^8 processes, for half a second."""
    code = (
        "import os, time\nfor _ in range(8):\n    try: os.fork()\n    except OSError: pass\ntime.sleep(1e6)"
    )
    assert sandbox.run(code, b"", SHORT).status == "time"
    counting = (
        "import os, time\nmade = 0\nfor _ in range(8):\n    try:\n        if os.fork() == 0: time.sleep(99)\n"
        "        made += 1\n    except OSError: pass\nprint(made)"
    )
    outcome = sandbox.run(counting, b"", LONG)
    assert outcome.status == "ok" and 1 <= int(outcome.stdout) <= 3


def test_a_process_left_behind_ends_with_the_run(sandbox):
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(99)\n"
        "    os._exit(0)\nprint(7)"
    )
    limits = Limits(seconds=20, memory_mb=137)
    outcome = sandbox.run(code, b"", limits)
    assert (outcome.status, outcome.stdout) == ("ok", b"7\n")
    assert processes_of(limits) == []


def test_it_reads_no_file_and_no_process_of_the_host(sandbox, tmp_path):
    answers = tmp_path / "answers.jsonl"
    answers.write_text("the answer")
    answers.chmod(0o644)
    paths = [str(answers), __file__, f"/proc/{os.getpid()}/environ", "/proc/self/mem", "/etc/passwd"]
    code = f"""
import os
for path in {paths}:
    if os.path.lexists(path): print("sees", path)
for folder in ("/", "/tmp", "/home", "/root", "/proc", "/dev", "/etc"):
    print(folder, sorted(os.listdir(folder)) if os.path.isdir(folder) else None)
print(sorted(k for k in os.environ if "MOE" in k or "TOKEN" in k), os.getuid(), os.getpid() < 1000)
"""
    os.environ["MOE_RL_TOKEN"] = "secret"
    try:
        said = sandbox.run(code, b"", LONG).stdout.decode()
    finally:
        del os.environ["MOE_RL_TOKEN"]
    assert "sees" not in said and said.endswith("[] 1000 True\n")
    assert "/dev ['null', 'urandom', 'zero']" in said and "/tmp None" in said


def test_it_writes_nowhere_but_into_its_own_folder(sandbox, tmp_path):
    tmp_path.chmod(0o777)
    paths = ["/x", "/usr/x", "/usr/bin/python3", "/dev/x", "/etc/ld.so.cache", str(tmp_path / "x"), "/box/x"]
    code = f"""
for path in {paths}:
    try:
        open(path, "a").write("x")
        print(path)
    except OSError:
        pass
"""
    assert sandbox.run(code, b"", LONG).stdout == b"/box/x\n"
    assert list(tmp_path.iterdir()) == []
    assert sandbox.run("import os; print(os.listdir('/box'))", b"", LONG).stdout == b"['solution.py']\n"


def test_it_cannot_write_through_what_it_inherits(sandbox):
    code = """
import os
for fd in range(64):
    try:
        os.write(fd, b"x" if fd > 2 else b"")
        print("wrote to", fd)
    except OSError:
        pass
"""
    said = sandbox.run(code, b"input", LONG).stdout.decode().splitlines()
    assert said == ["wrote to 1", "wrote to 2"]


def test_it_cannot_end_its_harness(sandbox):
    code = f"""
import os
for process in (1, os.getppid(), {os.getpid()}, {os.getppid()}, -1):
    try:
        os.kill(process, 9)
    except OSError:
        pass
print("alive")
"""
    assert sandbox.run(code, b"", LONG).status in ("ok", "error")
    assert sandbox.run("print(7)", b"", LONG).stdout == b"7\n"


def processes_of(limits):
    """Processes whose command line holds these limits, seen from outside."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if f'"RLIMIT_AS": {limits.memory_mb << 20}'.encode() in command:
            found.append(int(folder.name))
    return found


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_when_the_harness_is_killed_the_code_ends_too(sandbox):
    limits = Limits(seconds=600, memory_mb=139)
    harness = os.fork()
    if harness == 0:
        try:
            Sandbox(sandbox.isolation).run("import time; time.sleep(600)", b"", limits)
        finally:
            os._exit(0)
    assert wait_until(lambda: len(processes_of(limits)) >= 2)
    os.kill(harness, signal.SIGKILL)
    os.waitpid(harness, 0)
    assert wait_until(lambda: processes_of(limits) == [])


def test_a_sandbox_that_cannot_be_set_up_is_no_wrong_answer():
    broken = Sandbox(Isolation("util-linux", "/nonexistent/unshare", "/usr/bin/python3", "/usr"))
    with pytest.raises(SandboxError, match="could not be"):
        broken.run("print(7)", b"", LONG)


@pytest.mark.parametrize(
    "change", [{"seconds": 0}, {"seconds": float("inf")}, {"memory_mb": 1}, {"processes": 0}]
)
def test_limits_out_of_range(change):
    with pytest.raises(ValueError, match=f"limits.{next(iter(change))}="):
        Limits(**change).check()
