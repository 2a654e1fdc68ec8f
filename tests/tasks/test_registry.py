from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import yaml

from moe_rl.tasks import TASKS, get_task

CONF = Path(__file__).parents[2] / "conf" / "task"


def test_unknown_names_and_options_come_with_the_choices():
    with pytest.raises(
        ValueError,
        match="unknown task 'sorting': choose from sort, running_sum, reverse, draft_sort, two_turn, "
        "reasoning_gym, jsonl",
    ):
        get_task("sorting")
    with pytest.raises(
        ValueError, match="task sort has no option 'length': it has min_length, max_length, warmup_min_length"
    ):
        get_task("sort", length=3)


def test_a_missing_option_is_named():
    with pytest.raises(ValueError, match="task jsonl needs the option 'path'"):
        get_task("jsonl", grading="exact")


def test_every_task_has_a_config_file():
    assert {path.stem for path in CONF.glob("*.yaml")} == set(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_a_config_file_shows_the_defaults_of_its_task(name):
    config = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert config.pop("defaults") == [f"schema_{name}", "_self_"]
    assert config.pop("name") == name
    expected = {}
    for option in fields(TASKS[name]):
        value = option.default if option.default_factory is MISSING else option.default_factory()
        expected[option.name] = "???" if value is MISSING else value  # Hydra's mark of a required value
    assert config == expected
