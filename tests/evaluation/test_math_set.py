"""AIME-style sets: reading, and grades by math-verify."""

import json

import pytest

from moe_rl.evaluation import read_math_set
from moe_rl.evaluation.math_set import INSTRUCTION

pytest.importorskip("math_verify")


@pytest.fixture
def read(tmp_path):
    def read_records(*records, **options):
        file = tmp_path / "aime.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return read_math_set(file, **options)

    return read_records


def test_what_is_read(read):
    found = read(
        {"id": 60, "problem": "1 + 1?", "answer": "2"}, {"problem": "2 + 2?", "answer": 4, "year": 2024}
    )
    assert found.names == ("60", "2")
    assert [problem.answer for problem in found.problems] == ["2", "4"]
    assert found.problems[0].prompt == "1 + 1?" + INSTRUCTION
    assert read({"problem": "1?", "answer": "1"}, instruction="").problems[0].prompt == "1?"


@pytest.mark.parametrize(
    "answer, response, correct",
    [
        ("204", "Adding up, the answer is $\\boxed{204}$.", True),
        ("033", "so we get \\boxed{33}", True),
        ("33", "\\boxed{033}", True),
        ("204", "First \\boxed{204}. No, wait, it is \\boxed{205}.", False),
        ("204", "The answer is 205.", False),
        ("\\frac{1}{2}", "\\boxed{0.5}", True),
        ("204", "", False),
        ("204", "20 4", False),
    ],
)
def test_grades(read, answer, response, correct):
    assert read({"problem": "?", "answer": answer}).grade(0, response).correct is correct


def test_answers_that_no_response_could_equal_are_refused(read):
    read({"problem": "?", "answer": "204"}).check()
    with pytest.raises(ValueError, match="problem 2: math-verify does not find its answer"):
        read({"problem": "?", "answer": "1"}, {"problem": "??", "answer": "$"}).check()


@pytest.mark.parametrize(
    "record, message",
    [
        ({"problem": "?"}, '"answer"'),
        ({"problem": "?", "answer": 1.5}, '"answer"'),
        ({"prompt": "?", "answer": "1"}, '"problem"'),
        ({"problem": "", "answer": "1"}, '"problem"'),
    ],
)
def test_a_bad_line_is_named(read, record, message):
    with pytest.raises(ValueError, match=f"aime.jsonl, line 2: expected {message}"):
        read({"problem": "1?", "answer": "1"}, record)
