"""Accuracy on held-out prompts, greedy and sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tqdm.auto import tqdm

from moe_rl.models import LanguageModel
from moe_rl.store import RunStore
from moe_rl.tasks import Problem, Task
from moe_rl.tasks.encode import prompt_ids
from moe_rl.training.config import TrainConfig
from moe_rl.training.grading import GuardedTask, grade
from moe_rl.training.nonfinite import collapse_when_sampling
from moe_rl.training.rollout import sample_responses
from moe_rl.training.seeds import random_stream

# Where the cold start's test problems begin in an unlimited test set, far from those of an evaluation.
COLD_START_FIRST = 1_000_000


def held_out(task: Task, prompts: int) -> list[Problem]:
    """The first `prompts` test problems, or all of a smaller test set."""
    return [task.test(i) for i in range(min(prompts, task.test_size or prompts))]


def held_out_for_cold_start(task: Task, prompts: int) -> list[Problem]:
    """Other test problems, so that stopping at a target does not select the accuracy that RL starts from.

    Of a finite test set the last ones, which a small set shares with `held_out`.
    """
    if task.test_size is None:
        return [task.test(COLD_START_FIRST + i) for i in range(prompts)]
    return [task.test(i) for i in range(max(0, task.test_size - prompts), task.test_size)]


def evaluate(
    lm: LanguageModel, task: GuardedTask, config: TrainConfig, store: RunStore, step: int, title: str
) -> None:
    """Log and print greedy and sampled accuracy on the held-out prompts."""
    problems = held_out(task, config.evaluation.prompts)
    limit, stream = config.rollout.at(step).max_new_tokens, (config.seed, step)
    with collapse_when_sampling(store, step):
        greedy = accuracy(lm, task, problems, temperature=0, max_new_tokens=limit, stream=stream)
        sampled = accuracy(
            lm, task, problems, temperature=config.rollout.temperature, max_new_tokens=limit, stream=stream
        )
    record = {"step": step, "eval/greedy": greedy, "eval/sampled": sampled, "eval/n": len(problems)}
    record["eval/grader_errors"] = task.report_errors(store, step, title)
    store.log("evals", record)
    shown = f"{greedy:.3f} greedy, {sampled:.3f} sampled"
    tqdm.write(f"{title}, step {step} of {config.steps}: held-out accuracy {shown}")


def accuracy(
    lm: LanguageModel,
    task: Task,
    problems: Sequence[Problem],
    *,
    temperature: float,
    max_new_tokens: int,
    stream: tuple[object, ...] = (),
) -> float:
    """Mean reward (a fraction) of one response to each problem; temperature 0 is greedy.

    `stream` names the random stream of a sampled evaluation.
    """
    with random_stream("evaluation", *stream):
        batch = sample_responses(
            lm,
            [prompt_ids(lm.tokenizer, problem) for problem in problems],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )
    rewards = [
        grade(lm, task, problem, ids) for problem, ids in zip(problems, batch.responses(), strict=True)
    ]
    return torch.tensor(rewards, dtype=torch.float64).mean().item()
