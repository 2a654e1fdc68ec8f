"""Resident memory of this process."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path


def peak_mib() -> float:
    """Peak resident memory of this process so far, MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def rise_mib(work: Callable[[], object]) -> float:
    """MiB by which the peak of resident memory during `work` passes what was resident before.

    Where the peak cannot be reset (anywhere but Linux) it is the rise over the peak so far, which is less.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is now what is resident
        peak = _resident_peak_mib
    except OSError:
        peak = peak_mib
    before = peak()
    work()
    return peak() - before


def _resident_peak_mib() -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))
