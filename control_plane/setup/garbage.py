"""Python's garbage collection, run so rarely that it does not hold up a server.

A full collection walks every object that is not frozen, and nothing else runs meanwhile. gRPC makes 85 objects for
a call, so beside 4,000 idle calls a walk takes a quarter of a second and more; Python would do it every few seconds.
What calls leave behind for a full collection is small, so it can wait: full collections take one part in 200 of the
time at most.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

MIN_INTERVAL_S = 30.0
MAX_PART = 1 / 200  # of the time, for full collections
_NEVER = 1_000_000_000  # so many collections of the middle generation before Python's own full one


class FullCollections:
    """When the next full collection is due."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, collect: Callable[[], object] = gc.collect
    ) -> None:
        self._clock = clock
        self._collect = collect
        self._last_s = clock()
        self._interval_s = MIN_INTERVAL_S

    @property
    def due_in_s(self) -> float:
        """Seconds until the next one; 0 if it is due."""
        return max(self._last_s + self._interval_s - self._clock(), 0.0)

    def collect(self) -> None:
        """Collect now; the next one is due when this one was its part of the time."""
        began_s = self._clock()
        self._collect()
        self._last_s = self._clock()
        self._interval_s = max(MIN_INTERVAL_S, (self._last_s - began_s) / MAX_PART)


async def collect_rarely(collections: FullCollections | None = None) -> None:
    """Freeze what is there, and from now on do Python's full collections, until this is cancelled."""
    due = collections or FullCollections()
    due.collect()
    gc.freeze()  # what lives as long as the process need not be walked by every collection
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    try:
        while True:
            await asyncio.sleep(due.due_in_s)
            due.collect()
    finally:
        gc.set_threshold(young, middle, full)
