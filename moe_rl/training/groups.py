"""Groups of responses with their rewards, and the two things DAPO (2503.14476) does to them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_rl.models import LanguageModel
from moe_rl.routing import RoutingTrace, record_routing
from moe_rl.tasks import Problem, Task
from moe_rl.tasks.encode import prompt_ids, response_text
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.config import RolloutConfig
from moe_rl.training.rollout import sample_responses
from moe_rl.training.seeds import random_stream

PROMPTS_PER_SEED = 10_000_000  # a seed's prompts are its own stretch of the task's stream


@dataclass(frozen=True)
class Groups:
    """G responses to each of P prompts, the rows of a group next to each other, in prompt order.

    `rewards_PG` as the task graded them; `rounds` of sampling it took (1 without dynamic sampling);
    `trace`, what the sampler's decoding routed, where it was recorded.
    """

    batch: RolloutBatch
    rewards_PG: Tensor
    rounds: int = 1
    trace: RoutingTrace | None = None

    @property
    def has_signal_P(self) -> Tensor:
        """bool: the rewards of the group are not all equal."""
        return (self.rewards_PG != self.rewards_PG[:, :1]).any(-1)

    def take(self, groups_P: Tensor) -> Groups:
        """Some of the groups, by index."""
        size = self.rewards_PG.shape[1]
        rows = (groups_P[:, None] * size + torch.arange(size)).flatten()
        return Groups(self.batch[rows], self.rewards_PG[groups_P], self.rounds)


def sample_groups(
    lm: LanguageModel, task: Task, config: RolloutConfig, seed: int, step: int, *, record: bool = False
) -> Groups:
    """Sample and grade one rollout batch; with `config.refill`, until its groups have a signal.

    `record` keeps the sampler's routing; it does not go with `config.refill`.

    Dynamic sampling (DAPO Eq. 11): groups whose rewards are all equal are replaced from up to `config.refill`
    further batches of fresh prompts; what is still missing then is filled with groups without signal, so
    that the batch keeps its size.
    """
    kept, idle = [], []
    for round_ in range(1 + config.refill):
        first = seed * PROMPTS_PER_SEED + ((step - 1) * (1 + config.refill) + round_) * config.prompts
        problems = [task.train(first + i) for i in range(config.prompts)]
        with random_stream(seed, "rollout", step, round_):
            groups = sample_and_grade(lm, task, problems, config, record)
        if config.refill == 0:
            return groups
        kept.append(groups.take(groups.has_signal_P.nonzero().flatten()))
        idle.append(groups.take((~groups.has_signal_P).nonzero().flatten()))
        if sum(len(part.rewards_PG) for part in kept) >= config.prompts:
            break
    full = concatenate([*kept, *idle], lm.pad_id, rounds=len(kept))
    return full.take(torch.arange(config.prompts))


def sample_and_grade(
    lm: LanguageModel, task: Task, problems: Sequence[Problem], config: RolloutConfig, record: bool
) -> Groups:
    """G responses to each problem, from torch's current random state, and the task's reward of each."""
    prompts = [ids for p in problems for ids in [prompt_ids(lm.tokenizer, p)] * config.responses]
    with record_routing(lm.model) if record else nullcontext() as recorder:
        batch = sample_responses(
            lm, prompts, max_new_tokens=config.max_new_tokens, temperature=config.temperature
        )
    trace = recorder.trace(mask=batch.attention_mask_BT) if recorder is not None else None
    texts = [response_text(lm.tokenizer, ids) for ids in batch.responses()]
    rewards = [task.reward(problems[row // config.responses], text) for row, text in enumerate(texts)]
    rewards_PG = torch.tensor(rewards, dtype=torch.float32).reshape(len(problems), config.responses)
    return Groups(batch, rewards_PG, trace=trace)


def concatenate(parts: Sequence[Groups], pad_id: int, rounds: int) -> Groups:
    """All groups of the parts, their batches padded to one width."""
    batch = RolloutBatch.cat([part.batch for part in parts if len(part.batch)], pad_id)
    return Groups(batch, torch.cat([part.rewards_PG for part in parts]), rounds)


def overlong_penalty(lengths_B: Tensor, max_new_tokens: int, cache: int) -> Tensor:
    """Soft overlong punishment [B], in [-1, 0], of response lengths in tokens (DAPO Eq. 13).

    0 up to max_new_tokens - cache, then falling linearly to -1 at max_new_tokens.
    """
    return ((max_new_tokens - cache - lengths_B) / cache).clamp(-1.0, 0.0)
