"""Time as far as this process was running, and time limits that are judged by it.

A process that was stopped (SIGSTOP, a paused or migrated machine), or whose event loop was blocked, finds everybody
else late when it goes on: workers whose heartbeats lie unread, clients whose reads it did not notice. Whoever is judged
by silence is judged by this clock. Deadlines that a client set stay on the real one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

# A longer time between two readings was an absence. Far above the time between two ticks of the fleet on a busy
# machine, and below the time after which the first peer is given up.
MAX_GAP_S = 1.0
LOOK_S = MAX_GAP_S / 2  # whoever judges by this clock reads it at least so often


class AwakeClock:
    """Seconds, counting up, in which the event loop was running. Read by its thread alone.

    Every reading proves that the loop runs; a gap of more than MAX_GAP_S between two of them counts as nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_s = clock()
        self._absent_s = 0.0

    def __call__(self) -> float:
        now_s = self._clock()
        gap_s = now_s - self._read_s
        if gap_s > MAX_GAP_S:
            self._absent_s += gap_s
        self._read_s = now_s
        return now_s - self._absent_s


class AwakeTimeout:
    """`asyncio.timeout` by an AwakeClock: an async context manager that raises TimeoutError."""

    def __init__(
        self,
        limit_s: float,
        clock: AwakeClock,
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle] | None = None,
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._call_later = call_later or asyncio.get_running_loop().call_later
        self._has_expired = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a time limit outside a task"
        self._task = task
        self._num_cancelled = task.cancelling()  # by others, before
        self._until_s = self._clock() + self._limit_s
        self._handle = self._call_later(min(self._limit_s, LOOK_S), self._look)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        if self._has_expired and self._task.uncancel() <= self._num_cancelled and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _look(self) -> None:
        left_s = self._until_s - self._clock()
        if left_s > 0:
            self._handle = self._call_later(min(left_s, LOOK_S), self._look)
        else:
            self._has_expired = True
            self._task.cancel()
