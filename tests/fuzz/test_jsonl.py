"""JSON-lines problem files: problems, or one line that says which line of the file is wrong."""

import json

import pytest
from hypothesis import strategies as st

from moe_rl.tasks.jsonl import read_problems

ODD_TEXTS = ["1 + 1 =", "\u202e2", "e\u0301", "👩\u200d👧", "\x00", "\ud83d", "\u2028", "\x85", " ", "NaN"]
TEXT = st.text(max_size=12) | st.sampled_from(ODD_TEXTS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ODD_JSON = [
    "1" * 5_000,
    "-0",
    "1e999",
    "[" * 200_000,
    "[" * 50 + "]" * 50,
    '{"a":' * 100_000,
    "1,",
    "\ufeff{}",
]
GOOD = b'{"prompt": "1 + 1 =", "answer": "2"}'


def dumps(value, ascii_only=True):
    return json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


RECORDS = st.fixed_dictionaries({"prompt": TEXT, "answer": TEXT}, optional={"level": VALUES})
LINES = st.one_of(
    st.just(GOOD),
    st.just(b" \t"),
    st.builds(dumps, RECORDS, st.booleans()),
    st.builds(dumps, st.fixed_dictionaries({"prompt": VALUES, "answer": VALUES})),
    st.builds(dumps, VALUES),
    VALUES.map(lambda value: b'{"prompt": "a", "answer": "b", "prompt": ' + dumps(value) + b"}"),
    st.sampled_from(ODD_JSON).map(
        lambda text: b'{"prompt": "a", "answer": "b", "x": ' + text.encode() + b"}"
    ),
    st.binary(max_size=20),
)


def plainly_read(line):
    """Prompt and answer of a line, None where it holds no problem."""
    try:
        record = json.loads(line.decode())
        texts = record["prompt"], record["answer"]
        return texts if all(text.strip() and text.encode() for text in texts) else None
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None


def outcome(path):
    """What the reader makes of a file, held against a plain reading of its lines."""
    text = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    numbered = [(n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip()]
    bad = [n for n, line in numbered if plainly_read(line) is None]
    try:
        problems = read_problems(path)
    except ValueError as error:
        assert "\n" not in str(error)
        if not numbered:
            assert str(error).startswith(f"{path}: no problems")
            return "empty"
        assert bad, f"refused, and nothing is wrong: {error}"
        assert str(error).startswith(f"{path}, line {bad[0]}: expected") or f'line {bad[0]}: "' in str(error)
        return "refused"
    assert [(problem.prompt, problem.answer) for problem in problems] == [
        plainly_read(line) for _, line in numbered
    ]
    return "problems"


@pytest.mark.parametrize("cases", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_lines(tmp_path, campaign, cases):
    path = tmp_path / "problems.jsonl"

    def check(lines, end, bom):
        path.write_bytes(b"\xef\xbb\xbf" * bom + end.join(lines))
        return outcome(path)

    ends = st.sampled_from([b"\n", b"\r\n", b"\n\n"])
    endings = campaign(check, st.lists(LINES, max_size=4), ends, st.booleans(), cases=cases)
    assert endings["refused"] and endings["problems"]


@pytest.mark.parametrize("cases", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_damaged_file(tmp_path, campaign, damaged, cases):
    path = tmp_path / "problems.jsonl"
    records = [{"prompt": f"Сколько {n} + 1?", "answer": str(n + 1), "level": n} for n in range(5)]
    whole = b"\n".join(dumps(record, ascii_only=n % 2 == 0) for n, record in enumerate(records)) + b"\n"

    def check(data):
        path.write_bytes(data)
        return outcome(path)

    endings = campaign(check, damaged(whole), cases=cases)
    assert endings["refused"] and endings["problems"]
