"""Graders that raise or hang: reward 0, counted, said, and never for longer than the limit."""

import math
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from moe_rl.tasks import Problem, get_task
from moe_rl.training import time_limit
from moe_rl.training.border import require_gradable
from moe_rl.training.config import RolloutConfig
from moe_rl.training.grading import GuardedTask
from moe_rl.training.time_limit import TimeLimitError, within

LIMIT_S = 0.3


class Grader:
    """The small task with a grader of one's own."""

    def __init__(self, task, grade):
        self.task, self.reward = task, grade

    def __getattr__(self, name):
        return getattr(self.task, name)


def spin(*_):
    while True:
        pass


def swallow(*_):
    try:
        time.sleep(60)
    except BaseException:  # as a bare `except:` of a grader
        return 1.0


def backtrack(*_):
    return re.match(r"(a+)+$", "a" * 60 + "b")  # takes years, and gives no other thread a turn


@pytest.mark.parametrize("hangs", [spin, swallow, backtrack, lambda *_: time.sleep(60)])
def test_a_call_that_hangs_is_interrupted(hangs):
    with pytest.raises(TimeLimitError, match=r"no result after 0.3 s"):
        within(LIMIT_S, hangs)
    assert within(LIMIT_S, math.sqrt, 4.0) == 2.0, "and the next one is not"
    time.sleep(2 * LIMIT_S)  # nothing rings after a call has ended


def test_a_signal_between_the_calls_end_and_the_disarming_leaves_no_deadline(monkeypatch):
    disarm = time_limit._watchdog.disarm

    def signal_comes_first():
        monkeypatch.setattr(time_limit._watchdog, "disarm", disarm)
        raise time_limit._TimeUp

    monkeypatch.setattr(time_limit._watchdog, "disarm", signal_comes_first)
    with pytest.raises(TimeLimitError):
        within(60.0, len, "")
    assert time_limit._watchdog.deadline is None, "it would ring in the middle of the training that follows"
    assert signal.getitimer(time_limit.TIMER) == (0.0, 0.0)


def test_errors_of_the_call_pass():
    with pytest.raises(ZeroDivisionError):
        within(LIMIT_S, lambda: 1 / 0)
    assert within(None, int, "3") == 3


def test_math_verifys_own_alarm_and_the_limit_work_together(tmp_path, monkeypatch):
    """math-verify sets and clears the process's one alarm inside the call."""
    verifier = pytest.importorskip("math_verify")
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}", "answer": "1/{n}"}}\n' for n in range(1, 40)))
    task = GuardedTask(get_task("jsonl", path=str(path)), 0.5)
    assert task.reward(Problem("p", "1/2"), "0.5") == 1.0
    assert task.take_errors() == (0, [])
    real = verifier.parse

    def parse_then_hang(*args, **kwargs):
        real(*args, **kwargs)  # has reset the alarm
        spin()

    monkeypatch.setattr(verifier, "parse", parse_then_hang)
    assert task.reward(Problem("p", "1/2"), "0.5") == 0.0
    count, (first,) = task.take_errors()
    assert count == 1 and first["error"] == "TimeLimitError: no result after 0.5 s"


def test_math_verifys_own_timeout_inside_the_limit_is_an_error_of_the_grader(task):
    """It is no Exception: were it to leave math-verify, it would end the run."""
    pytest.importorskip("math_verify")
    from math_verify.utils import timeout

    guarded = GuardedTask(Grader(task, timeout(1)(spin)), 10.0)
    assert guarded.reward(task.train(0), "1") == 0.0
    assert guarded.take_errors()[1][0]["error"] == "TimeoutException: Operation timed out!"


def test_an_interrupt_passes(task):
    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GuardedTask(Grader(task, interrupted), LIMIT_S).reward(task.train(0), "")


def test_a_limit_outside_the_main_thread_is_refused(task):
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(
            ValueError, match=r"main thread only: train there, or set rollout.grading_timeout"
        ):
            pool.submit(GuardedTask, task, LIMIT_S).result()
        assert pool.submit(GuardedTask, task, None).result().reward(Problem("p", "12"), "12") == 1.0
    assert threading.current_thread() is threading.main_thread()


def test_what_a_grader_returns(task):
    problem = task.train(0)
    assert GuardedTask(Grader(task, lambda *_: True), None).reward(problem, "") == 1.0
    assert math.isinf(GuardedTask(Grader(task, lambda *_: math.inf), None).reward(problem, ""))
    for nothing in (None, "yes", [1]):
        guarded = GuardedTask(Grader(task, lambda *_, value=nothing: value), None)
        assert guarded.reward(problem, "") == 0.0
        assert guarded.take_errors()[0] == 1


def test_a_package_that_is_missing_is_no_responses_fault(task):
    def missing(*_):
        raise ModuleNotFoundError("pip install it")

    with pytest.raises(ModuleNotFoundError):
        GuardedTask(Grader(task, missing), None).reward(task.train(0), "")


@pytest.mark.parametrize(
    ("grade", "message"),
    [
        (lambda *_: 1 / 0, "the grader fails on the task's own answer: ZeroDivisionError: division by zero"),
        (spin, "the grader fails on the task's own answer: TimeLimitError: no result after 0.2 s"),
        (lambda *_: 0.0, "the grader pays 0 for the task's own answers"),
    ],
)
def test_a_broken_grader_is_refused_before_training(task, grade, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        require_gradable(Grader(task, grade), 0.2, problems=2)
    require_gradable(task, 0.2)


def test_errors_are_counted_and_the_first_of_each_kind_is_recorded(tmp_path, fresh, ones_task, run, config):
    calls = 0
    graded = ones_task.reward

    def sometimes(problem, text):
        nonlocal calls
        calls += 1
        if 16 < calls <= 16 + 3:  # of the rollout of step 1, after the first evaluation of 2 x 8
            raise ValueError(f"cannot read {text!r}")
        if calls == 16 + 4:
            spin()
        return graded(problem, text)

    ones_task.reward = sometimes
    rollout = RolloutConfig(prompts=4, responses=4, max_new_tokens=6, grading_timeout=LIMIT_S)
    result = run(tmp_path, fresh(), config(steps=2, rollout=rollout))
    assert result.steps()["reward/grader_errors"].tolist() == [4, 0]
    assert result.evals()["eval/grader_errors"].tolist() == [0, 0]
    errors = [event for event in result.events() if event["event"] == "grader_error"]
    assert [(e["step"], e["error"].partition(":")[0]) for e in errors] == [
        (1, "ValueError"),
        (1, "TimeLimitError"),
    ]
    assert errors[0]["prompt"].endswith("=") and errors[0]["response"] in errors[0]["error"]
    assert result.steps()["loss"].map(math.isfinite).all()
