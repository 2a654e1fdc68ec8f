import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import experiments.report
from experiments.report import main, parse
from moe_rl.analysis.figures import Drawn, draw_all
from moe_rl.analysis.report import write_report
from moe_rl.store import Run, RunStore, StoreError


class Page(HTMLParser):
    """Text and the resources of a page; checks that tags close in the order in which they opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.sources: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report(runs: str, *more: str) -> Page:
    main([f"runs={runs}", *more])
    out = next((word.removeprefix("out=") for word in more if word.startswith("out=")), f"{runs}/report")
    return Page((Path(out) / "index.html").read_text(encoding="utf-8"))


def test_report_of_the_three_arms(
    make_run: Callable[..., Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        make_run(f"grpo{seed}", seed=seed, clip=0.002)
        make_run(f"replay{seed}", arm="grpo+replay", seed=seed, clip=0.002)
        make_run(f"gspo{seed}", arm="gspo", seed=seed, clip=0.3)
    page = report(str(tmp_path / "runs"))
    out = tmp_path / "runs" / "report"
    assert capsys.readouterr().out.startswith(f"6 runs: {out / 'index.html'}")
    figures = ["reward", "accuracy", "clip_fraction", "drift", "drift_by_layer", "ratio_spread", "health"]
    assert sorted(path.stem for path in (out / "figures").iterdir()) == sorted(figures)
    assert len(page.sources) == len(figures)
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert "c0ffeec0ffee" in page.text and "150 ×" in page.text and "min–max of the seeds" in page.text
    assert f"python -m experiments.report runs={tmp_path / 'runs'}" in page.text

    reward = pd.read_csv(out / "tables" / "reward.csv")
    assert len(reward) == 6 * 20 and set(reward["arm"]) == {"grpo", "grpo+replay", "gspo"}
    arms = pd.read_csv(out / "tables" / "arms.csv").set_index("arm")
    assert arms.loc["gspo", "clip_token"] == pytest.approx(0.15)
    layers = pd.read_csv(out / "tables" / "drift_by_layer_bands.csv")
    assert layers["x"].tolist() == [1, 3] * 3


def test_other_tasks_get_sections_and_files_of_their_own(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    make_run("a")
    make_run("b", task={"name": "reverse"}, moe=False)
    page = report(str(tmp_path / "runs"), f"out={tmp_path / 'both'}")
    names = {path.name for path in (tmp_path / "both" / "figures").iterdir()}
    assert "demo-tiny-moe-sort-drift.png" in names
    assert "demo-tiny-moe-reverse-reward.png" in names and "demo-tiny-moe-reverse-drift.png" not in names
    assert "2 comparisons, never averaged together" in page.text
    assert "No expert drift was recorded" in page.text


def test_failed_and_unfinished_runs_are_listed_and_text_is_escaped(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    make_run("done", seed=0)
    make_run("killed", seed=1, rewards=(0.5,) * 7, finish=False)
    failed = make_run("failed", seed=2, rewards=(0.5,) * 3, finish=False)
    with RunStore.open(failed.path, failed.config) as store:
        store.fail("Traceback\nValueError: <script>alert('no')</script>")
    page = report(str(tmp_path / "runs"))
    assert "unfinished 7 of 20 none by step 7" in page.text
    assert "failed 3 of 20" in page.text
    assert "grpo, seed 2 failed: ValueError: <script>alert('no')</script>" in page.text
    assert "where a run ends short of its last step" in page.text


def test_runs_without_any_step_still_make_a_page(make_run: Callable[..., Run], tmp_path: Path) -> None:
    make_run("a", rewards=(), evals=(), finish=False)
    page = report(str(tmp_path / "runs"))
    assert "No step was recorded yet" in page.text and "unfinished 0 of 20" in page.text


def test_runs_take_a_comma_list_and_globs(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [make_run(f"seed{seed}", seed=seed) for seed in range(3)]
    calls: list[tuple[list[Run], Path, str]] = []

    def write(runs: list[Run], out: Path, command: str) -> Path:
        calls.append((runs, out, command))
        return out / "index.html"

    monkeypatch.setattr(experiments.report, "write_report", write)
    runs = tmp_path / "runs"
    main([f"runs={runs}/seed0,{runs}/seed[12]"])
    command = f"python -m experiments.report 'runs={runs}/seed0,{runs}/seed[12]'"
    assert calls == [(made, runs / "report", command)]


def test_wrong_arguments_and_missing_runs_are_explained(tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"unknown option 'rnus'; expected: python -m experiments\.report runs="
    ):
        parse(["rnus=here"])
    with pytest.raises(SystemExit, match="runs= is missing"):
        parse([])
    with pytest.raises(SystemExit, match="found none"):
        main([f"runs={tmp_path}"])


def test_the_command_runs_and_imports_no_torch(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run: Run = make_run("a")
    code = (
        "import sys; from experiments.report import main\n"
        "main([f'runs={sys.argv[1]}', f'out={sys.argv[2]}'])\n"
        "print(sorted({'torch', 'transformers', 'hydra'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.path), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"1 runs: .*index\.html", done.stdout) and done.stdout.endswith("[]\n")


def test_a_run_that_ended_as_collapsed_is_shown_so_not_as_a_crash(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run("a", rewards=(0.5,) * 3, finish=False)
    with RunStore.open(run.path, run.config) as store:
        store.event("collapsed", step=3, reason="non-finite policy")
        store.fail("collapsed: step 3, update 2: loss nan\n\nTraceback\nCollapseError: collapsed: step 3")
    page = report(str(tmp_path / "runs"))
    assert "collapsed 3 of 20 step 3 (non-finite policy)" in page.text
    assert "grpo, seed 0 collapsed: step 3, update 2: loss nan" in page.text
    assert "failed 3 of 20" not in page.text and "seed 0 failed" not in page.text


def test_a_report_that_is_cut_short_leaves_only_whole_files(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at, or out of disk space at, each of its files in turn; then made again over what is there."""
    runs = [make_run("a")]
    drawn: list[Drawn] = []

    def draw_once(*arguments: Any) -> list[Drawn]:
        drawn[:] = drawn or draw_all(*arguments)[:1]
        return drawn

    monkeypatch.setattr("moe_rl.analysis.report.draw_all", draw_once)
    expected = files(write_report(runs, tmp_path / "report", "").parent)
    assert {path.suffix for path in expected} == {".png", ".csv", ".html"}
    replace, left = os.replace, 0
    error: BaseException = KeyboardInterrupt()

    def stop(source: Path, target: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise error
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop)
    for written in range(len(expected)):
        left = written
        with pytest.raises(KeyboardInterrupt):
            write_report(runs, tmp_path / "cut", "")
        found = files(tmp_path / "cut")
        assert len(found) == written and found.items() <= expected.items()
    left, error = 1, OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StoreError, match=r"\.csv cannot be written \(No space left on device\): free space"):
        write_report(runs, tmp_path / "cut", "")
    left = len(expected)
    assert files(write_report(runs, tmp_path / "cut", "").parent) == expected
    assert not list((tmp_path / "cut").rglob(".*"))


def files(out: Path) -> dict[Path, bytes]:
    return {path.relative_to(out): path.read_bytes() for path in out.rglob("[!.]*.*")}
