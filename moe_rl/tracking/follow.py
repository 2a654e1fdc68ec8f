"""A tracker that follows a run store, and what fails in it does not fail the run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from moe_rl.store import Run, RunStore, StoreError
from moe_rl.store.writer import METRIC_STREAMS
from moe_rl.tracking.rows import Row, row_of, stored_rows
from moe_rl.tracking.tracker import TrackedRun, Tracker


class Tracking:
    """Shows the records of `store` in `tracker`: `store.follow(Tracking(store, tracker, "wandb"))`.

    A row goes out when the next step's first record comes, or at the end of a run that is done or collapsed:
    by then it is whole, and will not be run again. The tracker is opened when the run starts or resumes, and
    is sent what the store holds and it does not. An error of it is one warning and the event
    `tracking_stopped`; the run goes on without it.
    """

    def __init__(self, store: RunStore, tracker: Tracker, name: str) -> None:
        self.store = store
        self.name = name
        self._tracker: Tracker | None = tracker
        self._opened = False
        self._last = -1  # the tracker holds the steps up to here
        self._pending: tuple[int, Row] | None = None

    def rewound(self) -> None:
        """The run starts, or resumes from what the store holds now."""
        self._guard(self._open)

    def logged(self, stream: str, record: dict[str, Any]) -> None:
        """A record was stored."""
        if stream in METRIC_STREAMS:
            self._guard(lambda: self._add(stream, record))

    def closed(self) -> None:
        """The store is let go of."""
        if self._opened:
            self._guard(self._close)

    def _open(self) -> None:
        assert self._tracker is not None
        if not self._opened:
            self._last = self._tracker.open(TrackedRun.of(self.store.path))
            self._opened = True
        self._pending = None
        for step, row in stored_rows(self.store.path).items():
            self._send()
            self._pending = step, row

    def _add(self, stream: str, record: dict[str, Any]) -> None:
        if not self._opened:
            self._open()  # which reads this record from the store
            return
        step = int(record["step"])
        if self._pending is None or self._pending[0] != step:
            self._send()
            self._pending = step, {}
        self._pending[1].update(row_of(stream, record))

    def _send(self) -> None:
        if self._pending is None or self._tracker is None:
            return
        step, row = self._pending
        if step > self._last:
            self._tracker.log(step, row)
            self._last = step
        self._pending = None

    def _close(self) -> None:
        assert self._tracker is not None
        run = Run(self.store.path)
        if run.status == "done" or run.failure.startswith("collapsed:"):
            self._send()
        self._tracker.close(run.status)

    def _guard(self, call: Callable[[], None]) -> None:
        if self._tracker is None:
            return
        try:
            call()
        except Exception as error:
            self._tracker = None
            reason = " ".join(str(error).split()) or type(error).__name__
            print(
                f"{self.store.path}: tracking={self.name} stopped: {reason}; the run goes on",
                file=sys.stderr,
            )
            with contextlib.suppress(StoreError):  # of a full disk, the run's own next record says it
                self.store.event("tracking_stopped", tracker=self.name, text=reason)
