"""The progress bars of everything that goes by steps."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm


def steps_bar(title: str, done: int, steps: int, line: int, leave: bool = True) -> Any:
    """A bar over the steps done + 1, …, steps, on a line of a terminal that runs may share; off elsewhere."""
    return tqdm(
        range(done + 1, steps + 1),
        title,
        initial=done,
        total=steps,
        unit="step",
        position=line,
        dynamic_ncols=True,
        leave=leave,
        disable=None,  # off when not a terminal
    )
