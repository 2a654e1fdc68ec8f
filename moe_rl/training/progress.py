"""The progress bars of everything that goes by steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def phases_bar(title: str, phases: int, line: int) -> Iterator[Callable[[str], None]]:
    """A bar over so many phases; what it gives is called with the name of each that is done."""
    with tqdm(total=phases, desc=title, position=line, dynamic_ncols=True, disable=None) as bar:

        def done(phase: str) -> None:
            bar.set_postfix_str(phase)
            bar.update()

        yield done
