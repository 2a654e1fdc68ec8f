"""What a task is: problems by index, and a verifiable reward."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Problem:
    """One prompt with the text of a right response.

    `answer` is the whole response a cold start imitates, end-of-sequence excluded; `metadata` is what the
    task's own grader needs and what a report may show. `later` are the turns that follow: the prompt of each
    is what the environment says after the response before it, and each is rewarded as a problem of its own.
    """

    prompt: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    later: "tuple[Problem, ...]" = ()

    @property
    def turns(self) -> "tuple[Problem, ...]":
        """The problem of every turn, this one first; all problems of a task have as many."""
        return (self, *self.later)


class Task(Protocol):
    """Problems and their reward. Every method is a pure function of its arguments, in any process.

    `train_size` and `test_size` count the problems of a finite task and are None where there is no end.
    """

    @property
    def train_size(self) -> int | None: ...

    @property
    def test_size(self) -> int | None: ...

    def train(self, index: int) -> Problem:
        """RL problem `index` >= 0. A finite task starts a new epoch, reshuffled, every `train_size`."""
        ...

    def test(self, index: int) -> Problem:
        """Held-out problem `index` >= 0; no prompt is ever both here and in `train` or `warmup`.

        Raises IndexError from `test_size` on, where there is one: a test problem is never counted twice.
        """
        ...

    def warmup(self, index: int) -> Problem:
        """Cold-start example `index` >= 0, of mixed difficulty where the task has difficulties."""
        ...

    def reward(self, problem: Problem, response_text: str) -> float:
        """Reward in [0, 1] of a response, given as text without special tokens.

        May raise on a text that its grader cannot take: training counts that, as a reward of 0.
        """
        ...

    def default_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of a model built from a config, one that covers this task's texts."""
        ...
