from dataclasses import replace

import pytest
import torch

from moe_rl.training.config import RolloutConfig
from moe_rl.training.groups import concatenate, overlong_penalty, sample_groups

CONFIG = RolloutConfig(prompts=6, responses=3, max_new_tokens=5)


class LongReward:
    """1 for a response of at least three characters: some groups of an untrained model have no signal."""

    def __init__(self, task):
        self.task, self.asked = task, []

    def train(self, index):
        self.asked.append(index)
        return self.task.train(index)

    def reward(self, problem, text):
        return float(len(text) >= 3)


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([1.0, 6.0, 7.0, 9.0, 10.0])
    assert overlong_penalty(lengths, max_new_tokens=10, cache=4).tolist() == [0.0, 0.0, -0.25, -0.75, -1.0]


def test_refill_replaces_groups_without_signal(lm, task):
    plain = sample_groups(lm, LongReward(task), CONFIG, seed=0, step=1)
    missing = 6 - int(plain.has_signal_P.sum())
    assert 0 < missing < 6, "this test needs a batch with both kinds of group"
    reward = LongReward(task)
    full = sample_groups(lm, reward, replace(CONFIG, refill=20), seed=0, step=1)
    assert full.has_signal_P.all()
    assert full.rounds > 1
    assert len(reward.asked) == len(set(reward.asked)) == 6 * full.rounds, "every round has fresh prompts"
    assert full.rewards_PG.shape == (6, 3)
    kept = plain.rewards_PG[plain.has_signal_P]
    assert torch.equal(full.rewards_PG[: len(kept)], kept)
    assert reward.asked[:6] == list(range(6))


def test_a_batch_keeps_its_size_when_refilling_does_not_help(lm, task):
    class Never(LongReward):
        def reward(self, problem, text):
            return 0.0

    groups = sample_groups(lm, Never(task), replace(CONFIG, refill=1), seed=0, step=1)
    assert groups.rewards_PG.shape == (6, 3)
    assert not groups.has_signal_P.any()
    assert groups.rounds == 2


def test_joined_batches_keep_every_response(lm, task):
    parts = [
        sample_groups(lm, LongReward(task), replace(CONFIG, max_new_tokens=n), seed=n, step=1) for n in (2, 5)
    ]
    both = concatenate(parts, lm.pad_id, rounds=2)
    assert both.batch.responses() == parts[0].batch.responses() + parts[1].batch.responses()
    for name in ("attention_mask_BT", "response_mask_BT", "sampler_logp_BT"):
        whole = getattr(both.batch, name)
        assert whole.sum() == pytest.approx(sum(getattr(p.batch, name).sum().item() for p in parts), rel=1e-6)
    assert torch.equal(both.rewards_PG, torch.cat([p.rewards_PG for p in parts]))
