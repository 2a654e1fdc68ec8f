from dataclasses import replace

import pytest
import torch

from moe_rl.objectives import get_objective
from moe_rl.routing import expert_change, record_routing
from moe_rl.training.config import OptimConfig, RolloutConfig, TrainConfig
from moe_rl.training.grading import grade
from moe_rl.training.groups import concatenate, interleave, overlong_penalty, sample_groups
from moe_rl.training.learner import make_learner
from moe_rl.training.policy import score
from moe_rl.training.rollout import require_fit

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


def sampled(lm, task, rollout=CONFIG, seed=0, record=False):
    config = TrainConfig(rollout=rollout, seed=seed, optim=OptimConfig(minibatches=1))
    learner = replace(make_learner(lm.model, get_objective("grpo"), config), share_prompts=False)
    return sample_groups(learner, lm, task, step=1, record=record)


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([1.0, 6.0, 7.0, 9.0, 10.0])
    assert overlong_penalty(lengths, max_new_tokens=10, cache=4).tolist() == [0.0, 0.0, -0.25, -0.75, -1.0]


def test_refill_replaces_groups_without_signal(lm, task):
    plain = sampled(lm, LongReward(task))
    missing = 6 - int(plain.has_signal_P.sum())
    assert 0 < missing < 6, "this test needs a batch with both kinds of group"
    reward = LongReward(task)
    full = sampled(lm, reward, replace(CONFIG, refill=20))
    assert full.has_signal_P.all()
    assert full.rounds > 1
    assert len(reward.asked) == len(set(reward.asked)) == 6 * full.rounds, "every round has fresh prompts"
    assert full.rewards_PG.shape == (6, 3)
    kept = plain.rewards_PG[plain.has_signal_P]
    assert torch.equal(full.rewards_PG[: len(kept)], kept)
    assert full.sampled_reward != pytest.approx(full.rewards_PG.mean().item()), "the mean is of all sampled"
    assert reward.asked[:6] == list(range(6))


def test_a_batch_keeps_its_size_when_refilling_does_not_help(lm, task):
    class Never(LongReward):
        def reward(self, problem, text):
            return 0.0

    groups = sampled(lm, Never(task), replace(CONFIG, refill=1))
    assert groups.rewards_PG.shape == (6, 3)
    assert not groups.has_signal_P.any()
    assert groups.rounds == 2


def test_joined_batches_keep_every_response(lm, task):
    parts = [sampled(lm, LongReward(task), replace(CONFIG, max_new_tokens=n), seed=n) for n in (2, 5)]
    both = concatenate(parts, lm.pad_id)
    assert both.batch.responses() == parts[0].batch.responses() + parts[1].batch.responses()
    for name in ("attention_mask_BT", "response_mask_BT", "sampler_logp_BT"):
        whole = getattr(both.batch, name)
        assert whole.sum() == pytest.approx(sum(getattr(p.batch, name).sum().item() for p in parts), rel=1e-6)
    assert torch.equal(both.rewards_PG, torch.cat([p.rewards_PG for p in parts]))


def test_groups_without_signal_are_spread_over_the_batch():
    order = interleave(torch.tensor([0, 2, 5]), torch.tensor([1, 3, 4, 6, 7, 8]))
    assert order.tolist() == [1, 0, 3, 4, 2, 6, 7, 5, 8]
    assert interleave(torch.tensor([3]), torch.tensor([], dtype=torch.long)).tolist() == [3]


def test_sampling_in_slices_pads_to_one_width(lm, task):
    whole = sampled(lm, LongReward(task))
    sliced = sampled(lm, LongReward(task), replace(CONFIG, microbatch=4), record=True)
    prompt = slice(0, whole.batch.prompt_length)
    assert torch.equal(whole.batch.input_ids_BT[:, prompt], sliced.batch.input_ids_BT[:, prompt])
    scores = score(lm.model, sliced.batch, 1.0)
    mask = sliced.batch.response_mask_BT > 0
    assert torch.allclose(scores.logp_BT[mask], sliced.batch.sampler_logp_BT[mask], atol=2e-5)
    with torch.no_grad(), record_routing(lm.model) as recorder:
        score(lm.model, sliced.batch, 1.0)
    last = sliced.batch.attention_mask_BT.sum(-1) > 0
    assert last.all()
    assert expert_change(sliced.trace, recorder.trace()).experts == 0.0


def test_an_id_beyond_the_tokenizer_earns_nothing(lm, task):
    problem = task.train(0)
    right = lm.tokenizer(problem.answer)["input_ids"]
    assert grade(lm, task, problem, [*right, 1]) == 1.0
    assert grade(lm, task, problem, [*right, len(lm.tokenizer), 1]) == 0.0


def test_a_prompt_that_does_not_fit_is_refused(lm):
    with pytest.raises(ValueError, match=r"prompt 1 of a batch has 126 tokens.*max_position_embeddings=128"):
        require_fit(lm, [[3], [3] * 126], max_new_tokens=3)
    require_fit(lm, [[3] * 125], max_new_tokens=3)
