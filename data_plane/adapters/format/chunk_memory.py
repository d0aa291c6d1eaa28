"""Places for chunks of adapters in one piece of memory, which was pinned once.

Any thread may take a place. It is free again when nothing refers to it any more, neither the tier that keeps the
adapter nor a load that still copies from it.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque

import numpy as np
import numpy.typing as npt

ALIGNMENT = 256  # each place begins at a multiple of this, bytes


class ChunkMemory:
    """Gives out places, each in the smallest gap that holds it."""

    def __init__(self, whole: npt.NDArray[np.uint8]) -> None:
        self._whole = whole
        self._lock = threading.Lock()
        # Invariant: (start, length) in bytes, sorted, no two of them touch; neither do they and the places in use.
        self._gaps: list[tuple[int, int]] = []
        # Places that nothing refers to any more. They are collected without the lock: Python may find them while this
        # thread has it.
        self._left: deque[tuple[int, int]] = deque([(0, len(whole) // ALIGNMENT * ALIGNMENT)])

    def take(self, size_bytes: int) -> memoryview | None:
        """So many bytes, of whatever was there before; None if no gap holds them."""
        length = taken_bytes(size_bytes)
        with self._lock:
            while self._left:
                self._join(*self._left.popleft())
            fitting = [gap for gap in self._gaps if gap[1] >= length]
            if not fitting:
                return None
            start, free = min(fitting, key=lambda gap: gap[1])
            index = bisect_left(self._gaps, (start, free))
            self._gaps[index : index + 1] = [(start + length, free - length)] if free > length else []
        place = self._whole[start : start + size_bytes]
        weakref.finalize(place, self._left.append, (start, length)).atexit = False
        return place.data  # refers to `place`, and so does every part of it

    def _join(self, start: int, length: int) -> None:
        if length == 0:
            return
        index = bisect_left(self._gaps, (start, 0))
        if index < len(self._gaps) and self._gaps[index][0] == start + length:
            length += self._gaps.pop(index)[1]
        if index and sum(self._gaps[index - 1]) == start:
            before = self._gaps.pop(index - 1)
            start, length = before[0], before[1] + length
        insort(self._gaps, (start, length))


def taken_bytes(size_bytes: int) -> int:
    """What a place of a size takes."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
