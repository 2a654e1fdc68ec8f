"""Runs inside the sandbox, in front of the graded code: sets the limits, then hands over.

Its source is given to the sandbox's interpreter with -c: nothing of this package is visible there. Arguments:
descriptors of the code and of the signal that all is set up, limits as JSON, name of a function or "".
"""

import builtins
import ctypes
import importlib
import json
import os
import platform
import resource
import runpy
import struct
import sys

# What a solution may use without importing it, as on the sites the problems are from.
PRELUDE = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "itertools",
    "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip

# System calls whose memory no limit of a process counts (shared memory, message queues, files in memory), and
# those that only reach into the kernel or other processes: by machine the kernel's number for it, and theirs.
MACHINES = {
    "x86_64": (0xC000003E, {
        "shmget": 29, "semget": 64, "msgget": 68, "ptrace": 101, "add_key": 248, "request_key": 249,
        "keyctl": 250, "unshare": 272, "perf_event_open": 298, "setns": 308, "memfd_create": 319, "bpf": 321,
        "userfaultfd": 323, "io_uring_setup": 425, "memfd_secret": 447,
    }),
    "aarch64": (0xC00000B7, {
        "unshare": 97, "ptrace": 117, "msgget": 186, "semget": 190, "shmget": 194, "add_key": 217,
        "request_key": 218, "keyctl": 219, "perf_event_open": 241, "setns": 268, "memfd_create": 279,
        "bpf": 280, "userfaultfd": 282, "io_uring_setup": 425, "memfd_secret": 447,
    }),
}  # fmt: skip
OTHER_ABI = 0x40000000  # system calls from here on are the same ones by other numbers (x32)
PR_SET_SECCOMP, FILTER = 22, 2


def main() -> None:
    code, ready = int(sys.argv[1]), int(sys.argv[2])
    limits, function = json.loads(sys.argv[3]), sys.argv[4]
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    forbid_system_calls()
    with open(code, "rb") as source, open("solution.py", "wb") as file:
        file.write(source.read())
    names = prelude()
    sys.argv = ["solution.py"]
    sys.setrecursionlimit(50_000)
    sys.set_int_max_str_digits(50_000)
    os.write(ready, b"ready")
    os.close(ready)
    if function:
        call(function, names)
    else:
        runpy.run_path("solution.py", init_globals=names, run_name="__main__")


def forbid_system_calls() -> None:
    """Install a seccomp filter, for good: the calls of MACHINES fail with EPERM. OSError where it cannot."""
    architecture, calls = MACHINES[platform.machine()]
    load, jump_equal, jump_from, give = 0x20, 0x15, 0x35, 0x06  # BPF's codes
    kill, refuse, allow = 0x80000000, 0x00050001, 0x7FFF0000  # seccomp's answers; refuse holds EPERM
    numbers = sorted(calls.values())
    program = [
        (load, 0, 0, 4),  # the architecture
        (jump_equal, 1, 0, architecture),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # the number of the call
        (jump_from, len(numbers) + 1, 0, OTHER_ABI),
        *((jump_equal, len(numbers) - at, 0, number) for at, number in enumerate(numbers)),
        (give, 0, 0, allow),
        (give, 0, 0, refuse),
    ]
    steps = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    whole = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(steps)))
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_SECCOMP, FILTER, whole, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no seccomp filter can be installed")


def prelude() -> dict[str, object]:
    """The modules by name and their public names; math's pow does not hide the built-in one."""
    modules = {name: importlib.import_module(name) for name in PRELUDE}
    names: dict[str, object] = {}
    for module in modules.values():
        public = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
        names.update({name: getattr(module, name) for name in public if not hasattr(builtins, name)})
    return names | modules


def call(function: str, names: dict[str, object]) -> None:
    """Print the result as JSON, alone: what the code prints itself goes nowhere."""
    result = os.dup(1)
    nothing = os.open("/dev/null", os.O_WRONLY)
    os.dup2(nothing, 1)
    arguments = [json.loads(line) for line in sys.stdin.read().split("\n") if line.strip()]
    found = runpy.run_path("solution.py", init_globals=names, run_name="solution")
    owner = found.get("Solution")
    method = getattr(owner(), function) if owner is not None else found.get(function)
    if method is None or method is names.get(function):  # the prelude's own is not the solution's
        raise NameError(f"the code has no function {function}")
    with open(result, "w") as out:
        json.dump(method(*arguments), out)


if __name__ == "__main__":
    main()
