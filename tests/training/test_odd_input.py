"""Odd but legal responses, rewards, tokenizers and prompts train without a NaN; the rest is one line."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from tokenizers import normalizers

from moe_rl.models import ModelConfig, ModelError, load_model
from moe_rl.models.load import prepare
from moe_rl.objectives import OBJECTIVES, get_objective
from moe_rl.tasks import char_tokenizer, get_task
from moe_rl.training.border import (
    check_model,
    require_encodable,
    require_finite_weights,
    require_room,
)
from moe_rl.training.config import EvaluationConfig, ReplayConfig, RolloutConfig

from .conftest import SMALL

OPTIONS = {"dr_grpo": {"length_divisor": 6.0}, "contrastive": {"group_size": 4}}


def biased(lm, token, by):
    """The same policy with a constant added to one token's logit."""
    bias = torch.zeros(lm.model.get_output_embeddings().weight.shape[0])
    bias[token] = by
    lm.model.get_output_embeddings().register_forward_hook(lambda module, args, logits: logits + bias)
    return lm


def all_finite(run):
    for frame in (run.steps(), run.updates(), run.evals()):
        for name in frame:
            assert frame[name].explode().map(math.isfinite).all(), name
    return run


@pytest.mark.parametrize("name", OBJECTIVES)
def test_groups_with_equal_rewards_teach_nothing(tmp_path, lm, ones_task, run, config, name):
    ones_task.reward = lambda *_: 0.3
    before = [p.clone() for p in lm.model.parameters()]
    settings = config(steps=1, evaluation=EvaluationConfig(every=1, prompts=2))
    result = all_finite(run(tmp_path, lm, settings, name, **OPTIONS.get(name, {})))
    assert result.steps()["reward/zero_std_groups"].tolist() == [1.0]
    if name != "ppo":  # whose value head has the reward to learn
        assert result.updates()["grad_norm"].tolist() == [0.0, 0.0]
        assert all(torch.equal(a, b) for a, b in zip(before, lm.model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["grpo", "gspo", "ppo", "rspo"])
@pytest.mark.parametrize("source", ["old_policy", "rollout"])
def test_responses_that_end_before_they_begin(tmp_path, lm, ones_task, run, config, name, source):
    lm = biased(lm, lm.tokenizer.eos_token_id, 1e4)
    settings = config(steps=1, replay=ReplayConfig(source), evaluation=EvaluationConfig(every=1, prompts=2))
    steps = all_finite(run(tmp_path, lm, settings, name)).steps()
    assert steps["response/length"].tolist() == [1.0] and steps["response/truncated"].tolist() == [0.0]
    assert steps["reward/mean"].tolist() == [0.0]


@pytest.mark.parametrize("name", ["grpo", "gspo", "ppo", "rspo"])
def test_responses_that_never_end(tmp_path, lm, ones_task, run, config, name):
    lm = biased(lm, lm.tokenizer.eos_token_id, -1e4)
    rollout = RolloutConfig(prompts=4, responses=4, max_new_tokens=6, overlong_cache=2)
    settings = config(steps=1, rollout=rollout, evaluation=EvaluationConfig(every=1, prompts=2))
    steps = all_finite(run(tmp_path, lm, settings, name)).steps()
    assert steps["response/length"].tolist() == [6.0] and steps["response/truncated"].tolist() == [1.0]
    assert steps["reward/overlong_penalty"].tolist() == [-1.0]


def test_a_tokenizer_without_a_pad_token_pads_with_its_end(tmp_path, task, ones_task, run, config):
    def without_pad():
        tokenizer = task.default_tokenizer()
        tokenizer.pad_token = None
        return tokenizer

    lm = load_model(ModelConfig(name="small", config=SMALL), without_pad)
    assert lm.pad_id == lm.tokenizer.eos_token_id == 1
    all_finite(run(tmp_path, lm, config(steps=1)))


def test_a_tokenizer_without_an_end_is_refused(lm, task):
    lm.tokenizer.eos_token = None
    with pytest.raises(ModelError, match=r"has no EOS token.*set eos_token"):
        prepare(lm.model, lm.tokenizer)


def test_a_vocabulary_larger_than_the_embedding_is_refused_with_both_sizes(lm, tmp_path):
    lm.model.save_pretrained(tmp_path)
    char_tokenizer("0123456789=+-").save_pretrained(tmp_path)
    config = ModelConfig(name="mixed", source="checkpoint", path=str(tmp_path))
    with pytest.raises(ModelError, match=r"tokenizer has 15 tokens, the model's embedding 13 rows"):
        load_model(config, lambda: None)


def test_a_tokenizer_of_another_text_is_refused(lm, task):
    with pytest.raises(ValueError, match=r"cannot encode the task's prompt '\d+="):
        require_encodable(replace(lm, tokenizer=char_tokenizer("01234567=")), task)
    lossy = char_tokenizer("0123456789=")
    lossy.backend_tokenizer.normalizer = normalizers.Replace("3", "")
    with pytest.raises(ValueError, match=r"loses \['3'\] of the task's prompt"):
        require_encodable(replace(lm, tokenizer=lossy), task)


def test_prompts_longer_than_the_context_are_found_before_training(tmp_path, lm, config):
    lines = [f'{{"prompt": "{n}=", "answer": "{n}"}}\n' for n in range(200)]
    lines[150] = f'{{"prompt": "{"1" * 140}=", "answer": "1"}}\n'
    path = tmp_path / "a.jsonl"
    path.write_text("".join(lines))
    task = get_task("jsonl", path=str(path), grading="exact")
    message = (
        r"^(train|test) problem \d+ has a prompt of 141 tokens, with a response of 6 longer than the model's "
        r"max_position_embeddings=128: drop long problems from the task \('1{60}'…\) or lower "
        r"rollout.max_new_tokens=6$"
    )
    with pytest.raises(ValueError, match=message):
        require_room(lm, task, config())
    require_room(lm, get_task("sort", min_length=3, max_length=5), config())
    with pytest.raises(ValueError, match=r"prompt of 3 tokens, with a response of 126 longer than"):
        two_digits = get_task("sort", min_length=2, max_length=2)
        require_room(lm, two_digits, config(rollout=RolloutConfig(max_new_tokens=126)))


def test_a_damaged_weight_is_named(lm):
    require_finite_weights(lm.model)
    with torch.no_grad():
        lm.model.model.layers[1].self_attn.q_proj.weight[0, 0] = math.nan
    name = re.escape("model.layers.1.self_attn.q_proj.weight")
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinite weights"):
        require_finite_weights(lm.model)


def test_a_dense_model_is_not_asked_for_routing(dense_lm, lm, config):
    check_model(lm.model, get_objective("rspo"), config(replay=ReplayConfig("old_policy")))
    check_model(dense_lm.model, get_objective("grpo"), config())
    with pytest.raises(ValueError, match=r"replay.source=rollout: the model has no MoE layers"):
        check_model(dense_lm.model, get_objective("grpo"), config(replay=ReplayConfig("rollout")))
    with pytest.raises(ValueError, match=r"RSPO: the model has no routers"):
        check_model(dense_lm.model, get_objective("rspo"), config())


UNICODE = [
    "e\u0301 + 1",
    "\u202e\u05d0\u05d1\u05d2 1",
    "👩\u200d👧 =",
    "a\x00b",
    "\u2028x\x85y",
    "z\ufe0f\u0489",
]


@pytest.mark.parametrize("text", UNICODE)
def test_unicode_reaches_model_and_grader_as_it_is(tmp_path, lm, text):
    path = tmp_path / "a.jsonl"
    records = [{"prompt": f"{n} {text}", "answer": f"{text}{n}"} for n in range(40)]
    lines = [json.dumps(record, ensure_ascii=n % 2 == 0) + "\n" for n, record in enumerate(records)]
    path.write_text("".join(lines), "utf-8")
    task = get_task("jsonl", path=str(path), grading="exact")
    tokenizer = task.default_tokenizer()
    problem = task.train(0)
    assert text in problem.prompt
    ids = tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
    assert task.reward(problem, tokenizer.decode(ids, skip_special_tokens=True)) == 1.0
    require_encodable(replace(lm, tokenizer=tokenizer), task)


def test_repeated_prompts_stay_in_one_split_with_their_own_answers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"prompt": "{n % 20}", "answer": "{n}"}}\n' for n in range(40)))
    task = get_task("jsonl", path=str(path), grading="exact", test_fraction=0.3)
    train = {task.train(i).prompt for i in range(task.train_size)}
    test = {task.test(i).prompt for i in range(task.test_size)}
    assert not train & test and len(train | test) == 20
    assert task.train_size + task.test_size == 40
    for index in range(task.train_size):
        problem = task.train(index)
        assert task.reward(problem, problem.answer) == 1.0
