"""The benchmarks' own arithmetic by hand, and each of them at sizes that say only that it runs."""

import importlib.util
import json
import subprocess
import sys

import pandas as pd
import pytest
import torch

from experiments.benchmarks import against_trl, drift_speed, routing_overhead
from experiments.benchmarks import all as every
from experiments.benchmarks.bare import BareStep, Shape
from experiments.benchmarks.memory import rise_mib
from experiments.benchmarks.pairs import Ratio, compare, rounds
from experiments.benchmarks.results import Bound, Report, Row, Table
from experiments.benchmarks.scene import Enough, make_scene, run_loop
from experiments.benchmarks.stepper import Stepper
from experiments.benchmarks.topologies import TOPOLOGIES
from moe_rl.routing import expert_change

TINY = ("model.config.num_hidden_layers=1", "rollout.prompts=4", "rollout.responses=2")


def test_the_median_and_its_interval_are_order_statistics():
    """Of 40 values the median is between the 14th and the 27th with probability 95 %."""
    ratio = Ratio.of([float(value) for value in range(40, 0, -1)])
    assert (ratio.median, ratio.low, ratio.high) == (20.5, 14.0, 27.0)
    assert str(Ratio.of([1.0, 3.0, 2.0])) == "2.000 [1.000, 3.000]"
    assert str(Ratio.exactly(1234.5)) == "1,234"


def test_rounds_call_every_side_once_and_change_who_begins():
    calls: list[str] = []
    sides = [lambda name=name: calls.append(name) or len(calls) for name in "abc"]
    assert rounds(sides, 2, warm=1) == [[6, 8], [4, 9], [5, 7]]
    assert "".join(calls) == "abcbcacab"


def test_compare_divides_neighbours():
    """A clock that only the two sides move: 3 s against 2 s, whoever begins."""
    now = [0.0]

    def moved_by(seconds):
        return lambda: now.__setitem__(0, now[0] + seconds)

    assert compare(moved_by(3), moved_by(2), 5, lambda: now[0]) == Ratio(1.5, 1.5, 1.5)


@pytest.mark.parametrize(
    "sense, value, verdict",
    [
        ("at most", Ratio(0.9, 0.8, 1.0), "met"),
        ("at most", Ratio(0.9, 0.8, 1.1), "met by the median"),
        ("at most", Ratio(1.01, 0.8, 1.1), "missed"),
        ("at least", Ratio(1.2, 1.0, 1.3), "met"),
        ("at least", Ratio(1.2, 0.9, 1.3), "met by the median"),
        ("at least", Ratio(0.9, 0.8, 1.3), "missed"),
        ("not measurably above", Ratio(1.01, 0.99, 1.1), "met"),
        ("not measurably above", Ratio(1.02, 1.01, 1.1), "missed"),
    ],
)
def test_verdicts(sense, value, verdict):
    assert Bound(sense, 1.0).verdict(value) == verdict


@pytest.fixture
def report():
    rows = [
        Row("step", "ours: 1 s", "theirs: 2 s", Ratio(0.5, 0.4, 0.6), "x", Bound("at most", 0.45)),
        Row("step", "ours", "nobody", Ratio.exactly(3.0), "s"),
    ]
    return Report(
        "name", "Title", "About.", rows, [Table("Sizes", ("layers", "s"), [["1", 0.25], ["2", 1500]])]
    )


def test_a_report_survives_its_file(report, tmp_path):
    report.dump(tmp_path / "report.json")
    read = Report.load(tmp_path / "report.json")
    assert (read.markdown(), read.records()) == (report.markdown(), report.records())
    assert read.rows == report.rows


def test_a_report_as_markdown_and_as_lines(report):
    assert (
        "| step | ours: 1 s | theirs: 2 s | 0.500 [0.400, 0.600] x | ≤ 0.45 | missed |" in report.markdown()
    )
    assert "| 2 | 1,500 |" in report.markdown()
    first, _, *cells = report.records()
    assert (first["value"], first["low"], first["verdict"]) == (0.5, 0.4, "missed")
    assert [(cell["what"], cell["measured"], cell["value"]) for cell in cells] == [
        ("Sizes: 1", "s", 0.25),
        ("Sizes: 2", "s", 1500),
    ]


def test_what_is_missed_or_did_not_run_is_said_first(report, tmp_path):
    ran = [("name", report, 1.0), ("against_trl", "TRL is not installed: pip install it", 2.0)]
    every.write(tmp_path, ran, quick=False)
    text = (tmp_path / "benchmarks.md").read_text()
    assert "| against_trl | did not run: TRL is not installed: pip install it | 2 s |" in text
    assert "| name | 1 missed<br>missed: step, ours: 1 s: 0.500 [0.400, 0.600] for ≤ 0.45 | 1 s |" in text
    lines = pd.read_csv(tmp_path / "benchmarks.csv")
    assert lines["value"].tolist() == [0.5, 3.0, 0.25, 1500.0]
    assert lines["verdict"].tolist()[0] == "missed" and lines["bound"].tolist()[0] == "≤ 0.45"


def test_a_benchmark_that_fails_is_its_last_line():
    assert "No module named" in every.run("not_a_benchmark", quick=True)


class TestStepper:
    def test_runs_from_pause_to_pause(self):
        done: list[int] = []

        def loop(pause):
            for step in range(3):
                done.append(step)
                pause(step * 10)

        with Stepper(loop) as stepper:
            assert done == []
            assert (stepper.advance(), done) == (0, [0])
            assert (stepper.advance(), done) == (10, [0, 1])
        assert done == [0, 1]

    def test_leaving_unwinds_the_loop(self):
        ended: list[str] = []

        def loop(pause):
            try:
                while True:
                    try:
                        pause(None)
                    except Exception:
                        ended.append("kept")
            finally:
                ended.append("unwound")

        with Stepper(loop) as stepper:
            stepper.advance()
        assert ended == ["unwound"]

    def test_errors_and_the_end_are_raised_in_advance(self):
        with Stepper(lambda pause: [][0]) as stepper, pytest.raises(IndexError):
            stepper.advance()
        with Stepper(lambda pause: None) as stepper, pytest.raises(RuntimeError, match="ended"):
            stepper.advance()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the peak of resident memory")
def test_rise_of_memory_sees_what_is_freed_again():
    assert rise_mib(lambda: bytes(0)) < 8
    assert 63 <= rise_mib(lambda: b"x" * (64 << 20)) < 72


def test_bits_of_a_set_of_experts():
    bits = {topology.name: topology.subset_bits for topology in TOPOLOGIES}
    assert bits["Mixtral-8x7B"] == 5  # 28 pairs of 8
    assert bits["Llama-4-Scout"] == 4  # one of 16
    assert bits["gpt-oss-120b"] == 24  # 10,668,000 fours of 128


def test_the_traces_of_the_drift_benchmark_differ_by_a_tenth():
    old, new = drift_speed.two_traces(1000)
    changed = (old.experts != new.experts).sum().item() / old.experts.numel()
    assert changed == pytest.approx(0.1, abs=0.005)
    assert expert_change(old, new).experts == changed  # no changed expert is another slot's
    for trace in (old, new):
        assert (trace.experts.sort(-1).values.diff(dim=-1) > 0).all()
        assert trace.experts.max() < 128
    assert drift_speed.total(old) == old.experts.view(torch.int64).sum()


@pytest.fixture(scope="module")
def steps():
    torch.set_num_threads(1)
    scene = make_scene(*TINY, cold=False)
    prompt_bS = torch.randint(2, 12, (4, 5))
    mask_bS = torch.ones_like(prompt_bS)
    mask_bS[0, :2] = 0
    shape = Shape(responses=3, new_tokens=4, minibatches=2)
    model = scene.lm.model.eval()
    return [BareStep(model, prompt_bS, mask_bS, 1, shape, shared=shared) for shared in (False, True)]


class TestBareStep:
    def test_a_prompt_run_once_gives_the_same_log_probabilities_and_gradients(self, steps):
        rows = steps[0].sample()
        repeated, shared = (step.logp(rows) for step in steps)
        assert repeated.shape == rows.response_BN.shape
        kept = rows.mask_BN > 0
        torch.testing.assert_close(repeated[kept], shared[kept], atol=1e-5, rtol=1e-5)
        parameters = list(steps[0].model.parameters())
        for one, other in zip(
            *(
                torch.autograd.grad(logp[kept].sum(), parameters, allow_unused=True)
                for logp in (repeated, shared)
            ),
            strict=True,
        ):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)

    @pytest.mark.parametrize("shared", [0, 1])
    def test_samples_end_with_the_stop_token(self, steps, shared):
        rows = steps[shared].sample()
        assert len(rows.response_BN) == 12
        for ids, mask in zip(rows.response_BN.tolist(), rows.mask_BN.tolist(), strict=True):
            length = ids.index(1) + 1 if 1 in ids else len(ids)
            assert mask == [1.0] * length + [0.0] * (len(ids) - length)

    def test_a_step_moves_the_weights(self, steps):
        before = steps[0].model.lm_head.weight.clone()
        assert steps[0]() >= 12
        assert torch.equal(before, steps[0].model.lm_head.weight)  # lr 0
        for group in steps[0].optimizer.param_groups:
            group["lr"] = 1e-3
        steps[0]()
        assert not torch.equal(before, steps[0].model.lm_head.weight)


def test_the_loop_stops_when_it_was_watched_enough(tmp_path):
    records = []

    def watch(record):
        records.append(record)
        if len(records) == 2:
            raise Enough

    run_loop(make_scene(*TINY, "drift_every=0", cold=False), tmp_path / "run", watch)
    assert [record["step"] for record in records] == [1, 2]
    assert not any(name.startswith("drift/") for name in records[0])
    stored = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in stored] == [1, 2]


def test_every_arm_of_the_overhead_is_a_row(monkeypatch):
    row = Row("training step", "", "", Ratio.exactly(1.0), "x")
    monkeypatch.setattr(routing_overhead, "step_with_recording", lambda _: row)
    monkeypatch.setattr("sys.argv", ["routing_overhead", "--quick"])
    rows = routing_overhead.measure(routing_overhead.parse()).rows
    assert (
        [row.measured for row in rows[:6]]
        == [row.measured for row in rows[6:12]]
        == [
            "plain",
            "output_router_logits=True",
            "record_routing",
            "replay_routing",
            "replay_routing, native=False",
            "replay_routing, Threshold(0.5)",
        ]
    )
    assert all(row.value.low > 0 for row in rows)


def test_without_trl_the_install_line_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "moe_rl.integrations.trl", raising=False)
    with pytest.raises(SystemExit, match=r"pip install -c constraints.txt -e '.\[trl\]'"):
        against_trl.load_trl()


@pytest.mark.slow
def test_all_of_them_at_small_sizes(tmp_path):
    command = [sys.executable, "-m", "experiments.benchmarks.all", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    text = (tmp_path / "benchmarks.md").read_text()
    installed = importlib.util.find_spec("trl") is not None
    assert done.returncode == (0 if installed else 1), done.stderr
    assert text.count("did not run") == (0 if installed else 1), text
    lines = pd.read_csv(tmp_path / "benchmarks.csv")
    assert set(lines["benchmark"]) == set(every.BENCHMARKS) - (set() if installed else {"against_trl"})
    assert (lines["value"] > -1e9).all() and lines["verdict"].isna().all()  # no bound at these sizes
