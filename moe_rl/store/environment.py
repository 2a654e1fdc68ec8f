"""What a run ran on: enough to tell why two runs of one configuration differ."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("moe_rl", "torch", "transformers", "safetensors", "numpy")


def environment() -> dict[str, Any]:
    """Versions, machine, threads, commit and start time (UTC) of this process.

    `torch_threads` is torch's own count where torch is loaded, else OMP_NUM_THREADS (None when unset);
    `git_commit` and `git_dirty` are None outside a checkout of this package.
    """
    commit, dirty = _checkout(Path(__file__).resolve())
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "torch_threads": _torch_threads(),
        "versions": {name: _version(name) for name in PACKAGES},
        "git_commit": commit,
        "git_dirty": dirty,
        "command": ["python", *sys.orig_argv[1:]],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch_threads() -> int | None:
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    threads = os.environ.get("OMP_NUM_THREADS")
    return int(threads) if threads else None


def _checkout(source: Path) -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the checkout that tracks `source`.

    A package installed into an environment that lies inside somebody's checkout is not tracked there,
    and that checkout's commit would say nothing about it.
    """
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None, None
    commit = _git(source.parent, "rev-parse", "HEAD")
    changes = _git(source.parent, "status", "--porcelain", "--untracked-files=no")
    return commit, bool(changes) if commit is not None else None


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # git is not installed
        return None
    return done.stdout.strip() if done.returncode == 0 else None
