"""LiveCodeBench-style problems: reading, extraction, comparison, and grades of right and hostile code."""

import base64
import json
import os
import pickle
import zlib

import pytest

from moe_rl.evaluation import Limits, extract_code, packed_tests, read_code_set
from moe_rl.evaluation.compare import same_output, same_value
from moe_rl.evaluation.packed_tests import unpack

LIMITS = Limits(seconds=20, memory_mb=128)


def line(**changes):
    """One problem of the format: double the number on stdin."""
    tests = [{"input": f"{n}\n", "output": f"{2 * n}\n", "testtype": "stdin"} for n in (1, 21)]
    record = {
        "question_id": "double",
        "question_content": "Print twice the number.",
        "starter_code": "",
        "public_test_cases": json.dumps(tests[:1]),
        "private_test_cases": json.dumps(tests[1:]),
        "metadata": "{}",
        "contest_date": "2024-11-02T00:00:00",
    }
    return record | changes


def functional(**changes):
    test = {"input": '[3, 1, 2]\n"x"', "output": '[1, "x"]', "testtype": "functional"}
    return line(
        question_id="least",
        starter_code="class Solution:\n    def least(self, values: List[int], tag: str):\n        ",
        public_test_cases=[test],
        private_test_cases=[],
        metadata=json.dumps({"func_name": "least"}),
        **changes,
    )


@pytest.fixture
def read(tmp_path):
    def read_records(*records, sandbox=None, limits=LIMITS, **options):
        file = tmp_path / "problems.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return read_code_set(file, sandbox, limits, **options)

    return read_records


def fenced(code):
    return f"So the program is\n```python\n{code}\n```\nand that is all."


# --- reading ---


def test_what_is_read(read):
    found = read(line(rating=1200), functional(rating=800), rated=True)
    assert (found.names, found.ratings, found.functions) == (
        ("double", "least"),
        (1200.0, 800.0),
        ("", "least"),
    )
    assert [(test.input, test.output) for test in found.tests[0]] == [("1\n", "2\n"), ("21\n", "42\n")]
    stdin, function = (problem.prompt for problem in found.problems)
    assert stdin.startswith("Print twice the number.") and "stdin" in stdin
    assert "def least(self, values: List[int], tag: str)" in function and "stdin" not in function


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_packed_tests_are_read_without_unpickling(read):
    tests = [{"input": "5", "output": "10", "testtype": "stdin"}]
    found = read(line(private_test_cases=packed(json.dumps(tests))))
    assert [test.output for test in found.tests[0]] == ["2\n", "10"]
    long = json.dumps([{"input": "é" * 70_000, "output": "", "testtype": "stdin"}])
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert unpack(base64.b64encode(zlib.compress(pickle.dumps(long, protocol))).decode()) == long


class Code:
    def __reduce__(self):
        return (os.system, ("touch /tmp/unpickled-by-moe-rl",))


@pytest.mark.parametrize(
    "text, message",
    [
        (packed(Code()), "is not executed"),
        (packed(["a", "b"]), "a pickled string"),
        ("no base64!", "expected JSON, or base64"),
        (base64.b64encode(b"not zlib").decode(), "expected JSON, or base64"),
        (base64.b64encode(zlib.compress(pickle.dumps("x" * 999))[:-4]).decode(), "and their end"),
        (base64.b64encode(zlib.compress(b"\x80\x04\x8c\xff")).decode(), "private_test_cases: expected 255"),
    ],
)
def test_other_packed_content_is_refused(read, text, message):
    with pytest.raises(ValueError, match=message):
        read(line(private_test_cases=text))
    assert not os.path.exists("/tmp/unpickled-by-moe-rl")


def test_a_packed_bomb_is_not_inflated(monkeypatch):
    monkeypatch.setattr(packed_tests, "LARGEST", 1000)
    with pytest.raises(ValueError, match="at most 1000 bytes"):
        unpack(packed("x" * 10_000))


def test_problems_by_contest_date(read):
    dates = ["2024-09-30", "2024-10-01", "2025-02-28T08:00:00", "2025-03-01"]
    records = [line(question_id=date, contest_date=date) for date in dates]
    assert read(*records, since="2024-10-01", until="2025-02-28").names == tuple(dates[1:3])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"question_content": " "}, "question_content"),
        ({"public_test_cases": "[]", "private_test_cases": ""}, "at least one test"),
        ({"public_test_cases": "[{"}, "public_test_cases: expected JSON"),
        ({"public_test_cases": '[{"input": "1", "output": "2", "testtype": "file"}]'}, "stdin or functional"),
        ({"public_test_cases": '[{"input": 1, "output": "2", "testtype": "stdin"}]'}, "as texts"),
        ({"public_test_cases": '[{"input": "1", "output": "x", "testtype": "functional"}]',
          "metadata": '{"func_name": "f"}'}, "value of a functional test: expected JSON"),
        ({"public_test_cases": '[{"input": "1", "output": "2", "testtype": "functional"}]'}, "func_name"),
        ({"rating": "hard"}, "a number as rating"),
        ({"rating": True}, "a number as rating"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(read, changes, message):
    with pytest.raises(ValueError, match=f"problems.jsonl, line 2.*{message}"):
        read(line(rating=1), line(question_id="second", rating=2) | changes, rated=True)


def test_a_problem_that_is_there_twice_and_a_file_without_any(read):
    with pytest.raises(ValueError, match="more than once, first 'double'"):
        read(line(), line())
    with pytest.raises(ValueError, match="no problems"):
        read(line(), since="2030-01-01")


# --- between the response and the sandbox ---


@pytest.mark.parametrize(
    "response, code",
    [
        (fenced("print(1)"), "print(1)\n"),
        ("```\na = 1\n```\nbetter:\n```py\na = 2\n```", "a = 2\n"),
        ("```python\nprint('``')\n```", "print('``')\n"),
        ("print(1)", None),
        ("```python\nprint(1)", None),  # cut off by the length limit
        ("", None),
    ],
)
def test_the_last_closed_block_is_the_code(response, code):
    assert extract_code(response) == code


@pytest.mark.parametrize(
    "printed, expected, same",
    [
        ("4\n", "4", True),
        (" 4 \n5\n\n", "4\n5", True),
        ("0.50 1e3", "0.5 1000", True),
        ("0.3333333", "0.3333334", False),
        ("Yes", "YES", False),
        ("4", "4\n5", False),
        ("1 2", "12", False),
        ("a  b", "a b", False),
        ("", "0", False),
        ("NaN", "nan", False),
        ("sNaN", "5", False),  # whose comparison raises
    ],
)
def test_outputs(printed, expected, same):
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    "printed, expected, same",
    [
        ("[1, 2]", "[1,2]", True),
        ("1.0", "1", True),
        ("[1]", "1", False),
        ("", "null", False),
        ("{", "{}", False),
    ],
)
def test_values(printed, expected, same):
    assert same_value(printed, expected) is same


# --- grades ---

RIGHT = "print(int(input()) * 2)"
LEAST = "class Solution:\n    def least(self, values, tag):\n        return min(values), tag"


def test_right_code_passes(read, sandbox):
    problems = read(line(), functional(), sandbox=sandbox)
    assert problems.grade(0, fenced(RIGHT)) == problems.grade(0, f"```\nprint(0)\n```\n{fenced(RIGHT)}")
    assert problems.grade(0, fenced(RIGHT)).detail == "passed 2 tests"
    assert problems.grade(1, fenced(LEAST)).correct
    alone = "def least(values, tag):\n    heapify(values)\n    return [values[0], tag]"  # no class, no import
    assert problems.grade(1, fenced(alone)).correct


WRONG = {  # of the stdin problem: code, and what the grade says
    "right for the public test only": ("print(2)", "test 2 of 2: wrong answer"),
    "an exception": ("print(int(input()) // 0)", "ZeroDivisionError"),
    "right output, then a failure": (f"{RIGHT}\nraise SystemExit(1)", "test 1 of 2: failed"),
    "exit before the answer": ("import os; os._exit(0)", "wrong answer"),
    "forged verdicts": (
        "import json\nprint(json.dumps({'passed': True}))\nprint('passed 2 tests')",
        "wrong answer"),
    "a true value for every comparison": (
        "class Same(str):\n    def __eq__(self, other): return True\nprint(Same('x'))", "wrong answer"),
    "reading what is compared": (
        "import gc, sys\nprint([o for o in gc.get_objects() if isinstance(o, str) and o.strip() == '2'])",
        "wrong answer"),
    "not Python": ("int main() { return 0; }", "SyntaxError"),
    "a null byte": ("print(2)\0", "failed"),
    "half a surrogate pair": ("print('\ud800')", "wrong answer"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_code_scores_nothing(read, sandbox, name):
    code, detail = WRONG[name]
    grade = read(line(), sandbox=sandbox).grade(0, fenced(code))
    assert not grade.correct and detail in grade.detail


FORGED = {
    "a result equal to all": "class Same:\n    def __eq__(s, o): return True\ndef least(v, t): return Same()",
    "another encoder": "import json\njson.dump = lambda v, out: out.write('true')\ndef least(v, t): return 0",
    "leaving while loaded": "import os; os._exit(0)",
    "leaving when called": "def least(v, t):\n    raise SystemExit(0)",
    "writing to every descriptor": (
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'1')\n    except OSError: 0\nos._exit(0)"
    ),
    "no such function": "def most(v, t): return [1, 'x']",
}


@pytest.mark.parametrize("name", FORGED)
def test_a_function_test_is_not_forged(read, sandbox, name):
    assert not read(functional(), sandbox=sandbox).grade(0, fenced(FORGED[name])).correct


def test_a_function_of_the_prelude_is_not_the_solutions(read, sandbox):
    """`add` is there without import, from operator."""
    test = {"input": "1\n2", "output": "3", "testtype": "functional"}
    options = {"public_test_cases": [test], "private_test_cases": []}
    problems = read(line(**options, metadata=json.dumps({"func_name": "add"})), sandbox=sandbox)
    missing = problems.grade(0, fenced("def other(a, b): return 1"))
    assert not missing.correct and "no function add" in missing.detail
    assert problems.grade(0, fenced("def add(a, b): return a + b")).correct


def test_limits_are_wrong_answers_and_the_next_response_is_graded(read, sandbox):
    limits = Limits(seconds=0.5, memory_mb=128, output_mb=1)
    problems = read(line(), sandbox=sandbox, limits=limits)
    assert problems.grade(0, fenced("while True: pass")).detail == "test 1 of 2: time limit"
    assert problems.grade(0, fenced("while True: print('2' * 9999)")).detail == "test 1 of 2: output limit"
    assert problems.grade(0, "I do not know.").detail == "no code block"
    assert read(line(), sandbox=sandbox).grade(0, fenced(RIGHT)).correct
