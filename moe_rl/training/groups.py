"""Groups of responses with their rewards, and the two things DAPO (2503.14476) does to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_rl.models import LanguageModel
from moe_rl.objectives import equal_rewards
from moe_rl.routing import RoutingTrace
from moe_rl.tasks import Problem, Task
from moe_rl.tasks.encode import prompt_ids
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.rollout_config import RolloutConfig
from moe_rl.training.sampler import Sampled, Sampler, copy_in
from moe_rl.training.seeds import random_stream
from moe_rl.training.turns import grade_turns

if TYPE_CHECKING:
    from moe_rl.training.learner import Learner

PROMPTS_PER_SEED = 10_000_000  # a seed's prompts are its own stretch of the task's stream


@dataclass(frozen=True)
class Groups:
    """G responses to each of P prompts, the rows of a group next to each other, in prompt order.

    `rewards_PG` as the task graded them, of several turns the mean of `turn_rewards_PGN`; `trace`, what the
    sampler's decoding routed, where it was recorded; `rounds` of sampling it took and the mean reward
    `sampled_reward` of all their responses, also of those that dynamic sampling set aside; `version` of the
    weights that sampled last, as in `RolloutBatch`.
    """

    batch: RolloutBatch
    rewards_PG: Tensor
    sampled_reward: float
    turn_rewards_PGN: Tensor
    rounds: int = 1
    trace: RoutingTrace | None = None
    version: int = 0

    @property
    def has_signal_P(self) -> Tensor:
        """bool: the rewards of the group are not all equal, so that its advantages are not all 0."""
        return ~equal_rewards(self.rewards_PG)

    def take(self, groups_P: Tensor) -> Groups:
        """Some of the groups, by index."""
        size = self.rewards_PG.shape[1]
        rows = (groups_P[:, None] * size + torch.arange(size)).flatten()
        return replace(
            self,
            batch=self.batch[rows],
            rewards_PG=self.rewards_PG[groups_P],
            turn_rewards_PGN=self.turn_rewards_PGN[groups_P],
        )


def sample_groups(
    learner: Learner,
    lm: LanguageModel,
    task: Task,
    step: int,
    *,
    record: bool = False,
    ahead: Sampled | None = None,
) -> Groups:
    """Sample and grade the rollout batch of a step; with `rollout.refill`, until its groups have a signal.

    `lm` holds the learner's policy. `record` keeps the sampler's routing; it does not go with `refill`.
    `ahead` are the first tokens of the responses, where `sample_ahead` drew them before.

    Dynamic sampling (DAPO Eq. 11): groups whose rewards are all equal are replaced from up to `refill`
    further batches of fresh prompts; what is still missing then is filled with groups without signal, spread
    evenly, so that the batch keeps its size and every mini-batch its share of signal.
    """
    config, seed = learner.config.rollout, learner.config.seed
    sampler = sampler_of(learner, lm, step, record)
    drawn: list[Groups] = []
    for round_ in range(1 + config.refill):
        problems = problems_of(learner, task, step, round_)
        with random_stream(seed, "rollout", step, round_):
            drawn.append(sample_and_grade(sampler, task, problems, ahead))
        if sum(int(groups.has_signal_P.sum()) for groups in drawn) >= config.prompts:
            break
    if config.refill == 0:
        return drawn[0]
    whole = concatenate(drawn, lm.pad_id)
    kept = whole.has_signal_P.nonzero().flatten()[: config.prompts]
    idle = (~whole.has_signal_P).nonzero().flatten()[: config.prompts - len(kept)]
    return whole.take(interleave(kept, idle))


def sample_ahead(
    learner: Learner, lm: LanguageModel, task: Task, step: int, *, record: bool = False
) -> Sampled | None:
    """The first `rollout.ahead` tokens of the responses of the step after `step`, by this step's weights.

    To be called before the updates of `step`. None where there is no such option or no such step.
    """
    config = learner.config
    if not config.rollout.ahead or step == config.steps:
        return None
    sampler = sampler_of(learner, lm, step, record)
    problems = problems_of(learner, task, step + 1)
    with random_stream(config.seed, "ahead", step + 1):
        return sampler.start(prompts_of(sampler, problems), config.rollout.ahead)


def sampler_of(learner: Learner, lm: LanguageModel, step: int, record: bool) -> Sampler:
    """The sampler with the weights as they are now, after `step` - 1 steps, under the options of `step`."""
    config = learner.config.rollout.at(step)
    lm = lm if config.sampler_dtype is None else copy_in(lm, getattr(torch, config.sampler_dtype))
    return Sampler(lm, config, step - 1, record, learner.share_prompts)


def problems_of(learner: Learner, task: Task, step: int, round_: int = 0) -> list[Problem]:
    """The problems of a step, from the seed's stretch of the task's stream."""
    config = learner.config.rollout
    first = learner.config.seed * PROMPTS_PER_SEED + first_prompt(config, step, round_)
    return [task.train(first + i) for i in range(config.prompts)]


def prompts_of(sampler: Sampler, problems: Sequence[Problem]) -> list[list[int]]:
    """The prompt of each problem, once for every response of its group."""
    return [ids for p in problems for ids in [prompt_ids(sampler.lm.tokenizer, p)] * sampler.config.responses]


def first_prompt(config: RolloutConfig, step: int, round_: int = 0) -> int:
    """Where a step's prompts begin in the seed's stretch of the task's stream.

    With a query set of N prompts, a set is the next N of the stream, gone through in order and again.
    """
    if config.query_set is None:
        return ((step - 1) * (1 + config.refill) + round_) * config.prompts
    sets, within = divmod(step - 1, config.query_set_steps) if config.query_set_steps else (0, step - 1)
    return sets * config.query_set + within * config.prompts % config.query_set


def interleave(first: Tensor, second: Tensor) -> Tensor:
    """Both in their own order, spread evenly over the result."""
    places = [(torch.arange(len(part)) + 0.5) / max(len(part), 1) for part in (first, second)]
    return torch.cat([first, second])[torch.cat(places).argsort(stable=True)]


def sample_and_grade(
    sampler: Sampler, task: Task, problems: Sequence[Problem], ahead: Sampled | None = None
) -> Groups:
    """G responses to each problem, from torch's current random state, and the task's reward of each."""
    config = sampler.config
    of_row = [problem for problem in problems for _ in range(config.responses)]
    if ahead is None:
        sampled = sampler.start(prompts_of(sampler, problems), config.max_new_tokens)
    else:
        sampled = sampler.go_on(ahead, config.max_new_tokens - config.ahead)
    for turn in range(1, len(problems[0].turns)):
        sampled = sampler.answer(sampled, [problem.turns[turn] for problem in of_row], turn)
    rewards_BN = grade_turns(sampler.lm, task, of_row, sampled.batch)
    rewards_PGN = rewards_BN.float().reshape(len(problems), config.responses, -1)
    rewards_PG = rewards_PGN.mean(-1)
    return Groups(
        sampled.batch,
        rewards_PG,
        rewards_PG.mean().item(),
        turn_rewards_PGN=rewards_PGN,
        trace=sampled.trace,
        version=sampler.version,
    )


def concatenate(parts: Sequence[Groups], pad_id: int) -> Groups:
    """All groups of equally large parts, their batches padded to one width."""
    batch = RolloutBatch.cat([part.batch for part in parts], pad_id)
    rewards_PG = torch.cat([part.rewards_PG for part in parts])
    rewards_PGN = torch.cat([part.turn_rewards_PGN for part in parts])
    mean = rewards_PG.mean().item()
    return Groups(batch, rewards_PG, mean, rewards_PGN, rounds=len(parts), version=parts[-1].version)


def overlong_penalty(lengths_B: Tensor, max_new_tokens: int, cache: int) -> Tensor:
    """Soft overlong punishment [B], in [-1, 0], of response lengths in tokens (DAPO Eq. 13).

    0 up to max_new_tokens - cache, then falling linearly to -1 at max_new_tokens.
    """
    return ((max_new_tokens - cache - lengths_B) / cache).clamp(-1.0, 0.0)
