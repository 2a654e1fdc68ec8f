"""Files that survive a kill: atomic whole-file writes, append-only JSON lines."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class StoreError(RuntimeError):
    """A run directory is missing, in use, damaged, cannot be written, or is of another configuration."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write below `path` into one StoreError: which path, why, and what to do.

    The system's own error for a full disk names no file.
    """
    try:
        yield
    except OSError as error:
        advice = "mend that and give the same command again"
        if error.errno in FULL:
            advice = "free space there and give the same command again"
        elif error.errno in FORBIDDEN:
            advice = "make it writable or choose another folder"
        raise StoreError(f"{path} cannot be written ({error.strerror or error}): {advice}") from error


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON text of a record; tensors and NumPy values become numbers or lists, NaN and Infinity stay."""
    return json.dumps(value, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(
        f"expected numbers, strings, lists, dicts or tensors in a record, got {type(value).__name__}: "
        "convert it before it is logged"
    )


def sync(path: Path) -> None:
    """Make a file's content, or the renames inside a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file in one step: a reader sees the old content or the new, never a part.

    Raises StoreError when it cannot be written; what was there stays.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            with open(temporary, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)  # a full disk needs the space
            raise
        sync(path.parent)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one record as one line and hand it to the operating system at once."""
    line = to_json(record) + "\n"
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write(line)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON-lines file; a last line without its newline was torn by a kill and is ignored.

    Raises StoreError for any other line that is not a JSON object: that is damage, not a kill.
    """
    if not path.exists():
        return []
    try:
        complete = path.read_bytes().rpartition(b"\n")[0]
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    records = []
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{path}, line {number}: expected a JSON object, got {line[:80]!r}") from error
        if not isinstance(record, dict):
            raise StoreError(f"{path}, line {number}: expected a JSON object, got {line[:80]!r}")
        records.append(record)
    return records


def drop_torn_line(path: Path) -> None:
    """Cut a file after its last newline, so that the next record starts on a line of its own."""
    if not path.exists():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        with writing(path):
            os.truncate(path, complete)
