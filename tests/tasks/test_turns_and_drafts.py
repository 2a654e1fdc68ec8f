"""The two-turn task and the task with drafts, by hand."""

import pytest

from moe_rl.tasks import char_tokenizer, get_task
from moe_rl.tasks.base import Problem
from moe_rl.tasks.draft_sort import selected
from moe_rl.tasks.encode import said_ids, worked_examples


@pytest.mark.parametrize(
    ("second", "said", "answer"),
    [
        ("reverse", "<=", lambda digits: digits[::-1]),
        ("sum", "+=", lambda digits: str(sum(map(int, digits)))),
    ],
)
def test_two_turns_ask_and_reward_apart(second, said, answer):
    task = get_task("two_turn", min_length=4, max_length=4, second=second)
    for index in range(20):
        for problem in (task.train(index), task.test(index), task.warmup(index)):
            first, later = problem.turns
            assert first is problem and problem.prompt[:-1].isdecimal()
            assert problem.answer == "".join(sorted(problem.prompt[:-1]))
            assert (later.prompt, later.answer) == (said, answer(problem.answer))
            assert task.reward(first, problem.answer) == task.reward(later, later.answer) == 1.0
    first, later = Problem("3917=", "1379"), Problem("<=", "9731")
    assert (task.reward(first, "9731"), task.reward(later, "1379"), task.reward(later, "9731")) == (0, 0, 1)
    tokenizer = task.default_tokenizer()
    ids = tokenizer("3917=<=+=")["input_ids"]
    assert tokenizer.decode(ids) == "3917=<=+=" and len(ids) == 9


def test_a_cold_start_imitates_each_turn_after_those_before_it():
    tokenizer = char_tokenizer("123=<")  # ids 2 to 6 after <pad> and <eos>
    one = Problem("21=", "12")
    assert worked_examples(tokenizer, one) == [([3, 2, 5], [2, 3, 1])]
    two = Problem("21=", "12", later=(Problem("<=", "21"),))
    assert worked_examples(tokenizer, two) == [
        ([3, 2, 5], [2, 3, 1]),
        ([3, 2, 5, 2, 3, 1, 6, 5], [3, 2, 1]),
    ]


def test_several_turns_with_a_chat_template_are_refused():
    tokenizer = char_tokenizer("123=<")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="without a chat template"):
        said_ids(tokenizer, Problem("<=", "21"))


def test_the_other_second_turn_is_named():
    with pytest.raises(ValueError, match="second must be one of reverse, sum, got 'double'"):
        get_task("two_turn", second="double")


def test_drafts_are_steps_of_selection_sort():
    assert [selected("3917", steps) for steps in range(5)] == ["3917", "1397", "1397", "1379", "1379"]
    assert selected("2121", 2) == "1122" and selected("2121", 1) == "1221"


def test_the_cold_start_shows_every_number_of_drafts():
    task = get_task("draft_sort", min_length=4, max_length=4, max_drafts=2)
    seen = set()
    for index in range(200):
        problem = task.warmup(index)
        digits = problem.prompt[:-1]
        *drafts, last = problem.answer.split("|")
        n, d = len(digits), len(drafts)
        assert drafts == [selected(digits, n * j // (d + 1)) for j in range(1, d + 1)]
        assert last == "".join(sorted(digits))
        assert task.reward(problem, problem.answer) == task.reward(problem, last) == 1.0
        seen.add(d)
    assert seen == {0, 1, 2}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("1379", 1.0),
        ("3917|1379", 1.0),
        ("9|9|1379", 1.0),  # whatever the drafts are
        ("1379|", 0.0),
        ("1379|1397", 0.0),  # the last part counts
        ("|1379", 1.0),
        ("13|79", 0.0),
        ("", 0.0),
    ],
)
def test_what_follows_the_last_separator_counts(text, reward):
    assert get_task("draft_sort", min_length=4, max_length=4).reward(Problem("3917=", "1379"), text) == reward


def test_a_negative_number_of_drafts_is_refused():
    with pytest.raises(ValueError, match="max_drafts must be at least 0, got -1"):
        get_task("draft_sort", max_drafts=-1)
