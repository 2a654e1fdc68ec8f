import json
import os
import subprocess
import sys

import pytest

from moe_rl.tasks import get_task
from moe_rl.training.grading import GuardedTask

FAMILIES = [
    "chain_sum",
    "gsm_symbolic",
    "spell_backward",
    "prime_factorization",
    "basic_arithmetic",
    "gcd",
    "base_conversion",
    "letter_counting",
    "countdown",
    "number_sorting",
    "simple_equations",
    "count_bits",
]


def needs_the_library():
    pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extract", ["text", "line", "tag"])
def test_the_own_answer_scores_and_junk_does_not(family, extract):
    needs_the_library()
    task = GuardedTask(get_task("reasoning_gym", family=family, extract=extract), timeout_s=None)
    for problem in (task.train(1), task.test(2), task.warmup(3)):
        assert task.reward(problem, problem.answer) == 1.0
        for junk in ("", " ", "junk", "Answer:", "<answer></answer>", problem.prompt, "0 1 2 3", "None"):
            assert task.reward(problem, junk) == 0.0


@pytest.mark.parametrize(
    ("extract", "right", "wrong"),
    [
        ("text", [" 7 \n"], ["Answer: 7", "7 or 8"]),
        (
            "line",
            ["Answer: 7", "thinking, Answer: 8\nAnswer:\n7\n"],
            ["7", "Answer: 7\nAnswer: 8", "answer: 7"],
        ),
        (
            "tag",
            ["<answer>7</answer>", "so <answer>8</answer> no, <answer> 7 </answer> done"],
            ["7", "<answer>7", "<answer>7</answer><answer>8</answer>"],
        ),
    ],
)
def test_which_part_of_a_response_is_its_answer(extract, right, wrong):
    needs_the_library()
    task = get_task("reasoning_gym", family="spell_backward", extract=extract)
    problem = task.train(0)
    problem.metadata["answer"] = "7"  # this family scores by the written answer
    for response in right:
        assert task.reward(problem, response) == 1.0
    for response in wrong:
        assert task.reward(problem, response) == 0.0


@pytest.mark.parametrize(
    ("extract", "asks", "answer"),
    [
        ("text", "", "{}"),
        ("line", '\nEnd with the answer after "Answer:".', "Answer: {}"),
        ("tag", "\nPut the answer between <answer> and </answer>.", "<answer>{}</answer>"),
    ],
)
def test_the_prompt_asks_for_the_form_that_is_graded(extract, asks, answer):
    needs_the_library()
    problem = get_task("reasoning_gym", extract=extract).train(5)
    assert problem.prompt == problem.metadata["question"] + asks + "\n"
    assert problem.answer == answer.format(problem.metadata["answer"])


def test_chain_sum_answers_are_sums():
    needs_the_library()
    task = get_task("reasoning_gym", family="chain_sum", options={"min_terms": 2, "max_terms": 3})
    for index in range(20):
        problem = task.train(index)
        expression = problem.prompt.split(":")[1].split("=")[0]
        assert int(problem.answer) == sum(int(term) for term in expression.replace("- ", "+ -").split("+"))


def test_partial_credit_counts_only_from_the_threshold_on():
    needs_the_library()
    # "x7" where "7" is right: the library pays len("7") / len("x7") = 0.5.
    for threshold, reward in [(1.0, 0.0), (0.5, 1.0)]:
        task = get_task("reasoning_gym", family="gcd", threshold=threshold)
        problem = task.train(0)
        problem.metadata["answer"] = "7"
        assert task.reward(problem, "x7") == reward


@pytest.mark.parametrize(("family", "response"), [("prime_factorization", "two"), ("boxnet", "1")])
def test_a_scorer_that_raises_is_heard_of(family, response):
    needs_the_library()
    task = get_task("reasoning_gym", family=family)
    with pytest.raises((ValueError, TypeError)):
        task.reward(task.train(0), response)
    guarded = GuardedTask(task, timeout_s=None)
    assert guarded.reward(task.train(0), response) == guarded.reward(task.test(0), response) == 0.0
    assert guarded.take_errors()[0] == 2


def test_no_question_is_in_two_splits():
    needs_the_library()
    # One digit, two terms: about 200 questions, so 1,000 draws see nearly all of them.
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = get_task("reasoning_gym", family="chain_sum", options=few)
    train, test, warmup = (
        {draw(i).prompt for i in range(1000)} for draw in (task.train, task.test, task.warmup)
    )
    assert len(train) + len(test) > 150
    assert not train & test
    assert not warmup & test


def test_draws_hardly_repeat_where_there_is_much_to_draw_from():
    needs_the_library()
    task = get_task("reasoning_gym", family="chain_sum", options={"min_digits": 4})
    # 2,000 draws with replacement from the 75,000 training items: 26 repeats expected.
    assert 10 < 2000 - len({task.train(i).prompt for i in range(2000)}) < 50


def test_warmup_options_change_the_cold_start_alone():
    needs_the_library()
    task = get_task(
        "reasoning_gym",
        family="chain_sum",
        options={"min_terms": 5, "max_terms": 5},
        warmup_options={"min_terms": 2},
    )

    def terms(problem):
        return len(problem.prompt.split(":")[1].replace("-", "+").split("+"))

    assert {terms(task.train(i)) for i in range(30)} == {5}
    assert {terms(task.test(i)) for i in range(30)} == {5}
    assert {terms(task.warmup(i)) for i in range(60)} == {2, 3, 4, 5}


def test_another_process_with_another_hash_seed_draws_the_same():
    needs_the_library()
    script = (
        "import json; from moe_rl.tasks import get_task\n"
        "tasks = [get_task('reasoning_gym', family=f) for f in ('gsm_symbolic', 'spell_backward')]\n"
        "vocabulary = tasks[0].default_tokenizer().get_vocab()\n"
        "print(json.dumps([[[t.train(i).prompt, t.test(i).prompt, t.warmup(i).answer]"
        " for t in tasks for i in (0, 9)], sorted(vocabulary.items())]))"
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
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "chain_sums"}, "unknown reasoning_gym family 'chain_sums': did you mean chain_sum"),
        ({"options": {"terms": 3}}, "family chain_sum has no option 'terms': it has min_terms, max_terms"),
        ({"options": {"seed": 3}}, "family chain_sum has no option 'seed'"),
        ({"options": {"min_terms": 0}}, "family chain_sum refuses options .*min_terms must be positive"),
        ({"extract": "last"}, "extract must be one of text, line, tag, got 'last'"),
        ({"threshold": 0.0}, r"threshold must lie in \(0, 1\], got 0.0"),
        ({"family": "game_of_life_halting"}, "scores 'junk' at 1.0 or more, so its reward says nothing"),
        ({"family": "countdown", "threshold": 0.01}, "scores '' at 0.01 or more"),
        ({"family": "word_ladder"}, "refuses options {} at size 100000: Dataset size too large"),
    ],
)
def test_wrong_options_are_one_clear_line(options, message):
    needs_the_library()
    with pytest.raises(ValueError, match=message) as error:
        get_task("reasoning_gym", **options)
    assert "\n" not in str(error.value)


def test_a_family_that_writes_no_answer_has_no_cold_start():
    needs_the_library()
    task = get_task("reasoning_gym", family="rush_hour")
    assert task.train(0).answer == ""
    with pytest.raises(ValueError, match="rush_hour writes no answer to imitate"):
        task.warmup(0)


def test_a_family_of_one_question_has_nothing_to_hold_out():
    needs_the_library()
    one = {"min_value": 7, "max_value": 7}
    with pytest.raises(ValueError, match=r"too few distinct questions for a (train|test) split"):
        get_task("reasoning_gym", family="prime_factorization", options=one).test(0)


def test_tokenizer_covers_the_family():
    needs_the_library()
    task = get_task("reasoning_gym", family="gsm_symbolic")
    tokenizer = task.default_tokenizer()
    assert len(tokenizer) == 512
    for index in range(20):
        problem = task.test(index)
        ids = tokenizer(problem.prompt)["input_ids"]
        assert tokenizer.decode(ids) == problem.prompt
        assert len(ids) < 0.6 * len(problem.prompt)


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "moe_rl\[reasoning\]"'):
        get_task("reasoning_gym")


def test_worked_solutions_come_before_the_answer_and_score():
    needs_the_library()
    task = get_task("reasoning_gym", family="gsm_symbolic", extract="line", solution="answer_cot")
    plain = get_task("reasoning_gym", family="gsm_symbolic", extract="line")
    for i in range(200):
        worked, bare = task.warmup(i), plain.warmup(i)
        assert worked.prompt == bare.prompt
        solution, _, last = worked.answer.rpartition("\n")
        assert last == bare.answer == f"Answer: {worked.metadata['answer']}"
        assert worked.metadata["metadata"]["answer_cot"].startswith(solution)
        assert len(solution) > 20
        assert "####" not in worked.answer
        assert task.reward(worked, worked.answer) == 1.0
        assert task.reward(worked, solution) == 0.0, "the answer has to be said where it is asked for"


def test_solutions_that_cannot_be():
    needs_the_library()
    with pytest.raises(ValueError, match="needs extract=line or tag"):
        get_task("reasoning_gym", family="gsm_symbolic", solution="answer_cot")
    with pytest.raises(ValueError, match=r"chain_sum has no metadata 'cot' .* it has .*difficulty"):
        get_task("reasoning_gym", family="chain_sum", extract="line", solution="cot")


def test_a_wrong_answer_in_the_format_asked_for_can_be_paid():
    needs_the_library()
    task = get_task("reasoning_gym", family="gsm_symbolic", extract="line", format_reward=0.1)
    problem = task.train(0)
    wrong = float(problem.metadata["answer"]) + 1
    assert task.reward(problem, problem.answer) == 1.0
    assert task.reward(problem, f"So it is.\nAnswer: {wrong}") == 0.1
    for nothing in ("", f"It is {wrong}", "Answer:", "Answer: \n"):
        assert task.reward(problem, nothing) == 0.0
    with pytest.raises(ValueError, match="no format to pay for"):
        get_task("reasoning_gym", family="gsm_symbolic", format_reward=0.1)
    with pytest.raises(ValueError, match=r"in \[0, 1\), got 1"):
        get_task("reasoning_gym", family="gsm_symbolic", extract="line", format_reward=1)
