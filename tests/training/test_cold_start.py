import json

import pytest
import torch

from moe_rl.tasks import get_task
from moe_rl.tasks.encode import answer_ids, prompt_ids
from moe_rl.training.border import content_digest
from moe_rl.training.checkpoint import model_tensors, restore_model
from moe_rl.training.cold_start import (
    ColdStartError,
    cold_start,
    schedule,
    supervised_loss,
)
from moe_rl.training.config import ColdStartConfig


def warm(lm, task, path, **changes):
    options = {
        "target_accuracy": 0.0,
        "steps": 4,
        "batch_size": 8,
        "eval_every": 2,
        "eval_prompts": 8,
    } | changes
    return cold_start(
        lm, task, ColdStartConfig(**options), temperature=1.0, max_new_tokens=6, identity=options, cache=path
    )


def test_the_loss_counts_answer_tokens_only(lm):
    examples = [([3, 4, 12], [4, 3, 1]), ([5, 12], [5, 1])]
    expected = 0.0
    for prompt, answer in examples:
        logp = torch.log_softmax(lm.model(input_ids=torch.tensor([prompt + answer])).logits[0], -1)
        expected -= sum(logp[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer))
    assert supervised_loss(lm, examples).item() == pytest.approx(expected, rel=1e-5)


def test_schedule_by_hand():
    assert schedule(1, 4, 100) == 0.25
    assert schedule(4, 4, 100) == 1.0
    assert schedule(52, 4, 100) == pytest.approx(0.55)
    assert schedule(100, 4, 100) == pytest.approx(0.1)


def test_it_is_computed_once_and_found_again(lm, task, tmp_path):
    first = warm(lm, task, tmp_path)
    trained = {name: tensor.clone() for name, tensor in model_tensors(lm.model).items()}
    for tensor in model_tensors(lm.model).values():
        tensor.zero_()
    again = warm(lm, task, tmp_path)
    assert again == first
    assert all(torch.equal(trained[name], tensor) for name, tensor in model_tensors(lm.model).items())
    other = warm(lm, task, tmp_path, seed=1)
    assert other.path != first.path
    assert not all(torch.equal(trained[name], tensor) for name, tensor in model_tensors(lm.model).items())


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", None),  # missing
        ("model.safetensors", lambda good: good[: len(good) // 2]),
        ("model.safetensors", lambda good: good[:-1] + bytes([good[-1] ^ 1])),
        ("result.json", lambda good: b""),
        ("result.json", lambda good: good.replace(b'"steps": 2', b'"steps": 3')),
    ],
)
def test_a_damaged_one_is_computed_again(lm, task, tmp_path, capsys, file, content):
    start = {name: tensor.clone() for name, tensor in model_tensors(lm.model).items()}
    first = warm(lm, task, tmp_path, steps=2)
    files = {path.name: path.read_bytes() for path in first.path.iterdir()}
    damaged = first.path / file
    if content is None:
        damaged.unlink()
    else:
        damaged.write_bytes(content(files[file]))
    (tmp_path / f".{first.path.name}.tmp").mkdir()  # of a try that was killed
    restore_model(lm.model, start)
    capsys.readouterr()
    assert warm(lm, task, tmp_path, steps=2) == first
    assert f"cold start computed again: {damaged} is " in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in first.path.iterdir()} == files
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.path.name, f"{first.path.name}.lock"]


def test_the_digest_follows_the_content(lm, task):
    digest = content_digest(lm, task)
    assert content_digest(lm, task) == digest
    assert content_digest(lm, get_task("sort", min_length=3, max_length=6)) != digest
    with torch.no_grad():
        next(lm.model.parameters())[0, 0] += 1
    changed = content_digest(lm, task)
    assert changed != digest
    lm.model.register_buffer("scale", torch.tensor(1.0))  # a tensor without dimensions
    assert content_digest(lm, task) != changed


def test_a_missed_target_is_said_and_not_cached(lm, task, tmp_path):
    with pytest.raises(ColdStartError, match=r"target_accuracy is 1.0: raise cold_start.steps"):
        warm(lm, task, tmp_path, target_accuracy=1.0)
    assert not list(tmp_path.glob("*/result.json"))


def test_a_loss_that_is_not_finite_is_said_and_not_cached(lm, task, tmp_path):
    with pytest.raises(ColdStartError, match=r"the loss is nan at step 2: lower cold_start.lr"):
        warm(lm, task, tmp_path, lr=1e38, warmup_steps=0)
    assert not list(tmp_path.glob("*/result.json"))


def test_accumulated_microbatches_equal_the_whole_batch(lm, task, tmp_path):
    start = {name: tensor.clone() for name, tensor in model_tensors(lm.model).items()}
    warm(lm, task, tmp_path, steps=2)
    whole = {name: tensor.clone() for name, tensor in model_tensors(lm.model).items()}
    with torch.no_grad():
        for name, tensor in model_tensors(lm.model).items():
            tensor.copy_(start[name])
    warm(lm, task, tmp_path, steps=2, microbatch=3)
    for name, tensor in model_tensors(lm.model).items():
        assert torch.allclose(tensor, whole[name], atol=2e-4), name


def test_supervised_training_learns(lm, task, tmp_path):
    problems = [task.warmup(1_000_000 + i) for i in range(64)]
    examples = [(prompt_ids(lm.tokenizer, p), answer_ids(lm.tokenizer, p)) for p in problems]
    before = supervised_loss(lm, examples).item()
    result = warm(lm, task, tmp_path, steps=60, eval_every=60, batch_size=32, lr=1e-2)
    assert json.loads((result.path / "result.json").read_text())["steps"] == 60
    assert supervised_loss(lm, examples).item() < before / 2
