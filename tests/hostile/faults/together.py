"""Runs calls at once in threads that nobody has to wait for: what hangs is reported, and holds up nothing."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def together(calls: Sequence[Callable[[], T]], limit_s: float) -> tuple[list[T], list[str]]:
    """What the calls return that end in time, in their order, and the stacks of the others.

    Raises what the first call that failed raised.
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(deadline_s - time.monotonic(), 0.0))
    stacks = [stack_of(thread) for thread in threads if thread.is_alive()]
    for index in sorted(errors):
        raise errors[index]
    return [results[index] for index in sorted(results)], stacks


def stack_of(thread: threading.Thread) -> str:
    """The innermost calls of a thread that runs."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)[-6:]) if frame is not None else f"{thread.name} has just ended"
