"""Digit tasks generated here: sort, running_sum and reverse. Characters in, characters out.

A prompt is a string of digits and "=", the answer as many digits: sort "3917=" -> "1379", running_sum
"3917=" -> "3230" (prefix sums modulo 10), reverse "3917=" -> "7193". Difficulty is the length.
"""

from dataclasses import dataclass
from itertools import accumulate
from random import Random

from transformers import PreTrainedTokenizerFast

from moe_rl.tasks.base import Problem
from moe_rl.tasks.splits import TEST_FRACTION, is_held_out
from moe_rl.tasks.tokenizers import char_tokenizer

DIGITS = "0123456789"


@dataclass(frozen=True)
class DigitTask:
    """Unlimited problems on digit strings; a subclass says how one is solved.

    RL and test problems have `min_length` to `max_length` digits, cold-start examples `warmup_min_length` to
    `max_length`, all lengths equally likely: models of this size learn the long ones from a mixture only.
    Raises ValueError unless 2 <= warmup_min_length <= max_length and 2 <= min_length <= max_length.
    """

    min_length: int = 20
    max_length: int = 20
    warmup_min_length: int = 2

    train_size = None
    test_size = None

    def __post_init__(self) -> None:
        for name in ("min_length", "warmup_min_length"):
            length = getattr(self, name)
            # One digit alone makes ten prompts: too few to split.
            if not 2 <= length <= self.max_length:
                raise ValueError(f"{name} must lie in 2 .. max_length ({self.max_length}), got {length}")

    def train(self, index: int) -> Problem:
        return self._draw("train", index, self.min_length)

    def test(self, index: int) -> Problem:
        return self._draw("test", index, self.min_length)

    def warmup(self, index: int) -> Problem:
        return self._draw("warmup", index, self.warmup_min_length)

    def reward(self, problem: Problem, response_text: str) -> float:
        """1.0 for exactly the answer, 0.0 for anything else."""
        return float(response_text == problem.answer)

    def default_tokenizer(self) -> PreTrainedTokenizerFast:
        return char_tokenizer(DIGITS + "=")

    def solve(self, digits: str) -> str:
        """The answer for a string of digits."""
        raise NotImplementedError

    def _draw(self, split: str, index: int, min_length: int) -> Problem:
        """Draws until the prompt's hash puts it in the split asked for."""
        # Seeding with a string hashes it with SHA-512: the same in every process, unlike hash().
        random = Random(f"{type(self).__name__} {split} {index}")
        length = random.randint(min_length, self.max_length)
        while True:
            digits = "".join(random.choices(DIGITS, k=length))
            prompt = f"{digits}="
            if is_held_out(prompt, TEST_FRACTION) == (split == "test"):
                return Problem(prompt, self.solve(digits), {"length": length})


@dataclass(frozen=True)
class Sort(DigitTask):
    """Digits in ascending order, repeats kept."""

    def solve(self, digits: str) -> str:
        return "".join(sorted(digits))


@dataclass(frozen=True)
class RunningSum(DigitTask):
    """Digit t of the answer is the sum of the first t digits, modulo 10."""

    def solve(self, digits: str) -> str:
        return "".join(str(total % 10) for total in accumulate(map(int, digits)))


@dataclass(frozen=True)
class Reverse(DigitTask):
    """The digits from last to first."""

    def solve(self, digits: str) -> str:
        return digits[::-1]
