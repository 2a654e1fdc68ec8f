"""LiveCodeBench-style problems: a statement, tests on stdin and stdout or of a function, perhaps a rating."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moe_rl.evaluation.compare import same_output, same_value
from moe_rl.evaluation.grade import Grade, unique_names
from moe_rl.evaluation.packed_tests import unpack
from moe_rl.evaluation.sandbox import Limits, Outcome, Sandbox
from moe_rl.tasks import Problem
from moe_rl.tasks.jsonl import read_objects, read_text

FIELDS = '{"question_content": ..., "public_test_cases": ..., "private_test_cases": ...}'
STDIN = (
    "\n\nWrite a Python program that reads the input from stdin and writes the answer to stdout. Put it in "
    "one block:\n```python\n# your code\n```\n"
)
STARTER = "\n\nComplete this Python code and put all of it in one block:\n```python\n{}\n```\n"


@dataclass(frozen=True)
class Test:
    """`input` and `output` as the file has them: texts, for a function JSON (one argument a line)."""

    __test__ = False  # not pytest's

    input: str
    output: str
    kind: Literal["stdin", "functional"]


@dataclass(frozen=True)
class CodeSet:
    """Problems with their tests; see `read_code_set`."""

    in_process = False

    names: tuple[str, ...]
    problems: tuple[Problem, ...]
    tests: tuple[tuple[Test, ...], ...]
    functions: tuple[str, ...]  # "" where the tests are on stdin
    ratings: tuple[float, ...]
    sandbox: Sandbox
    limits: Limits

    def grade(self, index: int, response: str) -> Grade:
        """Right where the last fenced block passes every test; each runs in a sandbox of its own."""
        code = extract_code(response)
        if code is None:
            return Grade(False, "no code block")
        tests = self.tests[index]
        for number, test in enumerate(tests, start=1):
            function = self.functions[index] if test.kind == "functional" else ""
            outcome = self.sandbox.run(code, test.input.encode(), self.limits, function)
            fault = _fault(outcome, test)
            if fault:
                return Grade(False, f"test {number} of {len(tests)}: {fault}")
        return Grade(True, f"passed {len(tests)} tests")


def read_code_set(
    path: Path,
    sandbox: Sandbox,
    limits: Limits,
    *,
    rated: bool = False,
    since: str | None = None,
    until: str | None = None,
) -> CodeSet:
    """The problems of a UTF-8 JSONL file in LiveCodeBench's format.

    Read are `question_content`, `starter_code`, `public_test_cases` and `private_test_cases` (JSON lists of
    {"input", "output", "testtype": "stdin" | "functional"}, as text or as lists, also packed, see `unpack`),
    `metadata` ("func_name"), `question_id`; with `rated` a number `rating`. `since` and `until` (YYYY-MM-DD,
    both included) keep problems by `contest_date`.

    Raises ValueError naming file and line for anything else, and for a file without problems.
    """
    limits.check()
    found = [
        _problem(record, where, rated)
        for where, record in read_objects(path, FIELDS)
        if _between(record, where, since, until)
    ]
    names, problems, tests, functions, ratings = zip(*found, strict=True) if found else ((),) * 5
    kept = tuple(rating for rating in ratings if rating is not None)
    return CodeSet(unique_names(names, path), problems, tests, functions, kept, sandbox, limits)


def extract_code(response: str) -> str | None:
    """The last fenced block that is closed, without its fences; None where there is none."""
    blocks = re.findall(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", response, re.DOTALL | re.MULTILINE)
    return blocks[-1] if blocks else None


def _fault(outcome: Outcome, test: Test) -> str:
    """What is wrong in a few words, "" for a right answer."""
    if outcome.status == "time":
        return "time limit"
    if outcome.status == "output":
        return "output limit"
    if outcome.status == "error":
        return f"failed: {outcome.error.rpartition(chr(10))[2] or 'killed by a signal or its own exit'}"
    printed = outcome.stdout.decode("utf-8", "replace")
    same = same_value if test.kind == "functional" else same_output
    return "" if same(printed, test.output) else "wrong answer"


Found = tuple[str, Problem, tuple[Test, ...], str, float | None]


def _problem(record: Mapping[str, Any], where: str, rated: bool) -> Found:
    statement = read_text(record, "question_content", where)
    tests = tuple(
        test for key in ("public_test_cases", "private_test_cases") for test in _tests(record, key, where)
    )
    if not tests:
        raise ValueError(f"{where}: expected at least one test")
    metadata = _json(record.get("metadata") or {}, f"{where}: metadata")
    function = str(metadata.get("func_name") or "") if isinstance(metadata, dict) else ""
    if not function.isidentifier() and any(test.kind == "functional" for test in tests):
        raise ValueError(f'{where}: expected metadata {{"func_name": NAME}} with functional tests')
    starter = record.get("starter_code") or ""
    prompt = statement + (STARTER.format(starter) if starter else STDIN)
    name = str(record.get("question_id", where.rpartition(" ")[2]))
    return name, Problem(prompt, ""), tests, function, _rating(record, where) if rated else None


def _rating(record: Mapping[str, Any], where: str) -> float:
    rating = record.get("rating")
    if isinstance(rating, bool) or not isinstance(rating, int | float) or not math.isfinite(rating):
        raise ValueError(f"{where}: expected a number as rating, got {rating!r}")
    return float(rating)


def _tests(record: Mapping[str, Any], key: str, where: str) -> list[Test]:
    place = f"{where}: {key}"
    value = record.get(key)
    if value in (None, ""):
        return []
    try:
        if isinstance(value, str) and not value.lstrip().startswith("["):
            value = unpack(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    found = _json(value, place)
    if not isinstance(found, list):
        raise ValueError(f"{place}: expected a list of tests, got {str(found)[:60]!r}")
    return [_test(test, place) for test in found]


def _test(test: Any, place: str) -> Test:
    if not isinstance(test, dict) or test.get("testtype") not in ("stdin", "functional"):
        raise ValueError(f"{place}: expected testtype stdin or functional, got {str(test)[:80]!r}")
    given, output = test.get("input"), test.get("output")
    if not isinstance(given, str) or not isinstance(output, str):
        raise ValueError(f"{place}: expected input and output as texts, got {str(test)[:80]!r}")
    if test["testtype"] == "functional":
        for text in (output, *(line for line in given.split("\n") if line.strip())):
            _json(text, f"{place}: a value of a functional test")
    return Test(given, output, test["testtype"])


def _json(value: Any, place: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: expected JSON, got {value[:60]!r} ({error})") from error


def _between(record: Mapping[str, Any], where: str, since: str | None, until: str | None) -> bool:
    if since is None and until is None:
        return True
    day = read_text(record, "contest_date", where)[:10]
    return (since or day) <= day <= (until or day)
