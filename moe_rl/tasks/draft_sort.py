"""Sorting with room to work: "3917=" -> "1379", or "1397|1379", of which the last part counts."""

from dataclasses import dataclass, replace
from random import Random

from transformers import PreTrainedTokenizerFast

from moe_rl.tasks.base import Problem
from moe_rl.tasks.generators import DIGITS, Sort
from moe_rl.tasks.tokenizers import char_tokenizer

SEPARATOR = "|"


@dataclass(frozen=True)
class DraftSort(Sort):
    """Sort the digits; a response may write drafts first, so that its length is the policy's to choose.

    The reward reads what follows the last "|". Cold-start examples have 0 to `max_drafts` drafts, all numbers
    equally likely: draft j of d is the list after n j / (d + 1) steps of selection sort, so that each draft
    leaves less to do. Raises ValueError for `max_drafts` below 0.
    """

    max_drafts: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_drafts < 0:
            raise ValueError(f"max_drafts must be at least 0, got {self.max_drafts}")

    def warmup(self, index: int) -> Problem:
        problem = super().warmup(index)
        count = Random(f"drafts {index}").randint(0, self.max_drafts)
        digits = problem.prompt[:-1]
        drafts = [selected(digits, len(digits) * j // (count + 1)) for j in range(1, count + 1)]
        return replace(problem, answer=SEPARATOR.join([*drafts, problem.answer]))

    def reward(self, problem: Problem, response_text: str) -> float:
        """1.0 where what follows the last "|" is the answer, 0.0 for anything else."""
        return super().reward(replace(problem, answer=_last(problem.answer)), _last(response_text))

    def default_tokenizer(self) -> PreTrainedTokenizerFast:
        return char_tokenizer(DIGITS + "=" + SEPARATOR)


def selected(digits: str, steps: int) -> str:
    """The digits after so many steps of selection sort: the smallest ones in order, then the others as is."""
    rest = list(digits)
    first = []
    for _ in range(steps):
        first.append(min(rest))
        rest.remove(first[-1])
    return "".join(first + rest)


def _last(text: str) -> str:
    return text.rpartition(SEPARATOR)[2]
