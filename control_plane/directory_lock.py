"""One process per directory: a lock that ends with its holder, and a check that the directory is still the locked one.

Used for the data directory and for a local artifact store.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)

PRIVATE = 0o700  # mode of directories that hold tenants' weights


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
        """Make the directory, for this user alone, if it is missing, and lock it. Raises DirectoryInUse, or OSError.

        The mode of a directory that is there is the operator's; one that is open to all users is warned of.
        """
        self._path.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
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
        self._warn_if_open()

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

    def _warn_if_open(self) -> None:
        directory = self._path.parent
        if directory.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IXOTH):
            logger.warning(
                "%s is open to every user of this machine, who may read the adapters of all tenants in it: "
                "run `chmod o-rwx` on it",
                directory,
            )

    def release(self) -> None:
        """Give the lock back; not locked is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
