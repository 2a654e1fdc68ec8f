"""The benchmark of recording and replay: its statistics by hand, and every arm on a tiny model."""

import pytest

from experiments.benchmarks.routing_overhead import Ratio, main


def test_the_median_and_its_interval_are_order_statistics():
    """Of 40 values the median is between the 14th and the 27th with probability 95 %."""
    ratio = Ratio.of([float(value) for value in range(40, 0, -1)])
    assert (ratio.median, ratio.low, ratio.high) == (20.5, 14.0, 27.0)
    assert str(Ratio.of([1.0, 3.0, 2.0])) == "2.000 [1.000, 3.000]"


def test_every_arm_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    sizes = "--layers 1 --width 16 --inner 8 --experts 4 --top-k 2 --sequences 1 --length 4 --pairs 2"
    monkeypatch.setattr("sys.argv", ["routing_overhead", *sizes.split()])
    main()
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line[:1] == "|"]
    assert rows == [
        "time / plain",
        "---",
        "plain",
        "output_router_logits=True",
        "record_routing",
        "replay_routing",
        "replay_routing, native=False",
        "replay_routing, Threshold(0.5)",
    ]
