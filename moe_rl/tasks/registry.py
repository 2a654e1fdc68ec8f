"""Tasks by name."""

from dataclasses import fields
from typing import Any

from moe_rl.tasks.base import Task
from moe_rl.tasks.generators import Reverse, RunningSum, Sort

TASKS: dict[str, type] = {
    "sort": Sort,
    "running_sum": RunningSum,
    "reverse": Reverse,
}
"""Task classes: frozen dataclasses whose fields are the task's options."""


def get_task(name: str, **options: Any) -> Task:
    """The task `name` with `options`. Raises ValueError for an unknown name, option or a wrong value."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: choose from {', '.join(TASKS)}")
    known = [field.name for field in fields(TASKS[name])]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"task {name} has no option {unknown[0]!r}: it has {', '.join(known)}")
    return TASKS[name](**options)
