"""A limit on the wall-clock time of one call, for graders that may never return."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")

# Not SIGALRM: there is one alarm in a process, and math-verify sets and clears it for limits of its own.
SIGNAL, TIMER = signal.SIGVTALRM, signal.ITIMER_VIRTUAL
POLL_S = 0.05
AGAIN_S = 1.0  # to the next signal, for a function that swallowed the first


class TimeLimitError(RuntimeError):
    """A call took longer than its limit."""


class _TimeUp(BaseException):
    """Not an Exception: a function's own `except Exception` is no answer to it."""


class _Watchdog:
    """Signals the main thread after the deadline; one serves a process.

    Two clocks ring: a thread that looks at the time, for a function that waits, and the kernel's timer of CPU
    time, for one that computes without giving other threads a turn (a regular expression that backtracks).
    Nothing is started or woken for a call, since most graders need microseconds.
    """

    def __init__(self) -> None:
        self.deadline: float | None = None
        self.rang = False
        self._thread: threading.Thread | None = None

    def arm(self, seconds: float) -> None:
        if signal.getsignal(SIGNAL) != self._ring:
            signal.signal(SIGNAL, self._ring)  # stays: by default the signal would end the process
        if self._thread is None or not self._thread.is_alive():  # the first time, or after a fork
            self._thread = threading.Thread(target=self._watch, name="time limit", daemon=True)
            self._thread.start()
        self.rang, self.deadline = False, time.monotonic() + seconds
        signal.setitimer(TIMER, seconds, POLL_S)

    def disarm(self) -> None:
        self.deadline = None
        signal.setitimer(TIMER, 0)

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            deadline = self.deadline
            if deadline is not None and time.monotonic() >= deadline:
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        """In the main thread; a signal that arrives after its call has ended finds no deadline passed."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self.rang, self.deadline = True, time.monotonic() + AGAIN_S
            raise _TimeUp


_watchdog = _Watchdog()


def require_main_thread() -> None:
    """Raise `ValueError` in any other thread: Python delivers signals to the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "a limit on grading time works in the main thread only: train there, or set "
            "rollout.grading_timeout=null"
        )


def within(seconds: float | None, function: Callable[..., Result], *arguments: object) -> Result:
    """`function(*arguments)`, or `TimeLimitError` when it takes longer; no limit where `seconds` is None.

    Interrupts Python code, regular expressions, sleep and waiting for input or output, soon after the limit;
    an extension that neither returns nor looks for signals (10**10**10) cannot be interrupted. Main thread
    only, not nested.
    """
    if seconds is None:
        return function(*arguments)
    try:
        try:
            _watchdog.arm(seconds)
            result = function(*arguments)
        finally:
            _watchdog.disarm()
    except _TimeUp:
        _watchdog.disarm()  # it may have come in the middle of the first
        raise TimeLimitError(f"no result after {seconds:g} s") from None
    if _watchdog.rang:  # swallowed by the function
        raise TimeLimitError(f"no result after {seconds:g} s")
    return result
