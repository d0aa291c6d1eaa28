"""The directory with downloads: those that run, and what broken ones left for the next try, for a bounded time.

Used from several threads. One download at a time has a place; another one of the same content gets a place of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

KEPT_S = 24 * 3600.0


class PartialFiles:
    """Places by content. What is kept of broken downloads is at most `max_kept_bytes` and 24 hours old."""

    def __init__(self, directory: Path, *, max_kept_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._max_kept_bytes = max_kept_bytes
        self._clock = clock  # wall clock, as the file system's
        self._lock = threading.Lock()
        self._in_use: set[Path] = set()

    def take(self, identity: str) -> Path:
        """A directory for this content, with what an earlier download left there."""
        key = hashlib.sha256(identity.encode()).hexdigest()
        with self._lock:
            place = self._directory / key
            if place in self._in_use:
                place = self._directory / f"{key}-{secrets.token_hex(8)}"
            self._in_use.add(place)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        return place

    def give_back(self, place: Path, *, is_kept: bool) -> None:
        """End the use. What is kept serves the next download of the same content."""
        if not is_kept or "-" in place.name:
            shutil.rmtree(place, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.utime(place, (self._clock(), self._clock()))
        with self._lock:
            self._in_use.discard(place)
        self.sweep()

    def sweep(self) -> None:
        """Remove what is too old, and the oldest of what is too much."""
        with self._lock:
            left_bytes = self._max_kept_bytes
            for modified_s, place in sorted(self._unused(), reverse=True):
                left_bytes -= _size_of(place)
                if left_bytes < 0 or modified_s < self._clock() - KEPT_S or "-" in place.name:
                    logger.info("partial download removed place=%s", place.name)
                    shutil.rmtree(place, ignore_errors=True)

    def _unused(self) -> list[tuple[float, Path]]:
        found = []
        with contextlib.suppress(OSError):
            for place in self._directory.iterdir():
                if place not in self._in_use:
                    with contextlib.suppress(OSError):
                        found.append((place.stat().st_mtime, place))
        return found


def _size_of(place: Path) -> int:
    size_bytes = 0
    with contextlib.suppress(OSError):
        for path in place.iterdir():
            size_bytes += path.stat().st_size
    return size_bytes
