"""CPU time and priority of single threads, which Linux has for each. Elsewhere nothing is known and nothing changes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_IS_LINUX = sys.platform == "linux"
_SET_NAME, _GET_NAME = 15, 16  # of prctl
_naming = threading.Lock()
_num_named = 0


def cpu_s(thread_id: int) -> float:
    """CPU time of a thread of this process, seconds; 0 where it is not known."""
    if not _IS_LINUX:
        return 0.0
    try:
        return time.clock_gettime((~thread_id << 3) | 6)  # as pthread_getcpuclockid has it
    except OSError:  # it has ended
        return 0.0


def lower(thread_id: int, niceness: int) -> None:
    """Set the niceness of a thread of this process so far above that of the process, which is that of its first thread.

    19 is the highest. The threads that it starts from then on have the same. A thread that has ended is left alone.
    """
    if _IS_LINUX:
        own = os.getpriority(os.PRIO_PROCESS, os.getpid())
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread_id, min(own + niceness, 19))


@contextlib.contextmanager
def new_threads() -> Iterator[list[int]]:
    """The ids of the threads that this thread starts while entered, in the list when it is left.

    A thread begins with the name of the one that starts it: that is how they are found.
    """
    found: list[int] = []
    if not _IS_LINUX:
        yield found
        return
    global _num_named
    prctl = ctypes.CDLL(None).prctl
    before = ctypes.create_string_buffer(16)
    with _naming:
        _num_named += 1
        name = f"follow-{_num_named % 10**8}"
    prctl(_GET_NAME, before, 0, 0, 0)
    prctl(_SET_NAME, name.encode(), 0, 0, 0)
    try:
        yield found
    finally:
        prctl(_SET_NAME, before, 0, 0, 0)
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                if (task / "comm").read_text().strip() == name:
                    found.append(int(task.name))
