"""A directory of this machine as the storage of a store: write beside, fsync, compare under a lock, rename, fsync.

    tmp/            contents that are being written; emptied when the store is opened
    changes.lock    locked while a key is compared and replaced, by whichever process does so
    lock            held by the one control plane that has the store open

A directory that is moved or unmounted while it is locked is never created again: every change raises OSError until the
same directory is back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO

from control_plane.directory_lock import DirectoryInUse, DirectoryLock
from control_plane.registry.store.store import Entry, Fence, KeyChanged, KeyExists, StoreLocked

_COPY_BYTES = 4 << 20  # in memory at a time
_TEMPORARY = "tmp"
_CHANGES = "changes.lock"
_NAME_OF = attrgetter("name")


class DirectoryFence:
    """The lock of a directory. It goes with the process, however that ends."""

    is_sole = True

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = DirectoryLock(root)

    def lock(self) -> None:
        """See Fence."""
        try:
            self._lock.acquire()
        except DirectoryInUse as error:
            raise StoreLocked(f"the store {error}") from error
        shutil.rmtree(self._root / _TEMPORARY, ignore_errors=True)  # what a killed control plane left

    def close(self) -> None:
        """See Fence."""
        self._lock.release()

    def check(self) -> None:
        """See Fence."""
        self._lock.check()


class DirectoryStore:
    """See store.FencedStore."""

    def __init__(self, root: Path, *, fence: Fence | None = None) -> None:
        """`fence` stands in for the directory's own lock, where several processes shall write."""
        self.root = root
        self.root_path = str(root)
        self._fence = fence or DirectoryFence(root)
        self._changes = threading.Lock()  # of this process; `changes.lock` is between processes

    @property
    def fence(self) -> Fence:
        """See FencedStore."""
        return self._fence

    def get(self, key: str, start: int = 0, size_bytes: int | None = None) -> tuple[bytes, str]:
        """See Store."""
        try:  # without pathlib and buffers: a start makes hundreds of thousands of these calls
            descriptor = os.open(f"{self.root_path}/{key}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._fence.check()  # a store that is away says nothing about the file
            raise
        try:
            found = os.fstat(descriptor)
            left = max(found.st_size - start, 0) if size_bytes is None else size_bytes
            data = os.pread(descriptor, left, start)
            while 0 < len(data) < left and (more := os.pread(descriptor, left - len(data), start + len(data))):
                data += more
            return data, _tag(found)
        finally:
            os.close(descriptor)

    def head(self, key: str) -> Entry | None:
        """See Store."""
        try:
            found = os.stat(f"{self.root_path}/{key}")  # noqa: PTH116 - as in `get`
        except FileNotFoundError:
            self._fence.check()
            return None
        return _entry(key.rpartition("/")[2], found)

    def has(self, key: str) -> bool:
        """Whether a key has content, as far as can be seen: a quick look at 100,000 keys. `head` says what is wrong."""
        return os.access(f"{self.root_path}/{key}", os.F_OK)

    def list(self, prefix: str, *, names_only: bool = False) -> list[Entry]:
        """See Store. Directories have an entry even if they are empty."""
        entries = []
        try:
            if names_only:
                return list(map(Entry, sorted(os.listdir(f"{self.root_path}/{prefix}"))))  # noqa: PTH208
            with os.scandir(self.root / prefix) as found:
                for item in found:
                    if item.is_dir(follow_symlinks=False):
                        entries.append(Entry(item.name))
                        continue
                    try:
                        entries.append(_entry(item.name, item.stat()))
                    except FileNotFoundError:  # deleted meanwhile
                        continue
        except (FileNotFoundError, NotADirectoryError):
            self._fence.check()
        return sorted(entries, key=_NAME_OF)

    def put_if_absent(self, key: str, content: bytes | Path) -> str:
        """See Store."""
        return self._write(key, content, None)

    def replace_if_match(self, key: str, content: bytes | Path, tag: str) -> str:
        """See Store."""
        return self._write(key, content, tag)

    def delete(self, key: str, tag: str | None = None) -> None:
        """See Store. An empty directory of that name goes, too."""
        self._fence.check()
        target = self.root / key
        with self._locked():
            if tag is not None and self._present(target) != tag:
                raise KeyChanged(f"{key} changed")
            try:
                target.unlink()
            except FileNotFoundError:
                return
            except (IsADirectoryError, PermissionError):
                if not target.is_dir():
                    raise
                with contextlib.suppress(OSError):  # another server writes into it
                    target.rmdir()
        _sync_directory(target.parent)
        self._fence.check()

    def _write(self, key: str, content: bytes | Path, tag: str | None) -> str:
        self._fence.check()
        target = self.root / key
        self._make_parents(target)
        temporary = self.root / _TEMPORARY / secrets.token_hex(12)
        self._make_parents(temporary)
        try:
            with temporary.open("xb") as file:
                _fill(file, content)
                file.flush()
                _make_unique(file)
                os.fsync(file.fileno())
            with self._locked():
                present = self._present(target)
                if tag is None and present is not None:
                    raise KeyExists(f"{key} exists")
                if tag is not None and present != tag:
                    raise KeyChanged(f"{key} changed")
                try:
                    temporary.rename(target)
                except FileNotFoundError:  # the directory went with its last key
                    self._make_parents(target)
                    temporary.rename(target)
                written = _tag(target.stat())
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_directory(target.parent)
        _sync_directory(target.parent.parent)  # the parent may be new
        self._fence.check()  # moved or unmounted meanwhile, the file may be elsewhere: that is not a success
        return written

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else compares and replaces, in this process or another one. The caller does that and no more."""
        with self._changes:
            descriptor = os.open(self.root / _CHANGES, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)

    def _present(self, target: Path) -> str | None:
        try:
            return _tag(target.stat())
        except FileNotFoundError:
            return None

    def _make_parents(self, target: Path) -> None:
        """Make the directories between the root and the file. The root itself must be there."""
        for directory in reversed(target.relative_to(self.root).parents[:-1]):
            (self.root / directory).mkdir(exist_ok=True)


def _fill(file: BinaryIO, content: bytes | Path) -> None:
    if isinstance(content, bytes):
        file.write(content)
    else:
        with content.open("rb") as source:
            shutil.copyfileobj(source, file, _COPY_BYTES)


def _make_unique(file: BinaryIO) -> None:
    """Let no other content have this file's tag: an inode may be used again within one tick of the clock."""
    now_ns = os.fstat(file.fileno()).st_mtime_ns
    os.utime(file.fileno(), ns=(now_ns, now_ns - now_ns % 10**9 + secrets.randbelow(10**9)))


def _tag(found: os.stat_result) -> str:
    """Another one after every change: nobody can set the time of a file's last change (ctime)."""
    return f"{found.st_mtime_ns:x}-{found.st_ctime_ns:x}-{found.st_ino:x}-{found.st_size:x}"


def _entry(name: str, found: os.stat_result) -> Entry:
    return Entry(name, _tag(found), found.st_size, found.st_mtime)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
