"""`drift_every`: the same run with fewer, or without, its routing metrics."""

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
    unmeasured = run(tmp_path / "off", fresh(), config(**options, drift_every=0), objective)
    assert but_measurement(measured) == but_measurement(unmeasured)
    assert any(name.startswith("drift/") for name in measured.steps())
    assert not any(name.startswith(("drift/", "time/drift")) for name in unmeasured.steps())
    # Replay and the router shift record π_old's routing all the same.
    recorded = (objective, source) != ("grpo", None)
    assert ("load/max_violation" in unmeasured.steps()) == recorded


def test_a_step_between_measurements_has_no_drift(tmp_path, fresh, run, config):
    every = run(tmp_path / "every", fresh(), config(steps=4), "grpo").steps()
    second = run(tmp_path / "second", fresh(), config(steps=4, drift_every=2), "grpo").steps()
    assert second["drift/old"].notna().tolist() == [False, True, False, True]
    assert second["drift/old"].dropna().tolist() == every["drift/old"][[1, 3]].tolist()
    assert second["load/max_violation"].tolist() == every["load/max_violation"].tolist()


def test_a_negative_interval_is_refused(config):
    with pytest.raises(ValueError, match="drift_every=-1: must be at least 0"):
        config(drift_every=-1).check()
