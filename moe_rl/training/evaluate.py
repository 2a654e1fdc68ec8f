"""Accuracy on held-out prompts, greedy and sampled."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from tqdm.auto import tqdm

from moe_rl.models import LanguageModel
from moe_rl.store import RunStore
from moe_rl.tasks import Problem, Task
from moe_rl.tasks.encode import prompt_ids
from moe_rl.training.config import TrainConfig
from moe_rl.training.grading import GuardedTask
from moe_rl.training.nonfinite import collapse_when_sampling
from moe_rl.training.rollout_config import RolloutConfig
from moe_rl.training.sampler import Sampler
from moe_rl.training.seeds import random_stream
from moe_rl.training.turns import by_turn, grade_turns

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
    """Log and print greedy and sampled accuracy on the held-out prompts.

    Responses may be as long as at any step: a schedule of lengths is no gain in accuracy by itself.
    """
    problems = held_out(task, config.evaluation.prompts)
    limit, stream = config.rollout.longest, (config.seed, step)
    with collapse_when_sampling(store, step):
        by_temperature = {"greedy": 0.0, "sampled": config.rollout.temperature}
        rewards = {
            name: held_out_rewards(
                lm, task, problems, temperature=temperature, max_new_tokens=limit, stream=stream
            )
            for name, temperature in by_temperature.items()
        }
    greedy, sampled = (rewards_BN.mean().item() for rewards_BN in rewards.values())
    record = {"step": step, "eval/greedy": greedy, "eval/sampled": sampled, "eval/n": len(problems)}
    for name, rewards_BN in rewards.items():
        record |= by_turn(f"eval/{name}_", rewards_BN)
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
    """Mean reward (a fraction) of one response to each problem, all turns alike; as `held_out_rewards`."""
    rewards_BN = held_out_rewards(
        lm, task, problems, temperature=temperature, max_new_tokens=max_new_tokens, stream=stream
    )
    return rewards_BN.mean().item()


def held_out_rewards(
    lm: LanguageModel,
    task: Task,
    problems: Sequence[Problem],
    *,
    temperature: float,
    max_new_tokens: int,
    stream: tuple[object, ...] = (),
) -> Tensor:
    """Rewards [B, N], float64, of the N turns of one response to each problem; temperature 0 is greedy.

    `max_new_tokens` is of a turn. `stream` names the random stream of a sampled evaluation.
    """
    sampler = Sampler(lm, RolloutConfig(max_new_tokens=max_new_tokens, temperature=temperature), version=0)
    with random_stream("evaluation", *stream):
        sampled = sampler.start([prompt_ids(lm.tokenizer, problem) for problem in problems], max_new_tokens)
        for turn in range(1, len(problems[0].turns)):
            sampled = sampler.answer(sampled, [problem.turns[turn] for problem in problems], turn)
    return grade_turns(lm, task, problems, sampled.batch)
