"""The command that shuts a process in: bubblewrap, or util-linux's tools where that is missing.

Inside, a process is an unprivileged user without capabilities in new user, mount, pid, network, IPC, UTS and
cgroup namespaces. It sees `/usr`, its interpreter, three devices and an empty `/box`, the only place that it
can write to; no other file of the host, no process and no network. Nothing of this needs root, and root is
given up first: the kernel exempts it from the limit on processes.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

NOBODY = 65534  # who root becomes before anything else
INSIDE = 1000  # uid and gid that the code sees
COVERED = "/sys"  # where the new root is built, in its own mount namespace: it is everywhere, and not needed
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
    "HOME": "/box",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
}
UTIL_LINUX = ("setpriv", "choom", "unshare", "mount", "umount", "pivot_root")
INSTALL = "Debian and Ubuntu: apt install bubblewrap"

# As root of the new namespaces, before the code: $1 a directory to build the new root over, $2 the size of
# /box; then read-only trees, "--", pairs of a link and its target, "--", the command. It stays as process 1,
# with whose end the kernel kills everything else in the namespace.
BUILD_ROOT = """
set -eu
root=$1 size=$2; shift 2
echo 0 > /proc/sys/user/max_user_namespaces
mount -t tmpfs -o mode=755,nosuid,nodev,size=1m tmpfs "$root"
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$root${1%/*}"; : > "$root$1"; fi
    mount --bind "$1" "$root$1"
    case $1 in /dev/*) ;; *) mount -o remount,bind,ro,nosuid,nodev "$root$1" ;; esac
    shift
done
shift
while [ "$1" != -- ]; do ln -s "$2" "$root$1"; shift 2; done
shift
mkdir "$root/box" "$root/old" "$root/proc"
mount -t tmpfs -o "mode=700,nosuid,nodev,noexec,size=$size" tmpfs "$root/box"
mount --rbind /proc "$root/proc"
mount -o remount,bind,ro,nosuid,nodev "$root"
cd "$root"
pivot_root . old
cd /box
umount -n -l /old
umount -n -l /proc
status=0
setpriv --no-new-privs --inh-caps=-all --ambient-caps=-all --bounding-set=-all -- "$@" || status=$?
exit "$status"
"""


class SandboxUnavailableError(RuntimeError):
    """This machine cannot isolate graded code: it is not run at all."""


@dataclass(frozen=True)
class Isolation:
    """How graded code is shut in, and with which interpreter."""

    tool: str  # bubblewrap or util-linux
    executable: str  # path of bwrap or unshare
    python: str
    prefix: str  # directory of the interpreter and its library

    def command(self, arguments: list[str], scratch_bytes: int) -> list[str]:
        """argv that runs the interpreter with `arguments` inside, in /box of `scratch_bytes`."""
        user = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.geteuid() == 0 else []
        # Dies with its parent, and is the first to go where memory runs out.
        outside = ["choom", "-n", "1000", "--", "setpriv", *user, "--pdeathsig=KILL", "--"]
        enter = self._bubblewrap if self.tool == "bubblewrap" else self._util_linux
        return [*outside, *enter(scratch_bytes), self.python, *arguments]

    def _trees(self) -> tuple[list[str], list[tuple[str, str]]]:
        """What is bound read-only, and the links of a merged /usr."""
        there = [Path(path) for path in SYSTEM if os.path.lexists(path)]
        links = [(str(path), os.readlink(path)) for path in there if path.is_symlink()]
        trees = [str(path) for path in there if not path.is_symlink()]
        if not Path(self.prefix).is_relative_to("/usr"):
            trees.append(self.prefix)
        return trees, links

    def _bubblewrap(self, scratch_bytes: int) -> list[str]:
        trees, links = self._trees()
        return [
            self.executable, "--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(INSIDE),
            "--gid", str(INSIDE), "--cap-drop", "ALL", "--die-with-parent", "--new-session",
            *(word for tree in trees for word in ("--ro-bind", tree, tree)),
            *(word for link, target in links for word in ("--symlink", target, link)),
            *(word for device in DEVICES for word in ("--dev-bind", device, device)),
            "--perms", "0700", "--size", str(scratch_bytes), "--tmpfs", "/box", "--remount-ro", "/",
            "--chdir", "/box", "--",
        ]  # fmt: skip

    def _util_linux(self, scratch_bytes: int) -> list[str]:
        trees, links = self._trees()
        return [
            self.executable, "--user", f"--map-user={INSIDE}", f"--map-group={INSIDE}", "--keep-caps",
            "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child=KILL",
            "--propagation=private", "--", "sh", "-c", BUILD_ROOT, "sh", COVERED, str(scratch_bytes),
            *trees, *DEVICES, "--", *(word for pair in links for word in pair), "--",
        ]  # fmt: skip


def find_isolation() -> Isolation:
    """The tool and interpreter of this machine; whether they hold is for a test run to say.

    Raises `SandboxUnavailableError` off Linux, where a tool is missing, or without an interpreter that an
    unprivileged user can read.
    """
    if sys.platform != "linux":
        raise SandboxUnavailableError(
            f"graded code needs the namespaces of Linux, this is {sys.platform}: grade on a Linux machine"
        )
    search = f"{os.environ.get('PATH', '')}:{ENVIRONMENT['PATH']}"
    found = {name: shutil.which(name, path=search) for name in ("bwrap", *UTIL_LINUX)}
    missing = [name for name in UTIL_LINUX if found[name] is None]
    python, prefix = _interpreter()
    if found["bwrap"] is not None and found["setpriv"] is not None and found["choom"] is not None:
        return Isolation("bubblewrap", found["bwrap"], python, prefix)
    if found["unshare"] is not None and not missing:
        return Isolation("util-linux", found["unshare"], python, prefix)
    raise SandboxUnavailableError(
        f"graded code needs bubblewrap, or util-linux with {', '.join(missing)}, to be shut in; {INSTALL}"
    )


def _interpreter() -> tuple[str, str]:
    """This process's own interpreter, without its virtual environment, or the system's.

    Root's own may be closed to the user that root becomes.
    """
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    for python, prefix in ((base, os.path.realpath(sys.base_prefix)), ("/usr/bin/python3", "/usr")):
        inside = Path(python).is_relative_to(prefix) and prefix not in ("/", str(Path.home()))
        if inside and Path(python).exists() and (os.geteuid() != 0 or _open_to_all(Path(python))):
            return python, prefix
    raise SandboxUnavailableError(
        f"graded code needs a Python that an unprivileged user can run: {base} is private to root and there "
        "is no /usr/bin/python3; Debian and Ubuntu: apt install python3"
    )


def _open_to_all(path: Path) -> bool:
    readable = path.stat().st_mode & stat.S_IROTH
    return bool(readable) and all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)
