"""A folder of files that only this user, or a user who can change the code, may write. No torch.

A file appears whole or not at all, and ends with a digest of its content. Files that other users could have changed are
not read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_SEAL = b"\nmotet sha256 "
_SEAL_SIZE = len(_SEAL) + 64 + 1  # and the digest in hexadecimal, and a line's end
_TEMPORARY = ".tmp-"
_OLD_TEMPORARY_S = 3600.0  # a temporary file of this age was left by a process that died
_LOCK_TURN_S = 0.05


class ForeignFile(OSError):
    """Somebody else owns, or may write, a folder or a file; the text names it."""


class DamagedFile(Exception):
    """A file's digest is not that of its content; the text names it."""


def sealed(content: bytes) -> bytes:
    """A file's bytes."""
    return content + _SEAL + hashlib.sha256(content).hexdigest().encode() + b"\n"


def unsealed(data: bytes) -> bytes | None:
    """The content of a file's bytes; None if these are not what was written."""
    content = data[:-_SEAL_SIZE]
    return content if sealed(content) == data else None


class CacheFolder:
    """One such folder. It is made when something is written."""

    def __init__(self, path: Path, *, trusted_owners: frozenset[int] | None = None) -> None:
        """`trusted_owners`: user ids; None: root, this user, and whoever owns this code and so decides what runs."""
        self.path = path.absolute()
        if trusted_owners is None:
            trusted_owners = frozenset({0, os.geteuid(), Path(__file__).stat().st_uid})
        self._trusted_owners = trusted_owners

    def __repr__(self) -> str:
        return f"CacheFolder({str(self.path)!r})"

    def read(self, name: str) -> bytes | None:
        """The content of a file, or None if there is none. Raises ForeignFile, DamagedFile, or OSError."""
        try:
            self.check()
            descriptor = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ForeignFile(f"{self.path / name} is not a regular file")
            self._check_owner(self.path / name, status)
            content = unsealed(file.read())
        if content is None:
            raise DamagedFile(f"{self.path / name} is damaged")
        return content

    def write(self, name: str, content: bytes) -> Path:
        """Put a file in the place of any other of its name. Raises OSError."""
        self._make()
        temporary = self.path / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.write(sealed(content))
                file.flush()
                os.fsync(descriptor)
            temporary.replace(self.path / name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._remove_old_temporaries()
        return self.path / name

    def names(self, start: str, end: str) -> list[str]:
        """Files whose names begin and end so, the one that was written or marked last first."""
        try:
            found = [(entry.stat(follow_symlinks=False).st_mtime_ns, entry.name) for entry in os.scandir(self.path)]
        except OSError:
            return []
        return [name for _, name in sorted(found, reverse=True) if name.startswith(start) and name.endswith(end)]

    def mark_used(self, name: str) -> None:
        """Make the file the first of `names`, where the folder can be written."""
        with contextlib.suppress(OSError):
            os.utime(self.path / name, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a file, where that can be done."""
        with contextlib.suppress(OSError):
            (self.path / name).unlink()

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        """Keep other processes out that lock the folder, or, after `timeout_s`, go on beside them. Raises OSError."""
        self._make()
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            end_s = time.monotonic() + timeout_s
            while not _lock(descriptor) and time.monotonic() < end_s:
                time.sleep(_LOCK_TURN_S)
            yield
        finally:
            os.close(descriptor)

    def check(self) -> None:
        """Raise ForeignFile unless only trusted users may change the folder; OSError if it is not there."""
        self._check_owner(self.path, self.path.stat())

    def _make(self) -> None:
        self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.check()

    def _check_owner(self, path: Path, status: os.stat_result) -> None:
        if status.st_uid not in self._trusted_owners:
            raise ForeignFile(f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()}")
        if status.st_mode & 0o022:
            raise ForeignFile(f"{path} may be written by others (mode {stat.S_IMODE(status.st_mode):o})")

    def _remove_old_temporaries(self) -> None:
        oldest_ns = time.time_ns() - int(_OLD_TEMPORARY_S * 1e9)
        for name in self.names(_TEMPORARY, ""):
            with contextlib.suppress(OSError):
                if (self.path / name).lstat().st_mtime_ns < oldest_ns:
                    self.remove(name)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
