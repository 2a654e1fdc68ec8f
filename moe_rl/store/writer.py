"""The writer of a run directory: one process at a time, resumable after a kill."""

import contextlib
import os
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import yaml
from filelock import FileLock, Timeout

from moe_rl.store.checkpoints import (
    Checkpoint,
    drop_old,
    load_checkpoint,
    save_checkpoint,
    step_directories,
)
from moe_rl.store.environment import environment as current_environment
from moe_rl.store.files import (
    StoreError,
    append_line,
    drop_torn_line,
    sync,
    to_json,
    write_atomic,
    writing,
)
from moe_rl.store.records import read_config, read_metrics
from moe_rl.store.whole import discard, recover_all

if TYPE_CHECKING:
    from torch import Tensor

METRIC_STREAMS = ("steps", "updates", "evals")
STREAMS = (*METRIC_STREAMS, "events")
Stream = Literal["steps", "updates", "evals", "events"]


class Follower(Protocol):
    """What hears of the records of a run once they are stored; it must not raise."""

    def rewound(self) -> None:
        """A run starts, or resumes from the records that are left."""

    def logged(self, stream: str, record: dict[str, Any]) -> None:
        """A record was appended."""

    def closed(self) -> None:
        """The run ended or was interrupted; DONE or FAILED is written by now."""


class RunStore:
    """Writes one run directory; open it with `RunStore.open` and use it as a context manager.

    Leaving the context by an exception writes FAILED; an interrupt leaves the run unfinished.  Either way
    a later `open` with the same configuration continues it.
    """

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock
        self._followers: list[Follower] = []

    @classmethod
    def open(
        cls, path: str | Path, config: dict[str, Any], environment: dict[str, Any] | None = None
    ) -> "RunStore":
        """Make a run directory, or reopen one of the same configuration.

        Args: `config` of plain YAML values (dicts, lists, numbers, strings); `environment` as
        `moe_rl.store.environment()` gives it, which is called when it is None.
        Reopening clears a FAILED marker (its text goes to events.jsonl) and keeps DONE.
        Raises StoreError when another process writes there, when the stored configuration differs, or when
        the directory cannot be written.
        """
        path = Path(path)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        store = cls(path, _acquire(path))
        try:
            store._prepare(_plain_config(config), environment or current_environment())
        except BaseException:
            store.close()
            raise
        return store

    def _prepare(self, config: dict[str, Any], environment: dict[str, Any]) -> None:
        config_file = self.path / "config.yaml"
        started = config_file.exists()
        if started:
            _require_same(read_config(config_file), config, config_file)
        for leftover in self.path.glob(".*.tmp"):  # of whole-file writes
            if leftover.is_file():
                with writing(leftover):
                    leftover.unlink()
        recover_all(self.path / "checkpoints")
        for stream in STREAMS:
            drop_torn_line(self._stream(stream))
        if started:
            self.event("reopened", environment=environment)
        else:
            write_atomic(self.path / "environment.json", to_json(environment, indent=2) + "\n")
            write_atomic(config_file, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        failed = self.path / "FAILED"
        if failed.exists():
            self.event("earlier_failure", text=failed.read_text(encoding="utf-8", errors="replace"))
            with writing(failed):
                failed.unlink()

    def follow(self, follower: Follower) -> None:
        """Tell `follower` of every record from here on."""
        self._followers.append(follower)

    def log(self, stream: Stream, record: dict[str, Any]) -> None:
        """Append one record to `<stream>.jsonl`; NaN and Infinity are kept."""
        if stream not in STREAMS:
            raise StoreError(f"expected a stream of {', '.join(STREAMS)}, got {stream!r}")
        append_line(self._stream(stream), record)
        for follower in self._followers:
            follower.logged(stream, record)

    def event(self, name: str, **details: Any) -> None:
        """Append a dated event (restarts, damaged checkpoints, earlier failures)."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.log("events", {"time": now, "event": name, **details})

    def save_checkpoint(
        self,
        step: int,
        model: "dict[str, Tensor]",
        optimizer: "dict[str, Tensor]",
        state: dict[str, Any],
    ) -> Path:
        """Save tensors and a JSON-able state as of the end of `step`; the last two checkpoints stay."""
        for stream in METRIC_STREAMS:  # a checkpoint must not outlive the metrics of its steps
            if self._stream(stream).exists():
                sync(self._stream(stream))
        return save_checkpoint(self.path / "checkpoints", step, model, optimizer, state)

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint whose hashes hold, or None; damaged ones are reported and passed over."""
        saved = step_directories(self.path / "checkpoints")
        for step, path in reversed(saved):
            try:
                return load_checkpoint(path)
            except StoreError as error:
                print(f"checkpoint of step {step} passed over: {error}", file=sys.stderr)
                self.event("damaged_checkpoint", step=step, text=str(error))
        if saved:
            print(f"{self.path}: no good checkpoint is left, the run starts over", file=sys.stderr)
            self.event("started_over")
        return None

    def rewind(self, step: int) -> None:
        """Drop metrics and checkpoints of later steps, which a resumed run is about to write again.

        Records of steps, updates and evals with `step` above the given one go; events stay.
        """
        for stream in METRIC_STREAMS:
            file = self._stream(stream)
            drop_torn_line(file)
            records = read_metrics(file)
            kept = [record for record in records if record["step"] <= step]
            if len(kept) < len(records):
                write_atomic(file, "".join(to_json(record) + "\n" for record in kept))
        for later, path in step_directories(self.path / "checkpoints"):
            if later > step:
                discard(path)
        drop_old(self.path / "checkpoints")  # a kill may have come between a save and this
        for follower in self._followers:
            follower.rewound()

    def finish(self, summary: dict[str, Any]) -> None:
        """Mark the run done: `summary` becomes the JSON content of DONE."""
        write_atomic(self.path / "DONE", to_json(summary, indent=2) + "\n")

    def fail(self, error_text: str) -> None:
        """Mark this try failed: the text (one line that says what happened, a traceback) becomes FAILED."""
        write_atomic(self.path / "FAILED", error_text)

    def close(self) -> None:
        """Let other processes write here."""
        try:
            while self._followers:
                self._followers.pop().closed()
        finally:  # an interrupt while a tracker uploads
            if self._lock.is_locked:
                with contextlib.suppress(OSError):  # only says who holds the lock
                    (self.path / "run.pid").unlink(missing_ok=True)
                self._lock.release()

    def __enter__(self) -> "RunStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, Exception):
                what = " ".join(str(error).split()) or type(error).__name__
                self.fail("\n\n".join([what, "".join(traceback.format_exception(kind, error, trace))]))
        except StoreError as second:  # a full disk: the first error must not be lost behind it
            assert error is not None
            error.add_note(str(second))
        finally:
            self.close()

    def _stream(self, stream: str) -> Path:
        return self.path / f"{stream}.jsonl"


def _acquire(path: Path) -> FileLock:
    """Lock a run directory or raise; the holder's process id lies beside the lock.

    Not inside it: some filelock versions empty the lock file when they try to take it.
    """
    lock = FileLock(path / "run.lock")
    pid_file = path / "run.pid"
    with writing(path):
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            pid = pid_file.read_text().strip() if pid_file.exists() else "unknown"
            raise StoreError(
                f"{path} is in use by another process (pid {pid}): "
                "wait for it, or give this run another directory"
            ) from error
    try:
        write_atomic(pid_file, f"{os.getpid()}\n")
    except StoreError:
        lock.release()
        raise
    return lock


def _plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as YAML gives it back, so that a reopened run compares like with like."""
    try:
        plain: dict[str, Any] = yaml.safe_load(yaml.safe_dump(config))
    except yaml.YAMLError as error:
        raise StoreError(
            f"expected a config of plain values (dict, list, str, int, float, bool, None): {error}; "
            "resolve it to containers first"
        ) from error
    return plain


def _require_same(stored: dict[str, Any], given: dict[str, Any], file: Path) -> None:
    old, new = dotted(stored), dotted(given)
    keys = [key for key in {**old, **new} if old.get(key, "absent") != new.get(key, "absent")]
    if keys:
        lines = [
            f"  {key}: stored {old.get(key, 'absent')}, given {new.get(key, 'absent')}" for key in keys[:5]
        ]
        more = [f"  and {len(keys) - 5} more"] if len(keys) > 5 else []
        raise StoreError(
            "\n".join([f"{file} belongs to another configuration; use another directory", *lines, *more])
        )


def dotted(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration by dotted keys; an empty section is a value."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat.update(dotted(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
