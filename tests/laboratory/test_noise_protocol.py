"""Long responses score as whole forwards do; gradients are those of updates; the tables add up."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from small_moe import SMALL, OnesReward

from moe_rl.laboratory.gradient_noise import minibatch_gradient
from moe_rl.laboratory.long_responses import InRounds, chunked_logp, posed_rounds, sample_long
from moe_rl.laboratory.noise_protocol import ARMS, NoiseOptions, measure_noise, noise_phases
from moe_rl.models import ModelConfig, load_model
from moe_rl.objectives import get_objective
from moe_rl.tasks import get_task
from moe_rl.training.config import OptimConfig, ReplayConfig, RolloutConfig, TrainConfig
from moe_rl.training.forward import Forced, Native
from moe_rl.training.groups import sample_groups
from moe_rl.training.learner import make_learner
from moe_rl.training.passes import old_policy_pass, split
from moe_rl.training.policy import score
from moe_rl.training.signal import learning_signal
from moe_rl.training.update import gradient_update

torch.set_num_threads(1)
CONFIG = TrainConfig(
    rollout=RolloutConfig(prompts=8, responses=8, max_new_tokens=6),
    optim=OptimConfig(lr=3e-3, minibatches=4, warmup_updates=0),
)
OPTIONS = NoiseOptions(updates=1, lengths=[4, 16, 40], responses=3, chunk=16, resamples=20)


def ones():
    return OnesReward(get_task("sort", min_length=4, max_length=4))


def loaded(**more):
    return load_model(ModelConfig(name="small", config=SMALL | more), get_task("sort").default_tokenizer)


@pytest.fixture
def lm():
    return loaded()


@pytest.mark.parametrize("window", [None, 9])
def test_long_responses_are_problem_after_problem_and_chunks_score_as_one_forward(window):
    lm = loaded(**({} if window is None else {"use_sliding_window": True, "sliding_window": window}))
    task = ones()
    posed, answer = posed_rounds(lm, task, responses=3, length=23)
    # "1234=" and back, with a stop token: 5 tokens each; 23 tokens of response take 5 rounds
    assert (answer, len(posed), posed[0].shape) == (5, 5, (3, 5))
    torch.manual_seed(0)
    batch = sample_long(lm.model, posed, answer, temperature=0.7)
    assert batch.input_ids_BT.shape == (3, 50) and batch.prompt_length == 5
    assert batch.response_mask_BT.tolist() == [([0.0] * 5 + [1.0] * 5) * 5] * 3
    for number, said in enumerate(posed):
        assert torch.equal(batch.input_ids_BT[:, 10 * number : 10 * number + 5], said)
    assert lm.tokenizer.decode(posed[1][2]) == task.test(2 * 5 + 1).prompt
    whole_BT = score(lm.model, batch, 0.7).logp_BT.detach()
    for chunk in (1000, 16, 7):
        found_BT = chunked_logp(lm.model, batch, 0.7, chunk)
        torch.testing.assert_close(found_BT[:, 5:], whole_BT[:, 5:], atol=2e-5, rtol=0)
    drawn = batch.response_mask_BT > 0
    torch.testing.assert_close(batch.sampler_logp_BT[drawn], whole_BT[drawn], atol=2e-5, rtol=0)


def test_the_cold_start_sees_several_problems_in_one_context():
    task = InRounds(get_task("sort", min_length=4, max_length=4), 3)
    plain = task.task
    second = task.warmup(1)
    assert [turn.prompt for turn in second.turns] == [plain.warmup(i).prompt for i in (3, 4, 5)]
    assert [turn.answer for turn in second.turns] == [plain.warmup(i).answer for i in (3, 4, 5)]
    assert task.train(7) == plain.train(7) and task.reward(plain.test(0), plain.test(0).answer) == 1.0


def test_every_seed_has_problems_of_its_own(lm):
    said = [posed_rounds(lm, ones(), 3, 23, seed)[0] for seed in (0, 1)]
    problems = [{tuple(row) for of_round in posed for row in of_round.tolist()} for posed in said]
    assert len(problems[0] & problems[1]) < 3, "of fifteen each, chance may repeat one"


def test_tasks_of_several_turns_are_refused(lm):
    with pytest.raises(ValueError, match="a task of several turns has none"):
        posed_rounds(lm, get_task("two_turn", min_length=3, max_length=3), 3, 40)


def test_problems_of_several_lengths_are_refused(lm):
    with pytest.raises(ValueError, match=r"set task.min_length = task.max_length"):
        posed_rounds(lm, get_task("sort", min_length=3, max_length=5), 3, 40)


def at_old_policy(lm, config=CONFIG):
    learner = make_learner(lm.model, get_objective("grpo"), config)
    plan = split(64, config.optim.minibatches, config.optim.microbatch)
    groups = sample_groups(learner, lm, ones(), 1)
    old = old_policy_pass(learner, groups, plan)
    return learner, groups.batch, old, learning_signal(learner, groups, old, plan), plan


@pytest.mark.parametrize("microbatch", [None, 4])
def test_a_minibatchs_gradient_is_that_of_its_update(lm, microbatch):
    config = replace(CONFIG, optim=replace(CONFIG.optim, microbatch=microbatch, max_grad_norm=1e9))
    learner, batch, old, signal, plan = at_old_policy(lm, config)
    found_D = minibatch_gradient(learner, learner.objective, batch, old.logp_BT, Native(), signal, plan[1])
    assert all(parameter.grad is None for parameter in lm.model.parameters())
    update = gradient_update(learner, batch, old, signal, plan[1], 0)  # leaves the gradient it stepped by
    expected_D = torch.cat([parameter.grad.flatten() for parameter in lm.model.parameters()])
    torch.testing.assert_close(found_D, expected_D)
    assert float(found_D.norm()) == pytest.approx(update.grad_norm, rel=1e-5)


def test_replay_of_the_own_trace_changes_no_gradient_at_the_old_policy_and_some_after_updates(lm):
    learner, batch, old, signal, plan = at_old_policy(lm)

    def gradient(routing):
        return minibatch_gradient(learner, learner.objective, batch, old.logp_BT, routing, signal, plan[3])

    torch.testing.assert_close(gradient(Forced(old.trace)), gradient(Native()))
    for number in range(3):
        gradient_update(learner, batch, old, signal, plan[number], number)
    assert not torch.equal(gradient(Forced(old.trace)), gradient(Native()))


@pytest.fixture
def measured(lm):
    told = []
    found = measure_noise(lm, ones(), get_objective("grpo"), CONFIG, OPTIONS, told.append)
    assert len(told) == noise_phases(OPTIONS)
    return found


def test_the_tables(measured):
    units, length, gradients = (
        pd.DataFrame(measured.tables[name]) for name in ("clip_units", "length", "gradients")
    )

    def unit(subject, metric):
        (row,) = units[(units["subject"] == subject) & (units["metric"] == metric)].to_dict("records")
        return row

    # float32 decoding differs from the float32 pass by rounding alone, bfloat16 by a thousand times that
    exact, narrow = (unit(f"{kind} sampler", "grpo/token") for kind in ("float32", "bfloat16"))
    assert 0 <= exact["value"] < 1e-4 < narrow["value"] < 1
    assert (narrow["n"], narrow["unit"]) == (8, "prompts")
    assert unit("update", "grpo/token")["value"] > 1e-3 and unit("update", "grpo/token")["n"] == 6
    assert (
        unit("bfloat16 sampler", "gspo/sequence")["value"]
        > 100 * unit("bfloat16 sampler", "grpo/sequence")["value"]
    )  # the same means, in units some 600 times smaller

    assert set(length["subject"]) == {"sampler", "update"} and set(length["at"]) == {4, 16, 40}
    for subject in ("sampler", "update"):
        of = length[length["subject"] == subject].set_index(["metric", "at"])["value"]
        for n in (4, 16, 40):
            assert of["product/variance", n] == pytest.approx(of["sequence/variance", n] * n**2)
            assert of["sequence/independent", n] == pytest.approx(of["token/variance", n] / n)
            inflation = of["sequence/variance", n] / of["sequence/independent", n]
            assert of["inflation", n] == pytest.approx(inflation)
    assert (length["n"] == 3).all()

    assert list(dict.fromkeys(gradients["subject"])) == list(ARMS)
    assert (gradients["n"] == 3).all()  # of four mini-batches one was trained on
    cosines = gradients[gradients["metric"].str.startswith("cosine")]["value"]
    assert cosines.between(-1, 1).all() and len(cosines) == 3 * len(ARMS)
    norms = gradients[gradients["metric"] == "norm"].set_index("subject")["value"]
    assert norms.nunique() == 5, "five gradients of five kinds"
    assert measured.summary["longest"] == 40


@pytest.mark.parametrize(
    "options, config, words",
    [
        (replace(OPTIONS, updates=3), CONFIG, "at least 2 must be left"),
        (replace(OPTIONS, lengths=[]), CONFIG, "noise.lengths"),
        (replace(OPTIONS, responses=1), CONFIG, "noise.responses=1: must be at least 2"),
        (replace(OPTIONS, sampler_dtype="float32"), CONFIG, "expected bfloat16 or float16"),
        (OPTIONS, replace(CONFIG, replay=ReplayConfig(source="old_policy")), "replay.source: an option of"),
        (
            OPTIONS,
            replace(CONFIG, rollout=replace(CONFIG.rollout, sampler_dtype="bfloat16")),
            "rollout.sampler_dtype: an option of training",
        ),
        (replace(OPTIONS, lengths=[200]), CONFIG, "max_position_embeddings=128"),
        (OPTIONS, replace(CONFIG, precision="bfloat16"), "precision, optim.epochs and optim.aux_loss_coef"),
    ],
)
def test_what_does_not_go_together_is_refused(lm, options, config, words):
    with pytest.raises(ValueError, match=words):
        measure_noise(lm, ones(), get_objective("grpo"), config, options)


def test_an_update_without_any_reward_difference_is_refused(lm):
    task = ones()
    task.reward = lambda problem, text: 1.0
    with pytest.raises(ValueError, match="mini-batch 1 are equal, so that its update is zero"):
        measure_noise(lm, task, get_objective("grpo"), CONFIG, OPTIONS)


def test_an_objective_with_needs_of_its_own_is_refused(lm):
    with pytest.raises(ValueError, match=r"PPO needs .*'values_BT'"):
        measure_noise(lm, ones(), get_objective("ppo"), CONFIG, OPTIONS)
