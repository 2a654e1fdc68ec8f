"""Responses of several turns: what the environment says between them, their rewards, their advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_rl.models import LanguageModel
from moe_rl.objectives import turn_advantages
from moe_rl.tasks import Problem, Task
from moe_rl.tasks.encode import said_ids
from moe_rl.training.batch import RolloutBatch
from moe_rl.training.grading import grade
from moe_rl.training.rollout import left_pad


def spoken_to(lm: LanguageModel, batch: RolloutBatch, problems: Sequence[Problem]) -> RolloutBatch:
    """The batch with what the environment says next to every row, whose responses then go on.

    `problems` are those of the coming turn. Its words are attended to and belong to no response. They end in
    the last column, so that the row before a sampled token is the one that scores it.
    """
    said = [said_ids(lm.tokenizer, problem) for problem in problems]
    ids, mask = (t.to(batch.input_ids_BT.device) for t in left_pad(said, lm.pad_id))
    longer = batch.longer({"input_ids_BT": ids, "attention_mask_BT": mask}, lm.pad_id)
    return replace(longer, finished_B=torch.zeros_like(batch.finished_B))


def grade_turns(lm: LanguageModel, task: Task, problems: Sequence[Problem], batch: RolloutBatch) -> Tensor:
    """Rewards [B, N], float64, of the N turns of every response."""
    by_turn = [batch.responses(turn) for turn in range(len(problems[0].turns))]
    rewards = [
        [grade(lm, task, turn, ids) for turn, ids in zip(problem.turns, responses, strict=True)]
        for problem, responses in zip(problems, zip(*by_turn, strict=True), strict=True)
    ]
    return torch.tensor(rewards, dtype=torch.float64)


def by_turn(prefix: str, rewards_BN: Tensor) -> dict[str, float]:
    """The mean reward of each turn as `<prefix>turn1`, …; nothing for a single turn."""
    if rewards_BN.shape[1] == 1:
        return {}
    means = rewards_BN.double().mean(0).tolist()
    return {f"{prefix}turn{number}": mean for number, mean in enumerate(means, start=1)}


def finite_turn_advantages(rewards_PGN: Tensor, turn_BT: Tensor, normalise: str) -> Tensor:
    """`turn_advantages` [B, T]; NaN on a turn of a group with a reward that is not finite.

    So the update with that group is not finite, and `optim.nonfinite` decides what becomes of it.
    """
    finite_PN = rewards_PGN.isfinite().all(1)
    safe_PGN = torch.where(finite_PN[:, None], rewards_PGN, 0.0)
    advantages_BT = turn_advantages(safe_PGN.to(turn_BT.device), turn_BT, normalise=normalise)
    finite_BN = finite_PN.repeat_interleave(rewards_PGN.shape[1], 0).to(turn_BT.device)
    finite_BT = finite_BN.gather(1, turn_BT.clamp_min(0)) | (turn_BT < 0)
    return torch.where(finite_BT, advantages_BT, math.nan)
