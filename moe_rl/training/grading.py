"""From sampled token ids to a reward, by graders that may fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast

from moe_rl.models import LanguageModel
from moe_rl.store import RunStore
from moe_rl.tasks import Problem, Task
from moe_rl.tasks.encode import response_text
from moe_rl.training.time_limit import require_main_thread, within

SHOWN = 500  # characters of a prompt or response in an event


class GuardedTask:
    """A task whose grader may raise or hang: the reward is then 0, and counted.

    `timeout_s` limits the wall clock of one response, None is no limit. A package that is not installed is no
    response's fault: that error passes. So do rewards that are not finite, which `optim.nonfinite` is about.
    Raises `ValueError` for a limit outside the main thread.
    """

    def __init__(self, task: Task, timeout_s: float | None) -> None:
        if timeout_s is not None:
            require_main_thread()
        self._task, self._timeout_s = task, timeout_s
        self._failed = 0
        self._kinds: set[str] = set()
        self._unreported: list[dict[str, Any]] = []

    @property
    def train_size(self) -> int | None:
        return self._task.train_size

    @property
    def test_size(self) -> int | None:
        return self._task.test_size

    def train(self, index: int) -> Problem:
        return self._task.train(index)

    def test(self, index: int) -> Problem:
        return self._task.test(index)

    def warmup(self, index: int) -> Problem:
        return self._task.warmup(index)

    def default_tokenizer(self) -> PreTrainedTokenizerFast:
        return self._task.default_tokenizer()

    def reward(self, problem: Problem, response_text: str) -> float:
        try:
            return float(within(self._timeout_s, self._task.reward, problem, response_text))
        except (ModuleNotFoundError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # whatever a grader raises; math-verify's own timeout is no Exception
            self._failed += 1
            if type(error).__name__ not in self._kinds:
                self._kinds.add(type(error).__name__)
                self._unreported.append(
                    {
                        "error": f"{type(error).__name__}: {error}",
                        "prompt": problem.prompt[:SHOWN],
                        "response": response_text[:SHOWN],
                    }
                )
            return 0.0

    def take_errors(self) -> tuple[int, list[dict[str, Any]]]:
        """How many responses the grader failed on since the last call, and the first of every new kind."""
        taken = self._failed, self._unreported
        self._failed, self._unreported = 0, []
        return taken

    def report_errors(self, store: RunStore, step: int, title: str) -> int:
        """`take_errors`: the count, each new kind logged as the event `grader_error` and printed."""
        count, first = self.take_errors()
        for details in first:
            store.event("grader_error", step=step, **details)
            tqdm.write(f"{title}, step {step}: the grader failed, reward 0: {details['error']}")
        return count


def grade(lm: LanguageModel, task: Task, problem: Problem, ids: Sequence[int]) -> float:
    """The task's reward of a response; 0 for one with an id that the tokenizer does not have.

    Checkpoints pad their embedding beyond the tokenizer, and decoding drops such ids without a word: a grader
    would pay for a text that the policy did not write.
    """
    if any(token >= len(lm.tokenizer) for token in ids):
        return 0.0
    return task.reward(problem, response_text(lm.tokenizer, ids))
