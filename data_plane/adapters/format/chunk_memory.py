"""Places for chunks of adapters in one piece of memory, which was pinned once.

Any thread may take a place. It is free again when nothing refers to it any more, neither the tier that keeps the
adapter nor a load that still copies from it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from data_plane.adapters.free_runs import FreeRuns

ALIGNMENT = 256  # each place begins at a multiple of this, bytes


class ChunkMemory:
    """Gives out places, each in the smallest gap that holds it."""

    def __init__(self, whole: npt.NDArray[np.uint8]) -> None:
        self._whole = whole
        self._lock = threading.Lock()
        self._free = FreeRuns(len(whole) // ALIGNMENT * ALIGNMENT)  # bytes
        # (start, length) of places that nothing refers to any more. They are collected without the lock: Python may
        # find them while this thread has it.
        self._left: deque[tuple[int, int]] = deque()

    def take(self, size_bytes: int) -> memoryview | None:
        """So many bytes, of whatever was there before; None if no gap holds them."""
        length = taken_bytes(size_bytes)
        with self._lock:
            while self._left:
                self._free.give_back(*self._left.popleft())
            start = self._free.take(length)
            if start is None:
                return None
        place = self._whole[start : start + size_bytes]
        weakref.finalize(place, self._left.append, (start, length)).atexit = False
        return place.data  # refers to `place`, and so does every part of it


def taken_bytes(size_bytes: int) -> int:
    """What a place of a size takes."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
