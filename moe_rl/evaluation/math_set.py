"""AIME'24-style sets: problems with an answer that math-verify compares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_rl.evaluation.grade import Grade, unique_names
from moe_rl.tasks import Problem
from moe_rl.tasks.jsonl import equal_in_math, read_objects, read_text

FIELDS = '{"problem": ..., "answer": ...}'
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class MathSet:
    """Problems of a local file, `instruction` behind each; see `read_math_set`."""

    in_process = True

    names: tuple[str, ...]
    problems: tuple[Problem, ...]
    ratings: tuple[float, ...] = ()

    def check(self) -> None:
        """Raise ValueError for an answer that the grader does not find equal to itself."""
        for index, problem in enumerate(self.problems):
            if not self.grade(index, f"\\boxed{{{problem.answer}}}").correct:
                raise ValueError(
                    f"problem {self.names[index]}: math-verify does not find its answer {problem.answer!r} "
                    "equal to itself: write it as a number or in LaTeX"
                )

    def grade(self, index: int, response: str) -> Grade:
        """Right where math-verify finds the response's last answer equal; main thread only."""
        correct = equal_in_math(self.problems[index].answer, response)
        return Grade(correct, "equal" if correct else "not equal")


def read_math_set(path: Path, instruction: str = INSTRUCTION) -> MathSet:
    """The problems of a UTF-8 JSONL file with `problem` (text) and `answer` (text or integer) a line.

    An `id` names a problem, else its line does. Raises ValueError naming file and line for anything else, and
    for a problem that is there twice.
    """
    names, problems = [], []
    for where, record in read_objects(path, FIELDS):
        answer: Any = record.get("answer")
        if type(answer) is int:
            record["answer"] = answer = str(answer)
        text = read_text(record, "problem", where)
        names.append(str(record.get("id", where.rpartition(" ")[2])))
        problems.append(Problem(text + instruction, read_text(record, "answer", where)))
    return MathSet(unique_names(names, path), tuple(problems))
