"""What is read from a run directory, checked before anything is computed from it."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from moe_rl.store.files import StoreError, read_lines

LARGEST = 2**53  # integers beyond are no counts, and no exact floats


def read_config(path: Path) -> dict[str, Any]:
    """The mapping of a YAML file. Raises StoreError for a file that holds none."""
    text = read_text(path)
    try:
        config = yaml.safe_load(text)
    except (
        Exception
    ) as error:  # PyYAML's constructors fail in many ways, for a date of month 13 by ValueError
        raise StoreError(f"{path} is damaged, no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise StoreError(f"{path} is damaged: expected a mapping of names, got {str(config)[:60]!r}")
    return config


def read_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file. Raises StoreError for a file that holds none."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is damaged, no JSON: {error}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path} is damaged: expected a JSON object, got {str(value)[:60]!r}")
    return value


def read_metrics(path: Path, whole: Collection[str] = ()) -> list[dict[str, Any]]:
    """The records of a metric stream; keys of `whole` are in all of them or in none.

    Every record has a `step`, not below the one before. A value is a number, a text or a list of numbers; a
    key has values of one kind, lists of one length. Raises StoreError, naming the line, otherwise.
    """
    records = read_lines(path)
    kinds: dict[str, str] = {}
    last = 0
    for number, record in enumerate(records, start=1):
        step = record.get("step")
        if type(step) is not int or not last <= step <= LARGEST:
            raise _damaged_line(path, number, f"a step of at least {last}, the one before", step)
        last = step
        missing = [key for key in whole if (key in record) != (key in records[0])]
        if missing:
            raise _damaged_line(path, number, f"{missing[0]!r} in every record or in none", sorted(record))
        for key, value in record.items():
            kind = _kind(value)
            if kind is None:
                raise _damaged_line(path, number, f"a number or a list of numbers as {key!r}", value)
            if kind != kinds.setdefault(key, kind):
                raise _damaged_line(path, number, f"{kinds[key]} as {key!r} like before", kind)
    return records


def _damaged_line(path: Path, number: int, expected: str, got: Any) -> StoreError:
    return StoreError(f"{path}, line {number} is damaged: expected {expected}, got {repr(got)[:60]}")


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "a text"
    if isinstance(value, list) and all(_is_number(item) for item in value):
        return f"{len(value)} numbers"
    return "a number" if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and -LARGEST <= value <= LARGEST)


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of a file. Raises StoreError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
