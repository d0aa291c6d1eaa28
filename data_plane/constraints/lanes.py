"""The threads on which constraints are followed. What is quick never waits behind what is known to be slow.

Quick tasks get a thread each, up to a bound: one that turns out to be slow holds up its own thread only. Slow tasks
share a few threads of a lower priority and wait for one another. Grammars are read on a thread of their own, in order.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")

MAX_QUICK_THREADS = 32  # those that are held up by a task included
SLOW_NICENESS = 10  # of the threads of slow tasks: a forward pass on the same cores goes first


class Lanes:
    """Threads come with the first task."""

    def __init__(self, num_threads: int | None = None) -> None:
        """`num_threads`: how many tasks of a kind should run at once; None: half of the cores, at most four."""
        self.num_threads = num_threads or max(1, min(4, (os.cpu_count() or 2) // 2))
        self._readers: ThreadPoolExecutor | None = None
        self._quick: ThreadPoolExecutor | None = None
        self._slow: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()
        self._changed = threading.Condition()

    def read(self, task: Callable[[], _T]) -> Future[_T]:
        """Run a task after those that were given before."""
        with self._starting:
            if self._readers is None:
                self._readers = ThreadPoolExecutor(1, thread_name_prefix="grammars")
            return self._readers.submit(task)

    def run_quick(self, task: Callable[[], None]) -> None:
        """Run a task on a free thread."""
        with self._starting:
            if self._quick is None:
                self._quick = ThreadPoolExecutor(MAX_QUICK_THREADS, thread_name_prefix="constraints")
            self._quick.submit(task)

    def run_slow(self, task: Callable[[], None]) -> None:
        """Run a task after slow ones that were given before."""
        with self._starting:
            if self._slow is None:
                self._slow = ThreadPoolExecutor(
                    self.num_threads, thread_name_prefix="slow-constraints", initializer=_lower_priority
                )
            self._slow.submit(task)

    def now_s(self) -> float:
        """The time, seconds from any beginning."""
        return time.perf_counter()

    def cpu_s(self) -> float:
        """CPU time of the thread that calls, seconds from any beginning."""
        return time.thread_time()

    def notify(self) -> None:
        """Let `wait` look at its condition again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the condition holds, which a task brings about that notifies; whether it holds."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)


def _lower_priority() -> None:
    """Lower the priority of this thread and of those that it starts. Linux has one for each thread."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SLOW_NICENESS)
