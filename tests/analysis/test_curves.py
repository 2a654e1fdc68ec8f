from collections.abc import Callable

import numpy as np
import pytest

from moe_rl.analysis.comparison import compare
from moe_rl.analysis.curves import bands, bin_width, layer_curves, run_curves
from moe_rl.store import Run


def test_bands_average_over_the_seeds_that_got_there(make_run: Callable[..., Run]) -> None:
    runs = [make_run("a", rewards=(0.2, 0.4)), make_run("b", seed=1, rewards=(0.6, float("nan"), 0.8))]
    (comparison,) = compare(runs)
    curves = run_curves(comparison.members, "reward/mean")
    assert curves["x"].tolist() == [1, 2, 1, 2, 3]
    band = bands(curves)
    assert band["x"].tolist() == [1, 2, 3]
    assert band["n"].tolist() == [2, 1, 1]
    assert band["mean"].tolist() == [pytest.approx(0.4), 0.4, 0.8]
    assert band["low"].tolist() == [0.2, 0.4, 0.8]


def test_long_curves_are_binned_alike_in_runs_of_different_length(make_run: Callable[..., Run]) -> None:
    rising = tuple(float(step) for step in range(1, 202))
    runs = [make_run("a", rewards=rising), make_run("b", seed=1, rewards=rising[:4])]
    (comparison,) = compare(runs)
    assert bin_width(comparison.members) == 3
    curves = run_curves(comparison.members, "reward/mean").set_index(["seed", "x"])["value"]
    assert curves[0, 3] == 2.0 and curves[0, 201] == 200.0
    assert curves[1, 3] == 2.0 and curves[1, 6] == 4.0


def test_update_curves_average_over_steps(make_run: Callable[..., Run]) -> None:
    (comparison,) = compare([make_run("a")])
    curves = run_curves(comparison.members, "drift/old", "updates")
    assert curves["x"].tolist() == [1, 2]
    assert curves["value"].tolist() == [pytest.approx(0.01), pytest.approx(0.02)]


def test_transform_and_absent_columns(make_run: Callable[..., Run]) -> None:
    (comparison,) = compare([make_run("a", moe=False)])
    rms = run_curves(comparison.members, "ratio/token_log_sq", transform=np.sqrt)
    assert rms["value"].unique() == pytest.approx([0.2])
    assert run_curves(comparison.members, "drift/old").empty
    assert layer_curves(comparison.members, "drift/old_by_layer").empty
    assert bands(run_curves(comparison.members, "drift/old")).empty


@pytest.mark.parametrize(("layer_ids", "x"), [([1, 3], [1, 3]), ([2, 2], [0, 1]), (None, [0, 1])])
def test_layers_are_numbered_by_the_model_unless_they_repeat(
    make_run: Callable[..., Run], layer_ids: list[int] | None, x: list[int]
) -> None:
    (comparison,) = compare([make_run("a", summary={"layer_ids": layer_ids} if layer_ids else {})])
    curves = layer_curves(comparison.members, "drift/old_by_layer")
    assert curves["x"].tolist() == x
    assert curves["value"].tolist() == [pytest.approx(0.01), pytest.approx(0.031)]
