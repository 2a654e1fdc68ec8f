import json
import os
import subprocess
import sys

import pytest

from moe_rl.tasks import TASKS, get_task

NAMES = ["sort", "running_sum", "reverse"]


@pytest.mark.parametrize(
    ("name", "digits", "answer"),
    [
        ("sort", "3917", "1379"),
        ("sort", "5052", "0255"),
        ("running_sum", "3917", "3230"),  # 3, 12, 13, 20
        ("running_sum", "9999", "9876"),  # 9, 18, 27, 36
        ("reverse", "3917", "7193"),
        ("reverse", "0012", "2100"),
    ],
)
def test_hand_worked_answers(name, digits, answer):
    assert get_task(name).solve(digits) == answer


@pytest.mark.parametrize("name", NAMES)
def test_problem_text_is_digits_equals_and_its_answer(name):
    task = get_task(name, min_length=3, max_length=6)
    for index in range(50):
        problem = task.train(index)
        assert problem.prompt[-1] == "="
        digits = problem.prompt[:-1]
        assert digits.isdecimal() and len(digits) == problem.metadata["length"]
        assert problem.answer == task.solve(digits)


def test_lengths_cover_their_ranges_and_no_more():
    task = get_task("sort", min_length=4, max_length=6, warmup_min_length=2)
    for draw, lengths in [(task.train, {4, 5, 6}), (task.test, {4, 5, 6}), (task.warmup, {2, 3, 4, 5, 6})]:
        assert {draw(index).metadata["length"] for index in range(200)} == lengths


@pytest.mark.parametrize("name", NAMES)
def test_no_prompt_is_in_two_splits(name):
    # 3 digits make 1,000 prompts: 3,000 draws of each split see nearly all, so any overlap would show.
    task = get_task(name, min_length=3, max_length=3)
    train, test, warmup = (
        {draw(i).prompt for i in range(3000)} for draw in (task.train, task.test, task.warmup)
    )
    assert len(train) + len(test) > 900
    assert not train & test
    assert not warmup & test
    assert warmup & train  # allowed: cold start and RL may share problems
    assert 0.2 < len(test) / (len(train) + len(test)) < 0.3


def test_shortest_problems_exist_in_both_splits():
    task = get_task("sort", min_length=2, max_length=2)
    assert len(task.train(0).prompt) == len(task.test(0).prompt) == 3


def test_another_process_with_another_hash_seed_draws_the_same():
    script = (
        "import json; from moe_rl.tasks import TASKS, get_task\n"
        f"tasks = [get_task(name) for name in {NAMES}]\n"
        "print(json.dumps([[t.train(i).prompt, t.test(i).prompt, t.warmup(i).answer]"
        " for t in tasks for i in (0, 7, 10**6)]))"
    )
    drawn = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", script],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for seed in ("1", "2")
    ]
    tasks = [get_task(name) for name in NAMES]
    here = [[t.train(i).prompt, t.test(i).prompt, t.warmup(i).answer] for t in tasks for i in (0, 7, 10**6)]
    assert drawn[0] == drawn[1] == here
    # Golden: changing a problem silently would make runs of two versions incomparable.
    assert here[0][:2] == ["78764187804471363880=", "71101742990868759525="]


def test_reward_is_exact_equality():
    task = get_task("sort", min_length=4, max_length=4)
    problem = task.train(3)
    assert task.reward(problem, problem.answer) == 1.0
    for wrong in ("", problem.answer[:-1], problem.answer + "0", " " + problem.answer, problem.prompt):
        assert task.reward(problem, wrong) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_length": 5, "max_length": 4}, r"min_length must lie in 2 .. max_length \(4\), got 5"),
        ({"min_length": 1}, r"min_length must lie in 2 .. max_length \(20\), got 1"),
        ({"warmup_min_length": 21}, r"warmup_min_length must lie in 2 .. max_length \(20\), got 21"),
    ],
)
def test_contradictory_lengths_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        get_task("reverse", **options)


def test_generators_are_unlimited():
    for name in NAMES:
        assert get_task(name).train_size is None
        assert get_task(name).test_size is None
    assert set(NAMES) <= set(TASKS)
