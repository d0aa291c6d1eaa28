"""Whole-file storage with atomic writes: a local directory, or anything that fsspec reaches.

Paths are relative, made by the store from digests and checked ids only. Every call blocks; use threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import fsspec  # type: ignore[import-untyped]  # ships no annotations

TEMP_SUFFIX = ".tmp"


class StoreLocked(OSError):
    """Another process has the store open."""


class StoreFiles(Protocol):
    """Files below one root. Missing files raise FileNotFoundError, an unreachable store OSError."""

    def lock(self) -> None:
        """Keep other control planes out until `close`. Raises StoreLocked."""

    def close(self) -> None:
        """Give the lock back."""

    def read(self, path: str) -> bytes:
        """The whole file."""

    def write(self, path: str, data: bytes) -> None:
        """Replace the file; a reader or a crash sees the old content or the new. Durable when it returns."""

    def delete(self, path: str) -> None:
        """Remove a file; a missing one is fine."""

    def delete_tree(self, path: str) -> None:
        """Remove a directory and all below it; a missing one is fine."""

    def exists(self, path: str) -> bool:
        """Whether the file is there."""

    def names(self, path: str) -> list[str]:
        """Names directly below a directory, sorted, leftovers of broken-off writes included; none if it is missing."""


def open_files(url: str) -> StoreFiles:
    """The storage for a path or an fsspec URL."""
    filesystem, root = fsspec.core.url_to_fs(url)
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
    return LocalFiles(Path(root)) if protocols & {"file", "local"} else RemoteFiles(filesystem, root)


class LocalFiles:
    """A directory of this machine: write beside, fsync, rename, fsync the directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock_fd: int | None = None

    def lock(self) -> None:
        """See StoreFiles. The lock goes with the process, however it ends."""
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise StoreLocked(f"the store {self.root} is in use by another control plane; give each its own") from error
        self._lock_fd = descriptor

    def close(self) -> None:
        """See StoreFiles."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def read(self, path: str) -> bytes:
        """See StoreFiles."""
        return (self.root / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """See StoreFiles."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(target.name + TEMP_SUFFIX)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(target)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_directory(target.parent)
        _sync_directory(target.parent.parent)  # the parent may be new

    def delete(self, path: str) -> None:
        """See StoreFiles."""
        target = self.root / path
        if target.exists():
            target.unlink(missing_ok=True)
            _sync_directory(target.parent)

    def delete_tree(self, path: str) -> None:
        """See StoreFiles."""
        target = self.root / path
        if target.exists():
            shutil.rmtree(target)
            _sync_directory(target.parent)

    def exists(self, path: str) -> bool:
        """See StoreFiles."""
        return (self.root / path).is_file()

    def names(self, path: str) -> list[str]:
        """See StoreFiles."""
        try:
            return sorted(entry.name for entry in os.scandir(self.root / path))
        except FileNotFoundError:
            return []


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RemoteFiles:
    """An object store or another fsspec file system, where one put is atomic. Not locked: one control plane each."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self.filesystem = filesystem
        self.root = root.rstrip("/")

    def lock(self) -> None:
        """See StoreFiles. Object stores have no lock to take."""
        self.filesystem.makedirs(self.root, exist_ok=True)

    def close(self) -> None:
        """See StoreFiles."""

    def read(self, path: str) -> bytes:
        """See StoreFiles."""
        return bytes(self.filesystem.cat_file(self._path(path)))

    def write(self, path: str, data: bytes) -> None:
        """See StoreFiles."""
        full = self._path(path)
        self.filesystem.makedirs(full.rsplit("/", 1)[0], exist_ok=True)
        self.filesystem.pipe_file(full, data)

    def delete(self, path: str) -> None:
        """See StoreFiles."""
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(self._path(path))

    def delete_tree(self, path: str) -> None:
        """See StoreFiles."""
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm(self._path(path), recursive=True)

    def exists(self, path: str) -> bool:
        """See StoreFiles."""
        return bool(self.filesystem.isfile(self._path(path)))

    def names(self, path: str) -> list[str]:
        """See StoreFiles."""
        self.filesystem.invalidate_cache()
        try:
            found = self.filesystem.ls(self._path(path), detail=False)
        except FileNotFoundError:
            return []
        return sorted(name.rstrip("/").rsplit("/", 1)[-1] for name in found)

    def _path(self, path: str) -> str:
        return f"{self.root}/{path}"
