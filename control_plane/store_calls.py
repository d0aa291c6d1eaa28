"""Runs blocking calls of a storage in threads of their own, and bounds how long anybody waits for one.

A call that hangs keeps its thread: nothing can end it. Once `MAX_HUNG_CALLS` hang, further calls are refused at once.
Used by the registry for changes of the artifact store, by the host cache for reads of it, and for the files of adapters
that are to be registered.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from control_plane.daemon_threads import DaemonThreads
from control_plane.errors import StoreUnavailable
from control_plane.observers.timings import NO_TIMINGS, Timings

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 10.0
MAX_HUNG_CALLS = 8
_NUM_THREADS = 32  # a start reads many small files; more than may hang, so that a store that returns is noticed
BYTES_PER_S = 1 << 20  # a large file has a second more for every so many bytes
_T = TypeVar("_T")

# Set when a call hangs that belongs to the change which runs in this context; see registry.changes.
HANG: contextvars.ContextVar[asyncio.Event | None] = contextvars.ContextVar("store_hang", default=None)


class StoreCalls:
    """The way to a storage from the event loop."""

    def __init__(
        self,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        what: str = "the artifact store",
        timings: Timings = NO_TIMINGS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`what` names the storage in messages. `timings` learns of each call that was waited for."""
        self._timings = timings
        self._clock = clock
        self.timeout_s = timeout_s  # longest time for a call; writes of large files have more. May be changed
        self._what = what
        self._threads = DaemonThreads(_NUM_THREADS, name="motet-store")
        self._num_hung = 0

    @property
    def num_hung(self) -> int:
        """Calls that run longer than their time limit at this moment."""
        return self._num_hung

    async def read(self, call: Callable[..., _T], *arguments: Any, extra_s: float = 0.0) -> _T:
        """Make a call that only reads. Raises StoreUnavailable after the time limit; the call itself goes on."""
        begun_s = self._clock()
        task, limit_s = self._start(call, arguments), self.timeout_s + extra_s
        try:
            await asyncio.wait([task], timeout=limit_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        self._timings.store_call("read", self._clock() - begun_s)
        if not task.done():
            self._count_hung(task, call)
            raise self._unavailable(limit_s)
        return task.result()

    async def change(self, call: Callable[..., _T], *arguments: Any, size_bytes: int = 0) -> _T:
        """A call that changes the store: waited for until it ends, so that memory follows the store in order.

        Once its time is over, HANG is set for who waits for the change.
        """
        begun_s = self._clock()
        task = self._start(call, arguments)
        await asyncio.wait([task], timeout=self.timeout_s + size_bytes / BYTES_PER_S)
        if not task.done():
            self._count_hung(task, call)
            if (hang := HANG.get()) is not None:
                hang.set()
        try:
            return await task
        finally:
            self._timings.store_call("change", self._clock() - begun_s)

    def close(self) -> None:
        """Let the threads end; a hung one does not keep the process."""
        self._threads.close()

    def _start(self, call: Callable[..., _T], arguments: tuple[Any, ...]) -> asyncio.Task[_T]:
        if self._num_hung >= MAX_HUNG_CALLS:
            raise self._unavailable(self.timeout_s)
        return asyncio.get_running_loop().create_task(self._threads.run(call, *arguments))

    def _count_hung(self, task: asyncio.Task[Any], call: Callable[..., Any]) -> None:
        self._num_hung += 1
        logger.error("%s hangs call=%s num_hung=%d", self._what, call.__qualname__, self._num_hung)
        task.add_done_callback(self._came_back)

    def _came_back(self, task: asyncio.Task[Any]) -> None:
        self._num_hung -= 1
        error = None if task.cancelled() else task.exception()  # taken, so that asyncio does not report it as lost
        logger.warning("%s came back num_hung=%d error=%r", self._what, self._num_hung, error)

    def _unavailable(self, limit_s: float) -> StoreUnavailable:
        return StoreUnavailable(f"{self._what} did not respond within {limit_s:g} s; try again", retry_after_s=5.0)
