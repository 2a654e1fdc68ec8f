from pathlib import Path

import pandas as pd
import pytest

from moe_rl.analysis.plots import Panel, draw, looks
from moe_rl.analysis.report import write_png


def curves(values: dict[str, list[float]]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"arm": arm, "seed": 0, "x": x, "value": value}
            for arm, series in values.items()
            for x, value in enumerate(series, start=1)
        ]
    )


def test_the_papers_arms_keep_their_colours_whatever_else_is_compared() -> None:
    few, many = looks(["gspo"]), looks(["dapo", "gspo", "ppo"])
    assert few["gspo"] == many["gspo"]
    ten = looks([f"arm{i}" for i in range(10)])
    assert len(set(ten.values())) == len(ten) == 13


def test_zeros_are_drawn_below_the_smallest_other_value_of_a_log_axis() -> None:
    data = curves({"grpo": [0.0, 0.004, 0.1], "gspo": [0.2, 0.2, 0.2]})
    (ax,) = draw([Panel("clip", "fraction", data, log=True)], looks(["grpo", "gspo"])).axes
    assert ax.get_yscale() == "log"
    assert ax.lines[0].get_ydata().tolist() == [0.001, 0.004, 0.1]
    assert ax.get_ylim()[0] == pytest.approx(0.0005) and ax.get_ylim()[1] > 0.2


def test_ticks_of_a_log_axis_are_numbers_where_formulas_are_off(tmp_path: Path) -> None:
    figure = draw([Panel("clip", "fraction", curves({"grpo": [0.004, 0.1]}), log=True)], looks(["grpo"]))
    write_png(figure, tmp_path / "clip.png")
    ticks = {text.get_text() for text in figure.axes[0].get_yticklabels(which="both")}
    assert "1e\N{MINUS SIGN}02" in ticks and not any("$" in tick for tick in ticks)


def test_a_log_axis_of_zeros_stays_linear() -> None:
    (ax,) = draw([Panel("clip", "fraction", curves({"grpo": [0.0, 0.0]}), log=True)], looks(["grpo"])).axes
    assert ax.get_yscale() == "linear"


def test_legend_counts_runs_and_unfinished_runs_are_marked() -> None:
    data = pd.concat([curves({"grpo": [0.1, 0.2]}), curves({"grpo": [0.3]}).assign(seed=1)])
    panel = Panel("reward", "reward", data, ended=frozenset({("grpo", 1)}))
    figure = draw([panel], looks(["grpo"]))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["grpo (n = 2)"]
    (cross,) = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert (cross.get_xdata().tolist(), cross.get_ydata().tolist()) == ([1], [0.3])
