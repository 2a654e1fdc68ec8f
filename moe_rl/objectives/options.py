"""The border of every hyper-parameter: its type, checked against the annotation of its field."""

from __future__ import annotations

from dataclasses import fields
from numbers import Integral, Real
from typing import Any

_KINDS: dict[str, tuple[type, str]] = {
    "str": (str, "a string"),
    "int": (Integral, "an integer"),
    "float": (Real, "a number"),
}


def check_option_types(record: Any) -> None:
    """TypeError, naming the option, unless the fields of a dataclass of options hold what they are declared.

    Fields are annotated str, int, float, or one of these and None.
    """
    for option in fields(record):
        value = getattr(record, option.name)
        kind, _, optional = str(option.type).partition(" | ")
        if value is None and optional:
            continue
        expected, words = _KINDS[kind]
        if isinstance(value, bool) or not isinstance(value, expected):
            raise TypeError(f"{option.name} must be {words}, got {value!r}")


def check_group_size(group_size: int | None) -> None:
    """TypeError or ValueError unless a group size is a positive integer or None."""
    if group_size is None:
        return
    if isinstance(group_size, bool) or not isinstance(group_size, Integral):
        raise TypeError(f"group_size must be an integer, got {group_size!r}")
    if group_size < 1:
        raise ValueError(f"group_size must be 1 or more, got {group_size}")
