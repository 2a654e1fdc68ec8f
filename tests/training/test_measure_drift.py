"""`measure_drift=false`: the same run without its routing metrics."""

import pytest

from moe_rl.training.config import ReplayConfig

MEASURED = ("drift/", "load/", "time/")


def but_measurement(run):
    return [
        {key: value for key, value in record.items() if not key.startswith(MEASURED)}
        for record in run.steps().to_dict("records")
    ]


@pytest.mark.parametrize("objective, source", [("grpo", None), ("grpo", "old_policy"), ("rspo", None)])
def test_training_is_the_same_with_and_without(tmp_path, fresh, objective, source, run, config):
    options = {"steps": 2, "replay": ReplayConfig(source)}
    measured = run(tmp_path / "on", fresh(), config(**options), objective)
    unmeasured = run(tmp_path / "off", fresh(), config(**options, measure_drift=False), objective)
    assert but_measurement(measured) == but_measurement(unmeasured)
    assert any(name.startswith("drift/") for name in measured.steps())
    assert not any(name.startswith(("drift/", "time/drift")) for name in unmeasured.steps())
    # Replay and the router shift record π_old's routing all the same.
    recorded = (objective, source) != ("grpo", None)
    assert ("load/max_violation" in unmeasured.steps()) == recorded
