"""Two turns in one sequence: masks, positions, packing, rewards and advantages by turn."""

from dataclasses import replace

import pytest
import torch

from moe_rl.models import ModelConfig, load_model
from moe_rl.objectives import get_objective
from moe_rl.routing import record_routing
from moe_rl.tasks import get_task
from moe_rl.tasks.encode import worked_examples
from moe_rl.training.border import check_together, check_turns, require_room
from moe_rl.training.cold_start import supervised_loss
from moe_rl.training.config import ReplayConfig, RolloutConfig
from moe_rl.training.evaluate import accuracy, held_out_rewards
from moe_rl.training.groups import sample_groups
from moe_rl.training.learner import make_learner
from moe_rl.training.passes import old_policy_pass, split
from moe_rl.training.policy import score
from moe_rl.training.signal import learning_signal
from moe_rl.training.turns import finite_turn_advantages, spoken_to

from .conftest import SMALL


class Shares:
    """Turn 1 pays the share of 1s, turn 2 the share of 2s: an untrained model earns some of both."""

    def __init__(self, task):
        self.task = task

    def __getattr__(self, name):
        return getattr(self.task, name)

    def reward(self, problem, text):
        return text.count("1" if problem.later else "2") / max(1, len(text))


@pytest.fixture
def task():
    return get_task("two_turn", min_length=3, max_length=5)


@pytest.fixture
def ones_task(task):
    return Shares(task)


@pytest.fixture
def lm(task):
    return load_model(ModelConfig(name="small", config=SMALL), task.default_tokenizer)


def groups_of(lm, task, options, objective="gspo_token", record=False, share=None):
    learner = make_learner(lm.model, get_objective(objective), options)
    learner = learner if share is None else replace(learner, share_prompts=share)
    return learner, sample_groups(learner, lm, task, 1, record=record)


def test_the_environments_words_are_no_part_of_the_response(lm, ones_task, config):
    _, groups = groups_of(lm, ones_task, config())
    batch, S = groups.batch, groups.batch.prompt_length
    said = lm.tokenizer("<=")["input_ids"]
    ends = set()
    for row in range(len(batch)):
        ids, on = batch.input_ids_BT[row], batch.response_mask_BT[row] > 0
        first, second = batch.responses(0)[row], batch.responses(1)[row]
        attended = batch.attention_mask_BT[row] > 0
        seen = ids[S:][attended[S:]].tolist()
        assert seen == [*first, *said, *second]
        assert batch.responses()[row] == [*first, *second]
        assert batch.turn_BT[row][on].tolist() == [0] * len(first) + [1] * len(second)
        assert batch.turn_BT[row][~on].eq(-1).all()
        # a turn ends in a stop token, or is six tokens long
        ended = [turn[-1] in lm.stop_ids for turn in (first, second)]
        assert all(len(turn) == 6 or stopped for turn, stopped in zip((first, second), ended, strict=True))
        assert batch.finished_B[row] == all(ended)
        ends.add(len(first))
    assert len(ends) > 1, "this test needs a gap behind some first turns"
    assert batch.response_lengths_B.tolist() == [len(r) for r in batch.responses()]
    assert groups.turn_rewards_PGN.shape == (4, 4, 2)
    assert torch.allclose(groups.rewards_PG, groups.turn_rewards_PGN.mean(-1))


@pytest.mark.parametrize("share", [False, True])
def test_scores_are_those_of_the_sequence_without_gaps(lm, ones_task, config, share, monkeypatch):
    monkeypatch.setattr("moe_rl.training.rollout.WORTH_READING_ONCE", 0)
    _, groups = groups_of(lm, ones_task, config(), record=True, share=share)
    batch = groups.batch
    found = score(lm.model, batch, 1.0, share_prompts=share).logp_BT
    on_BT = batch.response_mask_BT > 0
    assert torch.allclose(found[on_BT], batch.sampler_logp_BT[on_BT], atol=2e-5)
    for row in range(0, len(batch), 3):
        kept = batch.attention_mask_BT[row] > 0
        ids, on = batch.input_ids_BT[row][kept], on_BT[row][kept]
        with torch.no_grad(), record_routing(lm.model) as recorder:
            logp = lm.model(input_ids=ids[None]).logits[0].log_softmax(-1)
        expected = logp[:-1].gather(-1, ids[1:, None])[:, 0][on[1:]]
        assert torch.allclose(found[row][on_BT[row]], expected, atol=2e-5)
        # the sampler's routing, gaps apart, is that of the sequence; its last token was never routed
        experts = recorder.trace().experts[0, :-1].sort(-1).values
        ours = groups.trace.experts[row][groups.trace.valid[row]].sort(-1).values
        assert torch.equal(ours.long()[: len(experts)], experts.long())


def test_advantages_of_a_turn_come_from_its_own_rewards(lm, ones_task, config):
    options = config(advantages_by="turn")
    learner, groups = groups_of(lm, ones_task, options)
    plan = split(len(groups.batch), 2, None)
    old = old_policy_pass(learner, groups, plan)
    advantages_BT = learning_signal(learner, groups, old, plan).advantages
    rewards = groups.turn_rewards_PGN.double()
    for row in range(len(groups.batch)):
        p, g = divmod(row, 4)
        for turn in (0, 1):
            group = rewards[p, :, turn]
            expected = (group[g] - group.mean()) / group.std() if group.std() > 1e-6 else torch.tensor(0.0)
            found = advantages_BT[row][groups.batch.turn_BT[row] == turn]
            assert torch.allclose(found.double(), expected.double().expand(len(found)), atol=1e-5)
    assert (advantages_BT[groups.batch.turn_BT < 0] == 0).all()
    whole = learning_signal(replace(learner, config=config()), groups, old, plan).advantages
    assert whole.shape == (16,), "by response: the mean of the turns' rewards"


def test_an_infinite_reward_spoils_its_turn_of_its_group_alone():
    rewards_PGN = torch.tensor([[[1.0, torch.inf], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]])
    turn_BT = torch.tensor([[-1, 0, 1]] * 4)
    found = finite_turn_advantages(rewards_PGN, turn_BT, "mean")
    assert torch.equal(found[:, 1], torch.tensor([0.5, -0.5, 0.5, -0.5]))
    assert found[:2, 2].isnan().all() and found[2:, 2].tolist() == [-0.5, 0.5]
    assert found[:, 0].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("objective", "by"), [("gspo_token", "turn"), ("grpo", "turn"), ("gspo", "response")]
)
def test_two_turns_train(tmp_path, lm, run, config, objective, by):
    options = config(steps=2, advantages_by=by, replay=ReplayConfig("old_policy"), drift_every=2)
    result = run(tmp_path, lm, options, objective)
    updates, steps, evals = result.updates(), result.steps(), result.evals()
    assert updates.query("update == 1")["ratio/token_max"].tolist() == [1.0, 1.0]
    assert updates["grad_norm"].gt(0).all()
    both = (steps["reward/turn1"] + steps["reward/turn2"]) / 2
    assert steps["reward/mean"].tolist() == pytest.approx(both.tolist(), abs=1e-6)
    for name in ("greedy", "sampled"):
        turns = (evals[f"eval/{name}_turn1"] + evals[f"eval/{name}_turn2"]) / 2
        assert evals[f"eval/{name}"].tolist() == pytest.approx(turns.tolist(), abs=1e-9)


def test_held_out_rewards_by_hand(lm, ones_task):
    problems = [ones_task.test(i) for i in range(8)]
    rewards_BN = held_out_rewards(lm, ones_task, problems, temperature=0, max_new_tokens=5)
    assert rewards_BN.shape == (8, 2) and rewards_BN.std(0).gt(0).all()
    mean = accuracy(lm, ones_task, problems, temperature=0, max_new_tokens=5)
    assert mean == pytest.approx(rewards_BN.mean().item(), abs=1e-12)


def test_two_examples_of_a_cold_start_are_the_masked_sequence(lm, task):
    """Each turn behind those before it, as one sequence with the answers' tokens counted."""
    problem = task.warmup(3)
    first, second = worked_examples(lm.tokenizer, problem)
    ids = torch.tensor([[*second[0], *second[1]]])
    logp = lm.model(input_ids=ids).logits[0].log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    counted = [*range(len(first[0]), len(first[0] + first[1])), *range(len(second[0]), ids.shape[1])]
    expected = -sum(logp[t - 1] for t in counted)
    assert supervised_loss(lm, [first, second]).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("objective", ["gspo", "gmpo", "rspo", "dpo", "contrastive", "ppo"])
def test_objectives_of_whole_responses_have_no_turns(objective, config):
    options = {"group_size": 4} if objective == "contrastive" else {}
    built = get_objective(objective, **options)
    with pytest.raises(ValueError, match=r"advantages_by=turn: .*use objective=gspo_token"):
        check_together(built, config(advantages_by="turn"))
    check_together(built, config())


def test_options_of_one_turn_are_refused(task, config):
    one = get_task("sort", min_length=3, max_length=5)
    with pytest.raises(ValueError, match="advantages_by=turn: the task has one turn"):
        check_turns(one, config(advantages_by="turn"))
    for name in ("ahead", "overlong_cache"):
        options = config(rollout=RolloutConfig(prompts=4, responses=4, max_new_tokens=6, **{name: 2}))
        check_turns(one, options)
        with pytest.raises(ValueError, match=rf"rollout.{name}=2 is of responses of one turn, .* has 2"):
            check_turns(task, options)
    with pytest.raises(ValueError, match="not with advantages_by=turn"):
        config(advantages_by="turn", rollout=RolloutConfig(prompts=4, refill=1)).check()
    with pytest.raises(ValueError, match="advantages_by='token': expected response or turn"):
        config(advantages_by="token").check()


def test_both_turns_must_fit_the_model(lm, task, config):
    longest = RolloutConfig(prompts=4, max_new_tokens=60)
    require_room(lm, task, config(rollout=longest))  # 6 + 2 x 60 + 2 = 128
    with pytest.raises(ValueError, match="max_position_embeddings=128"):
        require_room(lm, task, config(rollout=replace(longest, max_new_tokens=61)))


def test_words_of_different_length_end_in_one_column(lm, ones_task, config):
    _, groups = groups_of(lm, ones_task, config())
    batch = groups.batch[slice(0, 2)]
    problems = [ones_task.train(0), ones_task.train(0).later[0]]
    asked = spoken_to(lm, batch, problems)
    width = asked.input_ids_BT.shape[1] - batch.input_ids_BT.shape[1]
    assert width == len(problems[0].prompt)
    assert asked.attention_mask_BT[:, -width:].tolist() == [[1] * width, [0] * (width - 2) + [1, 1]]
    assert lm.tokenizer.decode(asked.input_ids_BT[1, -2:].tolist()) == "<="
    assert not asked.finished_B.any() and asked.turn_BT[:, -width:].eq(-1).all()
