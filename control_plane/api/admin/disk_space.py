"""Reserves disk space for several writers at once, so that they do not all count on the same free bytes."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from control_plane.errors import Exhausted

# The writers leave this much free.
SPARE_BYTES = 64 * 2**20
RETRY_AFTER_S = 60.0


def free_bytes_of(directory: Path) -> int:
    """Free space of the disk that `directory` is on, bytes."""
    return shutil.disk_usage(directory).free


class DiskSpace:
    """The space of one disk. `free_bytes` returns what is free there at present."""

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        # Invariant: the sum of num_bytes over the open reservations. Bytes that were written are in no reservation:
        # the disk itself accounts for them.
        self._reserved_bytes = 0

    @contextlib.contextmanager
    def reserved(self, num_bytes: int) -> Iterator[Reservation]:
        """Reserve `num_bytes` for one writer while the block runs. Raises Exhausted if less is left."""
        left = self._free_bytes() - self._reserved_bytes - SPARE_BYTES
        if num_bytes > left:
            raise Exhausted(
                f"{num_bytes} bytes are announced, more than the server's disk can take beside the uploads that run "
                f"({SPARE_BYTES} bytes stay free); try again when those have ended, or have space made on the server",
                retry_after_s=RETRY_AFTER_S,
            )
        reservation = Reservation(self, num_bytes)
        self._reserved_bytes += num_bytes
        try:
            yield reservation
        finally:
            reservation.use(reservation.num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self._reserved_bytes -= num_bytes


class Reservation:
    """What one writer may still write."""

    def __init__(self, space: DiskSpace, num_bytes: int) -> None:
        self._space = space
        self.num_bytes = num_bytes

    def use(self, num_bytes: int) -> None:
        """Record that `num_bytes` of the reservation were written."""
        assert num_bytes <= self.num_bytes, f"{num_bytes} bytes written where {self.num_bytes} were left"
        self.num_bytes -= num_bytes
        self._space._give_back(num_bytes)
