"""Native ops in several numbers of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kernels.native import get_num_threads, set_num_threads

Result = TypeVar("Result")


def in_threads(run: Callable[[], Result]) -> tuple[Result, Result, Result]:
    """What `run` gives in one, two and three threads."""
    before = get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            set_num_threads(num_threads)
            results.append(run())
    finally:
        set_num_threads(before)
    return results[0], results[1], results[2]
