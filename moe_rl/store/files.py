"""Files that survive a kill: atomic whole-file writes, append-only JSON lines."""

import json
import os
from pathlib import Path
from typing import Any


class StoreError(RuntimeError):
    """A run directory is missing, in use, damaged, or belongs to another configuration."""


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


def sync_directory(path: Path) -> None:
    """Make renames inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, text: str) -> None:
    """Replace a file in one step: a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_synced(temporary, text)
    os.replace(temporary, path)
    sync_directory(path.parent)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one record as one line and hand it to the operating system at once."""
    line = to_json(record) + "\n"
    with open(path, "a", encoding="utf-8") as file:
        file.write(line)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON-lines file; a last line without its newline was torn by a kill and is ignored.

    Raises StoreError for any other line that is not a JSON object: that is damage, not a kill.
    """
    if not path.exists():
        return []
    complete = path.read_bytes().rpartition(b"\n")[0]
    records = []
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
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
        os.truncate(path, complete)
