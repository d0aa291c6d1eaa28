"""Whole-file storage with atomic writes: what a store needs of it, and a local directory that gives it.

Paths are relative, made by the store from digests and checked ids only. Every call blocks; use threads.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from control_plane.directory_lock import DirectoryInUse, DirectoryLock

TEMP_SUFFIX = ".tmp"
_COPY_BYTES = 4 << 20  # in memory at a time


class StoreLocked(OSError):
    """Another process has the store open."""


class StoreFiles(Protocol):
    """Files below one root. Missing files raise FileNotFoundError, an unreachable store another OSError."""

    def lock(self) -> None:
        """Keep other control planes out until `close`. Raises StoreLocked."""

    def close(self) -> None:
        """Give the lock back. No call is under way."""

    def read(self, path: str) -> bytes:
        """The whole file."""

    def read_range(self, path: str, start: int, size_bytes: int) -> bytes:
        """That part of the file, shorter where the file ends."""

    def write(self, path: str, data: bytes) -> None:
        """Replace the file; a reader or a crash sees the old content or the new. Durable when it returns."""

    def write_file(self, path: str, source: Path) -> None:
        """`write` with the content of a local file, which is never in memory as a whole."""

    def move(self, path: str, new_path: str) -> None:
        """Rename a file within its directory. Needs no space on a local disk."""

    def delete(self, path: str) -> None:
        """Remove a file; a missing one is fine."""

    def delete_tree(self, path: str) -> None:
        """Remove a directory and all below it; a missing one is fine."""

    def exists(self, path: str) -> bool:
        """Whether the file is there."""

    def names(self, path: str) -> list[str]:
        """Names directly below a directory, sorted, leftovers of broken-off writes included; none if it is missing."""

    def may_be_written(self, path: str) -> bool:
        """Whether another process may still be writing below this directory: it must not be removed as a leftover."""


class LocalFiles:
    """A directory of this machine: write beside, fsync, rename, fsync the directory.

    A directory that is moved or unmounted while it is locked is never created again: every change raises OSError until
    the same directory is back.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = DirectoryLock(root)

    def lock(self) -> None:
        """See StoreFiles. The lock goes with the process, however it ends."""
        try:
            self._lock.acquire()
        except DirectoryInUse as error:
            raise StoreLocked(f"the store {error}") from error

    def close(self) -> None:
        """See StoreFiles."""
        self._lock.release()

    def read(self, path: str) -> bytes:
        """See StoreFiles."""
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            self._lock.check()  # a store that is away says nothing about the file
            raise

    def read_range(self, path: str, start: int, size_bytes: int) -> bytes:
        """See StoreFiles."""
        try:
            with (self.root / path).open("rb") as file:
                file.seek(start)
                return file.read(size_bytes)
        except FileNotFoundError:
            self._lock.check()
            raise

    def write(self, path: str, data: bytes) -> None:
        """See StoreFiles."""
        self._write(path, lambda file: file.write(data))

    def write_file(self, path: str, source: Path) -> None:
        """See StoreFiles."""
        with source.open("rb") as content:
            self._write(path, lambda file: shutil.copyfileobj(content, file, _COPY_BYTES))

    def move(self, path: str, new_path: str) -> None:
        """See StoreFiles."""
        self._lock.check()
        target = self.root / new_path
        (self.root / path).rename(target)
        _sync_directory(target.parent)
        self._lock.check()

    def delete(self, path: str) -> None:
        """See StoreFiles."""
        self._lock.check()
        target = self.root / path
        if target.exists():
            target.unlink(missing_ok=True)
            _sync_directory(target.parent)

    def delete_tree(self, path: str) -> None:
        """See StoreFiles."""
        self._lock.check()
        target = self.root / path
        if target.exists():
            shutil.rmtree(target)
            _sync_directory(target.parent)

    def exists(self, path: str) -> bool:
        """See StoreFiles."""
        if (self.root / path).is_file():
            return True
        self._lock.check()
        return False

    def names(self, path: str) -> list[str]:
        """See StoreFiles."""
        try:
            return sorted(entry.name for entry in os.scandir(self.root / path))
        except FileNotFoundError:
            self._lock.check()
            return []

    def may_be_written(self, path: str) -> bool:  # noqa: ARG002 - the same for all
        """See StoreFiles. The lock keeps everybody else out."""
        return False

    def _write(self, path: str, fill: Callable[[BinaryIO], object]) -> None:
        self._lock.check()
        target = self.root / path
        self._make_parent(target)
        temporary = target.with_name(target.name + TEMP_SUFFIX)
        try:
            with temporary.open("wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(target)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_directory(target.parent)
        _sync_directory(target.parent.parent)  # the parent may be new
        self._lock.check()  # moved or unmounted meanwhile, the file may be elsewhere: that is not a success

    def _make_parent(self, target: Path) -> None:
        """Make the directories between the root and the file. The root itself must be there."""
        for directory in reversed(target.relative_to(self.root).parents[:-1]):
            (self.root / directory).mkdir(exist_ok=True)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
