import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from moe_rl.tasks import Problem, get_task
from moe_rl.tasks.jsonl import read_problems


def write(path, records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    return str(path)


@pytest.fixture
def numbers(tmp_path):
    """400 problems, every prompt twice."""
    records = [{"prompt": f"{n % 200} + 1 =", "answer": str(n % 200 + 1), "row": n} for n in range(400)]
    return write(tmp_path / "numbers.jsonl", records)


def test_reads_prompt_answer_and_metadata_in_any_script(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [
        '{"prompt": "Сколько будет 1+1?", "answer": "2", "source": "школа", "level": 3}',
        "",
        '{"prompt": "一\u2028二", "answer": "三"}',  # a line separator inside a string is no end of line
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert read_problems(path) == [
        Problem("Сколько будет 1+1?", "2", {"source": "школа", "level": 3}),
        Problem("一\u2028二", "三", {}),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'prompt': 1}", "expected one JSON object in UTF-8, got b\"{'prompt': 1}\""),
        (b'{"prompt": "\xff", "answer": "1"}', "expected one JSON object in UTF-8"),
        (b"[1, 2]", 'expected an object {"prompt": ..., "answer": ...}, got b\'[1, 2]\''),
        (b'{"prompt": "a"}', "expected \"answer\" as a non-blank string, its fields are 'prompt'"),
        (b'{"question": "a", "answer": "3"}', "its fields are 'question', 'answer'"),
        (b"{}", "its fields are none"),
        (b'{"prompt": "a", "answer": 3}', 'expected "answer" as a non-blank string, got 3'),
        (b'{"prompt": "\\ud800", "answer": "3"}', '"prompt" holds half a surrogate pair'),
        (b'{"prompt": " ", "answer": "3"}', "expected \"prompt\" as a non-blank string, got ' '"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "1"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 3: ") + ".*" + re.escape(message)):
        read_problems(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"empty\.jsonl: no problems: expected one"):
        get_task("jsonl", path=str(path))


def test_a_split_without_problems_is_refused(tmp_path):
    path = write(tmp_path / "one.jsonl", [{"prompt": "1 =", "answer": "1"}])
    with pytest.raises(ValueError, match=r"1 problems at test_fraction 0.1 give . to train on, . to test"):
        get_task("jsonl", path=path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grading": "maths"}, "grading must be one of math, exact, got 'maths'"),
        ({"test_fraction": 1.0}, r"test_fraction must lie in \(0, 1\), got 1.0"),
    ],
)
def test_wrong_options_are_refused(numbers, options, message):
    with pytest.raises(ValueError, match=message):
        get_task("jsonl", path=numbers, **options)


def test_every_problem_is_in_one_split_with_its_duplicates(numbers):
    task = get_task("jsonl", path=numbers, test_fraction=0.25)
    train = [task.train(i) for i in range(task.train_size)]
    test = [task.test(i) for i in range(task.test_size)]
    assert sorted(problem.metadata["row"] for problem in train + test) == list(range(400))
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in test}
    assert 60 < task.test_size < 140


def test_split_does_not_depend_on_the_rest_of_the_file(numbers, tmp_path):
    whole = get_task("jsonl", path=numbers, test_fraction=0.25)
    held_out = {whole.test(i).prompt for i in range(whole.test_size)}
    half = write(
        tmp_path / "half.jsonl", [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(100)]
    )
    task = get_task("jsonl", path=half, test_fraction=0.25)
    assert {task.test(i).prompt for i in range(task.test_size)} == {
        p for p in held_out if int(p.split()[0]) < 100
    }


def test_epochs_are_reshuffled_and_complete(numbers):
    task = get_task("jsonl", path=numbers)
    size = task.train_size
    rows = [[task.train(epoch * size + i).metadata["row"] for i in range(size)] for epoch in range(2)]
    warmup = [task.warmup(i).metadata["row"] for i in range(size)]
    assert sorted(rows[0]) == sorted(rows[1]) == sorted(warmup)
    assert rows[0] != rows[1] and rows[0] != warmup
    again = get_task("jsonl", path=numbers)
    assert [again.train(i).metadata["row"] for i in range(size)] == rows[0]


def test_past_the_test_problems_is_an_index_error(numbers):
    task = get_task("jsonl", path=numbers)
    with pytest.raises(IndexError):
        task.test(task.test_size)


def test_exact_grading_is_the_text_without_outer_blanks(numbers):
    task = get_task("jsonl", path=numbers, grading="exact")
    problem = Problem("p", "0.5 ")
    assert task.reward(problem, " 0.5\n") == 1.0
    assert task.reward(problem, "1/2") == 0.0
    assert task.reward(problem, "it is 0.5") == 0.0


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("1/2", "0.5", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        ("0.5", r"So the answer is $\frac12$.", 1.0),
        ("1,234", "1234", 1.0),
        ("12", r"Thus \boxed{12}", 1.0),
        ("5", "The answer is 5", 1.0),
        (r"$\sqrt{8}$", r"2\sqrt{2}", 1.0),
        ("x^2+1", "1+x^2", 1.0),
        ("(1,2)", "(1, 2)", 1.0),
        (r"\text{Paris}", r"$\text{Paris}$", 1.0),
        ("Paris", " Paris", 1.0),
        ("x=3", "3", 1.0),
        ("2xy", "2yx", 1.0),
        ("1/3", "0.33", 0.0),
        ("10", "10^{5}", 0.0),  # math-verify alone reads 10 in a bare 10^{5}
        ("1", "1+x^2", 0.0),
        ("2", "2xy", 0.0),
        ("2", r"2\sqrt{2}", 0.0),
        ("(1,2)", "(2,1)", 0.0),
        ("Paris", "sPiar", 0.0),  # as LaTeX both are the product of the same letters
        ("12", "3 4", 0.0),  # as LaTeX a product
        ("12", "3\n4", 0.0),
        ("2", "The answer is \\frac{1}{2}", 0.0),
        ("5", "", 0.0),
        ("5", "junk", 0.0),
        ("x", "y", 0.0),
        ("5", r"\boxed{4} or \boxed{5}", 0.0),  # two answers are none
    ],
)
def test_math_grading(numbers, answer, response, reward):
    pytest.importorskip("math_verify")
    assert get_task("jsonl", path=numbers).reward(Problem("p", answer), response) == reward


def test_math_grading_outside_the_main_thread_says_what_to_do(numbers):
    pytest.importorskip("math_verify")
    task = get_task("jsonl", path=numbers)
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(RuntimeError, match=r'main thread.*call reward there, or use grading="exact"'),
    ):
        pool.submit(task.reward, Problem("p", "1/2"), "0.5").result()


def test_without_math_verify_the_error_names_the_extra(numbers, monkeypatch):
    task = get_task("jsonl", path=numbers)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "moe_rl\[math\]"'):
        task.reward(Problem("p", "1/2"), "0.5")


def test_tokenizer_round_trips_held_out_texts(numbers):
    task = get_task("jsonl", path=numbers)
    tokenizer = task.default_tokenizer()
    for index in range(task.test_size):
        text = task.test(index).prompt
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
