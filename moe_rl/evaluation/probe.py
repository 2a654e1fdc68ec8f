"""Tries the isolation with harmless code before any other runs, and refuses one that does not hold."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path

from moe_rl.evaluation.isolation import (
    ENVIRONMENT,
    INSTALL,
    Isolation,
    SandboxUnavailableError,
    find_isolation,
)
from moe_rl.evaluation.sandbox import Limits, Sandbox, SandboxError

LIMITS = Limits(seconds=20, memory_mb=256, processes=3, scratch_mb=16)
SHELLS_OWN = ("PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE")  # variables that sh and Python set

# Prints what it could do. Forks at most ten processes, which wait for the end of their parent.
CODE = """
import ctypes, os, resource, socket

def refused(action):
    try:
        action()
    except (OSError, ValueError):
        return True
    return False

def exists(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True

def write(path, mebibytes=0):
    with open(path, "wb") as file:
        file.write(b"x")
        for _ in range(mebibytes):
            file.write(bytes(1 << 20))

def fill():
    for number in range(4):
        write(f"/box/{number}", given["scratch_mb"] // 2)

def connect():
    socket.create_connection(("127.0.0.1", given["port"]), timeout=1).close()

def make_namespace():
    if ctypes.CDLL(None).unshare(0x10000000) != 0:
        raise OSError

def take_memory():
    if ctypes.CDLL(None).shmget(0, 4096, 0o1600) < 0:
        os.close(os.memfd_create("x"))

def count_forks():
    wait, end = os.pipe()
    for made in range(10):
        try:
            child = os.fork()
        except OSError:
            return made
        if child == 0:
            os.close(end)
            os.read(wait, 1)
            os._exit(0)
    return 10

given = json.loads(input())
print(json.dumps({
    "root": os.getuid() == 0 or not refused(lambda: os.setuid(0)),
    "read": not refused(lambda: open(given["secret"]).read()) or os.path.exists("/proc/self"),
    "write": not all([refused(lambda: write(path)) for path in ("/x", "/usr/x", "/dev/x", given["secret"])]),
    "no_scratch": refused(lambda: write("/box/x")),
    "fill": not refused(fill),
    "memory": not refused(take_memory),
    "network": not refused(connect) or [name for _, name in socket.if_nameindex()] != ["lo"],
    "namespace": not refused(make_namespace),
    "signal": any([exists(process) for process in given["processes"]]),
    "limits": [resource.getrlimit(getattr(resource, name)) for name in given["limits"]],
    "environment": sorted(set(os.environ) - set(given["environment"])),
    "forks": count_forks(),
}))
"""


def open_sandbox() -> Sandbox:
    """A sandbox that has been tried on this machine, which takes half a second.

    Raises `SandboxUnavailableError`, saying why and what to install, where the isolation cannot be had or any
    part of it does not hold. There is no weaker mode.
    """
    isolation = find_isolation()
    try:
        faults = find_faults(isolation)
    except SandboxError as error:
        raise SandboxUnavailableError(
            f"graded code cannot be shut in by {isolation.tool} here: {error}. {_advice()}"
        ) from error
    if faults:
        raise SandboxUnavailableError(f"{isolation.tool} leaves graded code {', '.join(faults)}. {_advice()}")
    return Sandbox(isolation)


def find_faults(isolation: Isolation) -> list[str]:
    """What code can do there and must not, in words; empty where all holds.

    Raises `SandboxError` where nothing could be run.
    """
    wanted = LIMITS.resources()
    with (
        tempfile.NamedTemporaryFile("w", prefix="moe_rl-probe-") as secret,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        secret.write("the answer")
        secret.flush()
        os.chmod(secret.name, 0o666)  # no permission keeps it from the code, only that it is not there
        given = {
            "secret": secret.name,
            "port": server.getsockname()[1],
            "processes": [os.getpid(), os.getppid()],
            "scratch_mb": LIMITS.scratch_mb,
            "limits": list(wanted),
            "environment": [*ENVIRONMENT, *SHELLS_OWN],
        }
        outcome = Sandbox(isolation).run(CODE, json.dumps(given).encode() + b"\n", LIMITS)
    try:
        found = json.loads(outcome.stdout)
        faults = {
            "as root": found["root"],
            "able to read other files": found["read"],
            "able to write outside its folder": found["write"],
            "without a folder to write to": found["no_scratch"],
            "able to fill the memory with files": found["fill"],
            "able to take memory beyond its limit": found["memory"],
            "with a network": found["network"],
            "able to make namespaces": found["namespace"],
            "able to reach other processes": found["signal"],
            "without its limits": found["limits"] != [[value, value] for value in wanted.values()],
            "with its caller's environment": found["environment"] != [],
            f"able to start more than {LIMITS.processes} processes": found["forks"] > LIMITS.processes,
        }
    except (ValueError, KeyError, TypeError) as error:
        raise SandboxError(f"its trial ended with {outcome.status}: {outcome.error}") from error
    return [name for name, failed in faults.items() if failed]


def _advice() -> str:
    """What usually stands in the way of an unprivileged user namespace."""
    restricted = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if restricted.exists() and restricted.read_text().strip() == "1":
        return (
            "This Ubuntu restricts unprivileged user namespaces; to allow them: sudo sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0"
        )
    return (
        f"{INSTALL}; in a container, allow user namespaces (docker run --security-opt seccomp=unconfined "
        "--security-opt systempaths=unconfined), or grade on another machine"
    )
