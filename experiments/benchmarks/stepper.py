"""A training loop driven from outside, one step at a time, so that two of them can take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Closed(BaseException):
    """Unwinds a loop that is not wanted any more; not an Exception, so no handler on the way keeps it."""


class Stepper(Generic[T]):
    """Runs `loop(pause)` in a thread of its own; `pause(value)` in it waits until the next `advance`.

    Only one of the two threads runs at any time. Use it as a context manager: leaving it ends the loop.
    """

    def __init__(self, loop: Callable[[Callable[[T], None]], None]) -> None:
        self._loop = loop
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def advance(self) -> T:
        """Run to the next pause; the value it was given.

        Raises what the loop raised, or RuntimeError at its end.
        """
        self._go.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error
        if not self._values:
            raise RuntimeError("the loop ended before this step")
        return self._values.pop()

    def __enter__(self) -> Stepper[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._closing:
                self._loop(self._pause)
        except _Closed:
            pass
        except BaseException as error:  # handed to the thread that waits in `advance`
            self._error = error
        self._paused.release()

    def _pause(self, value: T) -> None:
        self._values.append(value)
        self._paused.release()
        self._go.acquire()
        if self._closing:
            raise _Closed
