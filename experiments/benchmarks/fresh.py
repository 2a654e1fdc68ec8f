"""One call in a process of its own, whose memory nothing before it has touched."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_fresh_process(function: Callable[..., T], *arguments: object) -> T:
    """`function(*arguments)`, a function of a module; the libraries are imported once for all such calls."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()
