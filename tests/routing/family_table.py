"""Writes the table of families in docs/routing.md from what their tests said in one run.

    python -m pytest tests/routing/test_families.py tests/routing/test_multimodal.py \
        -o junit_family=xunit1 --junitxml=families.xml
    python tests/routing/family_table.py families.xml

A cell is what the tests of that family said in this run; a test that failed or did not run leaves no table.
"""

import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "routing.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
HEADER = """\
| family | routers | gate | own replay | foreign trace | checkpointing | `generate` | old weights | left out |
|---|---|---|---|---|---|---|---|---|
"""
SITUATIONS = {
    "test_a_foreign_trace_is_followed": 2,
    "test_generate_joins_to_the_teacher_forced_recording": 1,
    "test_recording_and_own_replay_change_no_bit": 2,
    "test_replay_under_gradient_checkpointing": 2,
    "test_replay_variants": 1,
    "test_top_1_routers_that_get_no_gradient": 1,
}
IMAGES = ("test_record_and_replay_with_images", "test_generate_with_images")
CASE = re.compile(r"(\w+)\[([a-z0-9_]+)(?:-(\w+))?\]")


@dataclass
class Family:
    """What the tests of a family said: per situation the variants that passed; why others were skipped."""

    passed: dict[str, list[str]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)


def read(junit: Path) -> dict[str, Family]:
    """The results by family. Raises SystemExit when a test failed or a situation is missing."""
    families: dict[str, Family] = {}
    for case in ET.parse(junit).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            raise SystemExit(f"{case.get('name')} failed: no table is written from failures")
        named = CASE.fullmatch(case.get("name", ""))
        if named is None or named[1] not in (*SITUATIONS, *IMAGES):
            continue
        family = families.setdefault(named[2], Family())
        skipped = case.find("skipped")
        if skipped is not None:
            family.skipped.append(skipped.get("message", ""))
            continue
        family.passed.setdefault(named[1], []).append(named[3] or "")
        for item in case.iter("property"):
            family.properties[item.get("name", "")] = item.get("value", "")
    return families


def row(name: str, family: Family) -> str:
    ran = {test: family.passed.get(test, []) for test in SITUATIONS}
    told = family.properties
    cells = [
        name,
        told["routers"],
        told["gate"],
        "bitwise: " + ", ".join(ran["test_recording_and_own_replay_change_no_bit"]),
        ", ".join(ran["test_a_foreign_trace_is_followed"]),
        told["gradients"] if ran["test_replay_under_gradient_checkpointing"] else "–",
        "joins" if ran["test_generate_joins_to_the_teacher_forced_recording"] else "–",
        told["weights"],
        "; ".join(dict.fromkeys(family.skipped)),
    ]
    return "| " + " | ".join(cells) + " |"


def table(families: dict[str, Family]) -> str:
    with_images = sorted(name for name, family in families.items() if IMAGES[0] in family.passed)
    text = {name: family for name, family in families.items() if family.passed.keys() & SITUATIONS.keys()}
    for name, family in text.items():
        if sum(map(len, family.passed.values())) + len(family.skipped) < sum(SITUATIONS.values()):
            raise SystemExit(f"{name}: not all of its tests ran; run them without -m and -k")
    rows = "\n".join(row(name, family) for name, family in sorted(text.items()))
    return f"{len(text)} families, of which with images as well: {', '.join(with_images)}.\n\n{HEADER}{rows}"


def main(junit: str) -> None:
    import torch
    import transformers

    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    versions = f"Written by the run of transformers {transformers.__version__}, torch {torch.__version__}: "
    PAGE.write_text(f"{before}{BEGIN}\n{versions}{table(read(Path(junit)))}\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1])
