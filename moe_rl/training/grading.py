"""From sampled token ids to a reward."""

from __future__ import annotations

from collections.abc import Sequence

from moe_rl.models import LanguageModel
from moe_rl.tasks import Problem, Task
from moe_rl.tasks.encode import response_text


def grade(lm: LanguageModel, task: Task, problem: Problem, ids: Sequence[int]) -> float:
    """The task's reward of a response; 0 for one with an id that the tokenizer does not have.

    Checkpoints pad their embedding beyond the tokenizer, and decoding drops such ids without a word: a grader
    would pay for a text that the policy did not write.
    """
    if any(token >= len(lm.tokenizer) for token in ids):
        return 0.0
    return task.reward(problem, response_text(lm.tokenizer, ids))
