"""Any family of reasoning-gym as a task: split by prompt, the score made a reward of 0 or 1.

Two habits of the library are kept out. Item i is drawn from seed + i, so neighbouring seeds and its
ReseedingDataset repeat each other's items: here one seed serves all, and a hash of the question splits.
Scorers pay something for junk: here a score counts only from `threshold` on.
"""

import re
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cached_property
from random import Random
from types import ModuleType
from typing import Any

from transformers import PreTrainedTokenizerFast

from moe_rl.tasks.base import Problem
from moe_rl.tasks.splits import TEST_FRACTION, is_held_out
from moe_rl.tasks.tokenizers import bpe_tokenizer

SEED = 0
MAX_DRAWS = 1000  # the wrong split this often in a row: the family has hardly any distinct questions
JUNK = ("", "junk")

# extract -> (what the prompt asks for, how an answer is written, how it is found again)
FORMATS = {
    "text": ("", "{}", r"(.*)"),
    "line": ('\nEnd with the answer after "Answer:".', "Answer: {}", r".*Answer:(.*)"),
    "tag": (
        "\nPut the answer between <answer> and </answer>.",
        "<answer>{}</answer>",
        r".*<answer>(.*?)</answer>.*",
    ),
}


@dataclass(frozen=True)
class ReasoningGym:
    """Problems of one reasoning-gym family, drawn with replacement, without end.

    `options` go to the family's config, and say its difficulty; `warmup_options` change some of them for the
    cold start. `extract` says which part of a response is the answer: "text" all of it, "line" what follows
    the last "Answer:", "tag" what the last <answer>...</answer> holds; the last two ask for it in the prompt,
    and nothing found is a reward of 0. `format_reward` is that of a wrong answer given as asked (DeepSeek-R1,
    2501.12948 §2.2.2): without it, a model that is rarely right has nothing to learn from. It counts in every
    mean reward, an accuracy included. `solution` is the key in a family's metadata (gsm_symbolic: answer_cot)
    of a worked solution, for cold starts to imitate in front of the answer. A score in [0, 1] from
    `threshold` on is a reward of 1. `size` is the number of items drawn from; a few families (acre,
    word_ladder) need a lower one.

    Raises ValueError for an unknown family or option, and for a family whose scorer pays for junk;
    ModuleNotFoundError without reasoning-gym.
    """

    family: str = "chain_sum"
    options: dict[str, Any] = field(default_factory=dict)
    warmup_options: dict[str, Any] = field(default_factory=dict)
    extract: str = "text"
    solution: str | None = None
    format_reward: float = 0.0
    threshold: float = 1.0
    size: int = 100_000

    train_size = None
    test_size = None

    def __post_init__(self) -> None:
        if self.extract not in FORMATS:
            raise ValueError(f"extract must be one of {', '.join(FORMATS)}, got {self.extract!r}")
        if self.format_reward and self.extract == "text":
            raise ValueError(
                f"format_reward={self.format_reward}: with extract=text there is no format to pay for; use "
                "line or tag"
            )
        if not 0 <= self.format_reward < 1:
            raise ValueError(f"format_reward must lie in [0, 1), got {self.format_reward}")
        if self.solution is not None and self.extract == "text":
            raise ValueError(
                f"solution={self.solution!r} puts text in front of the answer: it needs extract=line or tag"
            )
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold must lie in (0, 1], got {self.threshold}")
        problem = self.train(0)
        paid = [text for text in JUNK if self._pays(text, problem)]
        if paid:
            raise ValueError(
                f"reasoning_gym family {self.family} scores {paid[0]!r} at {self.threshold} or more, so its "
                "reward says nothing: raise the threshold or choose another family"
            )

    def train(self, index: int) -> Problem:
        return self._draw("train", index)

    def test(self, index: int) -> Problem:
        return self._draw("test", index)

    def warmup(self, index: int) -> Problem:
        problem = self._draw("warmup", index)
        if not problem.answer:
            raise ValueError(
                f"reasoning_gym family {self.family} writes no answer to imitate, only a scorer: "
                "start from a model that needs no cold start, or choose another family"
            )
        return problem

    def reward(self, problem: Problem, response_text: str) -> float:
        """1.0 where the family scores the extracted answer at `threshold` or more; else `format_reward`
        where there is an answer, 0.0 where there is none.

        Raises what the family's scorer raises on a text that it did not expect.
        """
        found = re.fullmatch(FORMATS[self.extract][2], response_text, re.DOTALL)
        answer = "" if found is None else found[1].strip()
        if found is not None and self._score(answer, problem) >= self.threshold:
            return 1.0
        return self.format_reward if answer else 0.0

    def default_tokenizer(self) -> PreTrainedTokenizerFast:
        """BPE with single digits, trained on cold-start and RL problems, never on test problems."""
        problems = [draw(index) for draw in (self.train, self.warmup) for index in range(250)]
        return bpe_tokenizer(problem.prompt + problem.answer for problem in problems)

    @cached_property
    def _dataset(self) -> Any:
        return _create(self.family, self.options, self.size)

    @cached_property
    def _warmup_dataset(self) -> Any:
        return _create(self.family, {**self.options, **self.warmup_options}, self.size)

    def _draw(self, split: str, index: int) -> Problem:
        """Draws until the question's hash puts it in the split asked for."""
        dataset = self._warmup_dataset if split == "warmup" else self._dataset
        request, written, _ = FORMATS[self.extract]
        random = Random(f"{split} {index}")
        for _ in range(MAX_DRAWS):
            entry = dataset[random.randrange(self.size)]
            if is_held_out(entry["question"], TEST_FRACTION) == (split == "test"):
                answer = (
                    "" if entry["answer"] is None else self._worked(entry) + written.format(entry["answer"])
                )
                return Problem(f"{entry['question']}{request}\n", answer, entry)
        raise ValueError(
            f"reasoning_gym family {self.family} with options {self.options} has too few distinct questions "
            f"for a {split} split: widen the options"
        )

    def _worked(self, entry: dict[str, Any]) -> str:
        """The worked solution and a line break, without GSM8K's last line, which repeats the answer."""
        if self.solution is None:
            return ""
        if self.solution not in entry["metadata"]:
            raise ValueError(
                f"reasoning_gym family {self.family} has no metadata {self.solution!r} with solutions: "
                f"it has {', '.join(entry['metadata'])}"
            )
        return re.sub(r"\n#### .*$", "", str(entry["metadata"][self.solution])) + "\n"

    def _score(self, answer: str, problem: Problem) -> float:
        return float(self._dataset.score_answer(answer, dict(problem.metadata)))

    def _pays(self, junk: str, problem: Problem) -> bool:
        try:
            return self._score(junk, problem) >= self.threshold
        except Exception:  # whatever a family's parser raises on a text that is no answer
            return False


def _create(family: str, options: dict[str, Any], size: int) -> Any:
    """A reasoning-gym dataset; what is wrong with family or options as a ValueError of one line."""
    families = _reasoning_gym().factory.DATASETS
    if family not in families:
        near = get_close_matches(family, families, n=3) or ["chain_sum", "gsm_symbolic", "spell_backward"]
        raise ValueError(f"unknown reasoning_gym family {family!r}: did you mean {', '.join(near)}?")
    known = [option.name for option in fields(families[family][1]) if option.name not in ("seed", "size")]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"reasoning_gym family {family} has no option {unknown[0]!r}: it has {', '.join(known)}"
        )
    try:
        return _reasoning_gym().create_dataset(family, seed=SEED, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"reasoning_gym family {family} refuses options {options} at size {size}: {error}"
        ) from error


def _reasoning_gym() -> ModuleType:
    """The library, imported when first needed: it takes a second and brings a plotting library along."""
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'task reasoning_gym needs the package reasoning_gym: pip install "moe_rl[reasoning]"'
        ) from error
    return reasoning_gym
