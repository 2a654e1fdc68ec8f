"""The table in docs/routing.md names what the installed transformers has; family_table.py writes it."""

import importlib.util
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"routing_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


families, multimodal, family_table = load("test_families"), load("test_multimodal"), load("family_table")


def test_the_page_names_exactly_the_installed_families():
    page = family_table.PAGE.read_text()
    table = page.split(family_table.BEGIN)[1].split(family_table.END)[0]
    names = re.findall(r"^\| (\w+) \|", table, re.MULTILINE)[1:]  # the first row is the header
    assert names == families.discovered()
    assert f"{len(names)} families" in table
    for name in multimodal.FAMILIES:
        assert name in table.splitlines()[1]


def junit(path: Path, **outcomes: str) -> Path:
    """The results of one family's tests, all passed but for `outcomes`."""
    told = dict(routers="R", gate="TopKGate", gradients="bitwise", weights="bitwise")
    properties = "".join(f'<property name="{key}" value="{value}"/>' for key, value in told.items())
    cases = []
    for test, count in family_table.SITUATIONS.items():
        for variant in range(count):
            name = f"{test}[mixtral-{variant}]" if count > 1 else f"{test}[mixtral]"
            result = outcomes.get(test, "")
            cases.append(f'<testcase name="{name}"><properties>{properties}</properties>{result}</testcase>')
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def test_a_row_is_what_the_tests_said(tmp_path):
    results = family_table.read(junit(tmp_path / "all.xml"))
    assert family_table.row("mixtral", results["mixtral"]) == (
        "| mixtral | R | TopKGate | bitwise: 0, 1 | 0, 1 | bitwise | joins | bitwise |  |"
    )
    skip = '<skipped message="it samples"/>'
    generate = "test_generate_joins_to_the_teacher_forced_recording"
    results = family_table.read(junit(tmp_path / "skipped.xml", **{generate: skip}))
    assert family_table.row("mixtral", results["mixtral"]) == (
        "| mixtral | R | TopKGate | bitwise: 0, 1 | 0, 1 | bitwise | – | bitwise | it samples |"
    )


def test_failures_and_missing_tests_leave_no_table(tmp_path):
    with pytest.raises(SystemExit, match="failed"):
        family_table.read(junit(tmp_path / "failed.xml", test_replay_variants="<failure/>"))
    results = family_table.read(junit(tmp_path / "all.xml"))
    del results["mixtral"].passed["test_replay_variants"]
    with pytest.raises(SystemExit, match="not all of its tests ran"):
        family_table.table(results)
