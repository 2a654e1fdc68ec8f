"""Whether what a program gave is the right answer, by LiveCodeBench's rules."""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation


def same_output(printed: str, expected: str) -> bool:
    """Line by line without blanks around the text or a line: equal, or equal numbers throughout (1.0 is 1.00,
    without tolerance)."""
    found, wanted = _lines(printed), _lines(expected)
    return len(found) == len(wanted) and all(map(_same_line, found, wanted))


def same_value(printed: str, expected: str) -> bool:
    """Both are JSON of equal values; a tuple is a list."""
    try:
        return bool(json.loads(printed) == json.loads(expected))
    except (ValueError, RecursionError):
        return False


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    numbers = _numbers(found)
    return numbers is not None and numbers == _numbers(wanted)


def _numbers(line: str) -> list[Decimal] | None:
    try:
        numbers = [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None
    return None if any(number.is_snan() for number in numbers) else numbers  # to compare one raises
