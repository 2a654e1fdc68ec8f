"""Sorting in two turns that are rewarded apart: "3917=" -> "1379", then the task says "<=" -> "9731"."""

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerFast

from moe_rl.tasks.base import Problem
from moe_rl.tasks.generators import DIGITS, Sort
from moe_rl.tasks.tokenizers import char_tokenizer

# second -> what the task says after the first response
SAID = {"reverse": "<=", "sum": "+="}


@dataclass(frozen=True)
class TwoTurn(Sort):
    """Sort the digits; then `second`: "reverse" asks for them in descending order, "sum" for their sum.

    Either turn is graded against the digits of the prompt, whatever was said in the other. Raises ValueError
    for another `second`.
    """

    second: str = "reverse"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.second not in SAID:
            raise ValueError(f"second must be one of {', '.join(SAID)}, got {self.second!r}")

    def default_tokenizer(self) -> PreTrainedTokenizerFast:
        return char_tokenizer(DIGITS + "=" + "".join(said[0] for said in SAID.values()))

    def _draw(self, split: str, index: int, min_length: int) -> Problem:
        problem = super()._draw(split, index, min_length)
        digits = problem.answer
        answer = digits[::-1] if self.second == "reverse" else str(sum(map(int, digits)))
        return replace(problem, later=(Problem(SAID[self.second], answer, problem.metadata),))
