"""One process per directory: a lock that ends with its holder, and a check that the directory is still the locked one.

Used for the data directory and for a local artifact store.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class DirectoryInUse(OSError):
    """Another process holds the directory's lock."""


class DirectoryAway(OSError):
    """The directory is not the one that was locked: it was moved, removed or unmounted."""


class DirectoryLock:
    """An exclusive lock on a directory. The kernel releases it when the process ends, however it ends."""

    def __init__(self, directory: Path, name: str = "lock") -> None:
        """`name`: of the lock file in the directory. Two locks of one directory have two names."""
        self._path = directory / name
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Make the directory if it is missing, and lock it. Raises DirectoryInUse, or OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise DirectoryInUse(
                f"{self._path.parent} is in use by another control plane; give each its own"
            ) from error
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def check(self) -> None:
        """Raise DirectoryAway unless the path still leads to the locked directory. Not locked: no check."""
        if self._descriptor is None:
            return
        held = os.fstat(self._descriptor)
        try:
            found = os.stat(self._path)  # noqa: PTH116 - the counterpart of fstat
        except OSError as error:
            raise DirectoryAway(f"{self._path} is not there: {error.strerror}") from error
        if (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
            raise DirectoryAway(f"{self._path} is not the file that this process locked")

    def release(self) -> None:
        """Give the lock back; not locked is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
