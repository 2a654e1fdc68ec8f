"""Tasks by name."""

from dataclasses import MISSING, fields
from typing import Any

from moe_rl.tasks.base import Task
from moe_rl.tasks.draft_sort import DraftSort
from moe_rl.tasks.generators import Reverse, RunningSum, Sort
from moe_rl.tasks.jsonl import Jsonl
from moe_rl.tasks.reasoning import ReasoningGym
from moe_rl.tasks.two_turn import TwoTurn

TASKS: dict[str, type] = {
    "sort": Sort,
    "running_sum": RunningSum,
    "reverse": Reverse,
    "draft_sort": DraftSort,
    "two_turn": TwoTurn,
    "reasoning_gym": ReasoningGym,
    "jsonl": Jsonl,
}
"""Task classes: frozen dataclasses whose fields are the task's options."""


def get_task(name: str, **options: Any) -> Task:
    """The task `name` with `options`.

    Raises ValueError for an unknown name, an unknown, missing or wrong option, each in one line.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: choose from {', '.join(TASKS)}")
    known = fields(TASKS[name])
    names = [option.name for option in known]
    unknown = [option for option in options if option not in names]
    if unknown:
        raise ValueError(f"task {name} has no option {unknown[0]!r}: it has {', '.join(names)}")
    required = [option.name for option in known if option.default is option.default_factory is MISSING]
    missing = [option for option in required if option not in options]
    if missing:
        raise ValueError(f"task {name} needs the option {missing[0]!r}")
    task: Task = TASKS[name](**options)
    return task
