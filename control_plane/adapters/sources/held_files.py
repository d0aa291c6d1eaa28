"""Files of an adapter, held open, so that a name that is swapped for a link leads nowhere else.

Whoever may write to a directory can replace a file, or a folder above it, by a link after the server looked at it. So
the server opens each file once, learns from the kernel where the opened file lies, and reads that file alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from control_plane.checks import refuse
from control_plane.errors import PathNotAllowed
from control_plane.store_calls import StoreCalls


@contextlib.asynccontextmanager
async def held_open(
    calls: StoreCalls, files: Mapping[str, Path], described: str, *, below: Path
) -> AsyncIterator[dict[str, Path]]:
    """Paths by name, which lead to the same files while the block runs, for this process and its children.

    `described` is the directory in messages. `below`: resolved; every file has to lie there. Raises PathNotAllowed,
    InvalidRequest for a name that is gone or not a file, and StoreUnavailable.
    """
    held = _Held()
    try:
        yield await calls.read(held.open, files, described, below)
    finally:
        held.close()


class _Held:
    """Descriptors of one adapter. `open` may still run, in a thread that hung, when `close` was called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptors: list[int] = []
        self._is_closed = False

    def open(self, files: Mapping[str, Path], described: str, below: Path) -> dict[str, Path]:
        return {name: self._open(path, name, described, below) for name, path in files.items()}

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            while self._descriptors:
                os.close(self._descriptors.pop())

    def _open(self, path: Path, name: str, described: str, below: Path) -> Path:
        try:
            # O_PATH: a pipe does not wait for its other end, and a device does nothing. Whoever reads opens it anew.
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise refuse(
                "source", f"{described}: {name} was there and cannot be opened any more ({error.strerror}); try again"
            ) from None
        with self._lock:
            if self._is_closed:
                os.close(descriptor)
                raise refuse("source", f"{described}: nobody waits for its files any more")
            self._descriptors.append(descriptor)
        place = f"/proc/{os.getpid()}/fd/{descriptor}"
        if not Path(place).readlink().is_relative_to(below):
            raise PathNotAllowed(f"{described} leads out of its root")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise refuse("source", f"{described}: {name} is not a file")
        return Path(place)
