"""Problems from a local JSONL file, graded by math-verify or by equality."""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

from transformers import PreTrainedTokenizerFast

from moe_rl.tasks.base import Problem
from moe_rl.tasks.splits import is_held_out
from moe_rl.tasks.tokenizers import bpe_tokenizer

GRADINGS = ("math", "exact")
FIELDS = '{"prompt": ..., "answer": ...}'
TIMEOUT_S = 5


@dataclass(frozen=True)
class Jsonl:
    """The problems of a UTF-8 file with one {"prompt": ..., "answer": ...} a line; more keys are metadata.

    A hash of the prompt holds out about `test_fraction` of the distinct prompts, so repeats of a prompt share
    a split and lines added later move no other. `grading` "math" takes any expression that math-verify finds
    equal to the answer (a number or LaTeX), "exact" the answer's own text alone, blanks around it aside. Math
    takes `3+4` for 7: where the prompt holds such an expression, choose exact.

    Raises ValueError for a bad line, naming file and line, and for a file that leaves a split empty.
    """

    path: str
    test_fraction: float = 0.1
    grading: str = "math"

    def __post_init__(self) -> None:
        if self.grading not in GRADINGS:
            raise ValueError(f"grading must be one of {', '.join(GRADINGS)}, got {self.grading!r}")
        if not 0 < self.test_fraction < 1:
            raise ValueError(f"test_fraction must lie in (0, 1), got {self.test_fraction}")
        if not (self._train and self._test):
            raise ValueError(
                f"{self.path}: {len(self._problems)} problems at test_fraction {self.test_fraction} give "
                f"{self.train_size} to train on, {self.test_size} to test: add problems or change it"
            )

    @property
    def train_size(self) -> int:
        return len(self._train)

    @property
    def test_size(self) -> int:
        return len(self._test)

    def train(self, index: int) -> Problem:
        epoch, position = divmod(index, self.train_size)
        return self._train[_order("train", epoch, self.train_size)[position]]

    def test(self, index: int) -> Problem:
        return self._test[_order("test", 0, self.test_size)[index]]

    def warmup(self, index: int) -> Problem:
        """The training problems in an order of their own: a file says nothing of difficulty."""
        epoch, position = divmod(index, self.train_size)
        return self._train[_order("warmup", epoch, self.train_size)[position]]

    def reward(self, problem: Problem, response_text: str) -> float:
        """1.0 for a right answer, else 0.0. Grading "math" works in the main thread only: RuntimeError."""
        if response_text.strip() == problem.answer.strip():
            return 1.0
        return float(self.grading == "math" and equal_in_math(problem.answer, response_text))

    def default_tokenizer(self) -> PreTrainedTokenizerFast:
        """BPE with single digits, trained on the training problems."""
        return bpe_tokenizer(problem.prompt + problem.answer for problem in self._train)

    @cached_property
    def _problems(self) -> list[Problem]:
        return read_problems(Path(self.path))

    @cached_property
    def _train(self) -> list[Problem]:
        return [problem for problem in self._problems if not is_held_out(problem.prompt, self.test_fraction)]

    @cached_property
    def _test(self) -> list[Problem]:
        return [problem for problem in self._problems if is_held_out(problem.prompt, self.test_fraction)]


def read_problems(path: Path) -> list[Problem]:
    """The problems of a JSONL file, in order; blank lines are skipped.

    Raises ValueError naming file and line for anything but an object with non-blank strings "prompt" and
    "answer", and for a file without problems; FileNotFoundError without the file.
    """
    problems = [_problem(record, where) for where, record in read_objects(path, FIELDS)]
    if not problems:
        raise ValueError(f"{path}: no problems: expected one {FIELDS} a line")
    return problems


def read_objects(path: Path, fields: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """("FILE, line N", object) of every line of a UTF-8 JSONL file; blank lines are skipped.

    Raises ValueError naming file and line for anything but an object, which should have had `fields`.
    """
    lines = enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines(), start=1)
    for number, line in lines:
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deep
            raise ValueError(
                f"{where}: expected one JSON object in UTF-8, got {line[:60]!r} ({error})"
            ) from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: expected an object {fields}, got {line[:60]!r}")
        yield where, record


def read_text(record: Mapping[str, Any], key: str, where: str) -> str:
    """A non-blank string of an object; ValueError, naming file and line, for anything else."""
    value = record.get(key)
    if key not in record:
        found = ", ".join(repr(name) for name in list(record)[:6]) or "none"
        raise ValueError(f'{where}: expected "{key}" as a non-blank string, its fields are {found}')
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'{where}: expected "{key}" as a non-blank string, got {value!r}')
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f'{where}: "{key}" holds half a surrogate pair, which is no text: {value!r}')
    return value


def _problem(record: dict[str, Any], where: str) -> Problem:
    prompt, answer = (read_text(record, key, where) for key in ("prompt", "answer"))
    return Problem(prompt, answer, {key: v for key, v in record.items() if key not in ("prompt", "answer")})


@lru_cache(maxsize=8)
def _order(split: str, epoch: int, size: int) -> list[int]:
    """The shuffle of one epoch. Test problems are shuffled too: files are often sorted by difficulty."""
    order = list(range(size))
    Random(f"{split} {epoch}").shuffle(order)
    return order


def equal_in_math(answer: str, response: str) -> bool:
    """Whether math-verify finds the last expression of `response` equal to `answer`; main thread only."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "math-verify limits its time by a signal, which only the main thread can receive: "
            'call reward there, or use grading="exact"'
        )
    gold, found = _expressions(answer), _expressions(response)
    # Gold first: verify is not symmetric. Where it fails or times out it says no.
    return bool(_math_verify().verify(gold, found, timeout_seconds=TIMEOUT_S))


def _expressions(text: str) -> list[Any]:
    """What math-verify reads in a text.

    Without dollars it looks for numbers, and reads `1+x^2` as 1 and `10^{5}` as 10. So a text that is nothing
    but a formula gets dollars.
    """
    formula = f"${text}$" if _is_bare_formula(text) else text
    return list(_math_verify().parse(formula, parsing_timeout=TIMEOUT_S))


def _is_bare_formula(text: str) -> bool:
    """True for one line without delimiters, words, or numbers side by side.

    As LaTeX a word is the product of its letters, equal to any anagram, and `3 4` is 12 or 7.
    """
    if "\n" in text.strip() or re.search(r"\$|\\boxed|\\\(|\\\[|\d\s+\d", text):
        return False
    letters = re.sub(r"\\text\s*\{[^}]*\}|\\[A-Za-z]+", " ", text)
    return re.search(r"[^\W\d_]{3}|(?<!\S)[^\W\d_]{2}(?!\S)", letters) is None


def _math_verify() -> ModuleType:
    try:
        import math_verify
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'grading="math" needs the package math-verify: pip install "moe_rl[math]"'
        ) from error
    return math_verify
