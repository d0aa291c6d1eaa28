"""The files of an audit log: the present one, to which lines are appended, and those that were rotated away.

Rotated files are FILE.000001, FILE.000002 and so on, the oldest first; a name is never used again. Knows lines and
nothing of what they say. Used by the writer's thread alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path

from motet.audit.chain import GENESIS, ROTATED_DIGITS, Line

MODE = 0o600
_BLOCK_BYTES = 1 << 16


class AuditLogInUse(OSError):
    """Another process writes to the file."""


@dataclass(frozen=True, slots=True)
class Tail:
    """How a log ends."""

    last_digest: str  # of its last line, whole or cut off; GENESIS where there is no line
    torn_bytes: int | None = None  # length of the last line where that one is cut off
    digest_before_torn: str = GENESIS
    is_ended: bool = True  # the file is empty or its last line is followed by an end of line


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a rotation did."""

    rotated: str  # name of the file that was the present one
    removed: tuple[str, ...]  # names of the oldest files, which were removed


class LogFile:
    """The present file, and how one follows another."""

    def __init__(self, path: Path, *, max_bytes: int, num_kept: int | None = None) -> None:
        """Opens the file, or makes it. `num_kept`: of rotated files; None: all.

        Raises OSError, AuditLogInUse where another process has the file.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._num_kept = num_kept
        self._fd = self._open()
        self._size = os.fstat(self._fd).st_size
        self._rotated: Path | None = None  # while a rotation is half-done: the file has its name already

    def tail(self) -> Tail:
        """How the log ends at present, the last rotated file included where the present one is empty."""
        lines = _last_lines(self._fd, 2)
        earlier = self._last_of_rotated(2)
        is_ended = not lines or lines[-1].is_ended
        lines = [*earlier, *lines][-2:]
        if not lines:
            return Tail(GENESIS)
        last = lines[-1]
        if last.is_ended and last.event() is not None:
            return Tail(last.digest)
        before = lines[0].digest if len(lines) > 1 else GENESIS
        return Tail(last.digest, len(last.raw), before, is_ended)

    def write(self, data: bytes) -> int:
        """Append as much of the data as fits; how many bytes. Raises OSError."""
        num_bytes = os.write(self._fd, data)
        self._size += num_bytes
        return num_bytes

    def sync(self) -> None:
        """Return once everything that was written is on the disk. Raises OSError."""
        os.fdatasync(self._fd)

    def is_full(self, num_unwritten: int, num_bytes: int) -> bool:
        """Whether `num_bytes` after `num_unwritten` would make a file that has lines larger than allowed."""
        size = self._size + num_unwritten
        return size > 0 and size + num_bytes > self._max_bytes

    def rotate(self) -> Rotation:
        """Go on in a new file. Raises OSError; called again, it goes on where it failed."""
        if self._rotated is None:
            numbers = [number for number, _ in rotated_files(self._path)]
            target = self._path.with_name(f"{self._path.name}.{max(numbers, default=0) + 1:0{ROTATED_DIGITS}d}")
            self.sync()
            self._path.rename(target)
            self._rotated = target
        self._go_on_in(self._open())
        rotated, self._rotated = self._rotated, None
        return Rotation(rotated.name, self._remove_oldest())

    def is_in_place(self) -> bool:
        """Whether the file still has its name: nobody moved or removed it."""
        try:
            found, own = self._path.stat(), os.fstat(self._fd)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def reopen(self) -> None:
        """Go on in the file that has the name at present, or in a new one. Raises OSError."""
        self._go_on_in(self._open())

    def close(self) -> None:
        """Let the file go, for good."""
        os.close(self._fd)

    def _open(self) -> int:
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(OSError):  # so that the file's name is there after a power failure, too
                _sync_directory(self._path.parent)
        except BlockingIOError as error:
            os.close(fd)
            raise AuditLogInUse(error.errno, "another process writes to it", str(self._path)) from error
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _go_on_in(self, fd: int) -> None:
        former, self._fd = self._fd, fd
        self._size = os.fstat(fd).st_size
        os.close(former)

    def _last_of_rotated(self, num_lines: int) -> list[Line]:
        rotated = rotated_files(self._path)
        if not rotated:
            return []
        fd = os.open(rotated[-1][1], os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _last_lines(fd, num_lines)
        finally:
            os.close(fd)

    def _remove_oldest(self) -> tuple[str, ...]:
        if self._num_kept is None:
            return ()
        rotated = [path for _, path in rotated_files(self._path)]
        removed = rotated[: max(len(rotated) - self._num_kept, 0)]
        for path in removed:
            path.unlink(missing_ok=True)
        return tuple(path.name for path in removed)


def rotated_files(path: Path) -> list[tuple[int, Path]]:
    """The files that were rotated away from `path`, with their numbers, the oldest first."""
    pattern = re.compile(re.escape(path.name) + rf"\.(\d{{{ROTATED_DIGITS},}})")
    found = [(int(match[1]), other) for other in path.parent.iterdir() if (match := pattern.fullmatch(other.name))]
    return sorted(found)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _last_lines(fd: int, num_lines: int) -> list[Line]:
    """The last lines of a file, however long they are."""
    end = os.fstat(fd).st_size
    tail = b""
    while end > 0 and tail.count(b"\n") <= num_lines:
        start = max(end - _BLOCK_BYTES, 0)
        tail = os.pread(fd, end - start, start) + tail
        end = start
    if not tail:
        return []
    is_ended = tail.endswith(b"\n")
    raws = tail.removesuffix(b"\n").split(b"\n")
    return [Line("", 0, raw, is_ended or raw is not raws[-1]) for raw in raws[-num_lines:]]


class StandardOutput:
    """Standard output as a log without files. What reads it keeps the lines."""

    def __init__(self, fd: int = 1) -> None:
        self._fd = fd

    def tail(self) -> Tail:
        """Nothing: each start begins a chain of its own."""
        return Tail(GENESIS)

    def write(self, data: bytes) -> int:
        """Write as much of the data as there is room for. Raises OSError."""
        return os.write(self._fd, data)

    def sync(self) -> None:
        """Nothing: whoever reads the lines keeps them."""

    def is_full(self, num_unwritten: int, num_bytes: int) -> bool:  # noqa: ARG002 - the same methods as a file
        """Never: there is nothing to rotate."""
        return False

    def rotate(self) -> Rotation:
        """Not called: it is never full."""
        raise AssertionError("standard output is never full")

    def is_in_place(self) -> bool:
        """Always."""
        return True

    def reopen(self) -> None:
        """Not called: it is always in place."""
        raise AssertionError("standard output is always in place")

    def close(self) -> None:
        """Nothing: the process owns it."""
