"""Fuzz campaigns: a property over many drawn cases, with the number of cases in the summary of the run."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CASES = "fuzz cases"
Campaign = Callable[..., Counter]


@pytest.fixture
def campaign(record_property: Callable[[str, Any], None], request: pytest.FixtureRequest) -> Campaign:
    """Call a check on drawn values many times; it names how a case ended, and the endings are counted."""

    def run(check: Callable[..., str], *strategies: st.SearchStrategy, cases: int) -> Counter:
        endings: Counter[str] = Counter()

        @settings(
            max_examples=cases,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        @given(st.tuples(*strategies))
        def one_case(drawn: tuple[Any, ...]) -> None:
            endings[check(*drawn)] += 1

        one_case()
        counted = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
        name = request.node.nodeid.removeprefix("tests/")
        record_property(CASES, f"{name}: {endings.total()} cases ({counted})")
        return endings

    return run


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """One to three faults of a disk, a transfer or an editor."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        stop = draw(st.integers(at, min(len(data), at + 16)))
        kind = draw(st.sampled_from(("flip", "flip", "overwrite", "cut", "drop", "insert", "repeat", "zero")))
        if kind == "flip":
            middle, stop = bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) if data else b"", at + 1
        elif kind == "overwrite":
            middle = draw(st.binary(min_size=stop - at, max_size=stop - at))
        elif kind == "cut":
            middle, stop = b"", len(data)
        elif kind == "drop":
            middle = b""
        elif kind == "insert":
            middle, stop = (
                draw(st.binary(max_size=4) | st.sampled_from((b"0", b"-", b"e9", b"NaN", b"\n"))),
                at,
            )
        elif kind == "repeat":
            middle = data[at:stop] * 2
        else:
            middle = bytes(stop - at)
        data = data[:at] + middle + data[stop:]
    return data


@pytest.fixture
def damaged() -> Callable[[bytes], st.SearchStrategy[bytes]]:
    """A strategy of damaged versions of some bytes."""
    return damaged_bytes


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for found in terminalreporter.stats.values() for report in found]
    lines = [
        text
        for report in reports
        for name, text in getattr(report, "user_properties", ())
        if name == CASES and report.when == "call"
    ]
    if lines:
        terminalreporter.section("fuzz cases")
        for line in sorted(lines):
            terminalreporter.line(line)
