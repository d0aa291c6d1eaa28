"""An object store, or another file system that fsspec reaches, as the storage of a store.

One put is atomic. Other control planes are kept out by a lease where the file system can write "only where no file is";
where it cannot, the operator has to say that there is none.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

# fsspec ships no annotations.
import fsspec  # type: ignore[import-untyped]
from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]

from control_plane.registry.store.store_files import LocalFiles, StoreFiles, StoreLocked
from control_plane.registry.store.store_lease import LeaseTaken, LeaseUnsupported, StoreLease

logger = logging.getLogger(__name__)

# A control plane that was paused for as long as this may still be writing.
LEFTOVER_AGE = timedelta(hours=24)


class StoreUrlError(ValueError):
    """The URL of a store cannot be used; says why."""


def open_files(url: str, *, is_exclusive: bool = False) -> StoreFiles:
    """The storage for a path or an fsspec URL. Raises StoreUrlError.

    `is_exclusive`: the operator says that no other control plane uses it.
    """
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise StoreUrlError(
            f"{url.partition('://')[0]}://: needs a Python package that is not installed ({error}); install it where "
            "the control plane runs"
        ) from error
    except ValueError as error:
        raise StoreUrlError(
            f"{url.partition('://')[0]}://: {error}; give a directory, or a URL of s3://, gs:// or az://"
        ) from error
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
    if protocols & {"file", "local"}:
        return LocalFiles(Path(root))
    return RemoteFiles(filesystem, root, is_exclusive=is_exclusive)


class RemoteFiles:
    """See store_files.StoreFiles."""

    def __init__(
        self, filesystem: Any, root: str, *, is_exclusive: bool = False, lease: StoreLease | None = None
    ) -> None:
        self.filesystem = filesystem
        self.root = root.rstrip("/")
        self._is_exclusive = is_exclusive
        self._lease = lease or StoreLease(self, takes_over=is_exclusive)

    def lock(self) -> None:
        """See StoreFiles."""
        with _as_os_errors():
            self.filesystem.makedirs(self.root, exist_ok=True)
        try:
            if not has_own_creation(self.filesystem):
                raise LeaseUnsupported("the file system only looks whether a file is there before it writes it")
            self._lease.acquire()
        except LeaseTaken as error:
            raise StoreLocked(f"the store is in use: {error}; give each control plane its own") from error
        except OSError as error:
            if self._is_exclusive:
                logger.warning(
                    "store without a lease, because the operator says that no other process uses it error=%s", error
                )
            elif isinstance(error, LeaseUnsupported):
                raise StoreLocked(
                    f"the store ({type(self.filesystem).__name__}) cannot keep two control planes apart: {error}; if "
                    "no other one uses it, say so with --exclusive-store"
                ) from error
            else:
                raise

    def close(self) -> None:
        """See StoreFiles."""
        self._lease.release()

    def read(self, path: str) -> bytes:
        """See StoreFiles."""
        with _as_os_errors():
            return bytes(self.filesystem.cat_file(self._path(path)))

    def read_range(self, path: str, start: int, size_bytes: int) -> bytes:
        """See StoreFiles."""
        with _as_os_errors():
            return bytes(self.filesystem.cat_file(self._path(path), start=start, end=start + size_bytes))

    def write(self, path: str, data: bytes) -> None:
        """See StoreFiles."""
        with self._changing():
            full = self._path(path)
            self.filesystem.makedirs(full.rsplit("/", 1)[0], exist_ok=True)
            self.filesystem.pipe_file(full, data)

    def write_file(self, path: str, source: Path) -> None:
        """See StoreFiles."""
        with self._changing():
            full = self._path(path)
            self.filesystem.makedirs(full.rsplit("/", 1)[0], exist_ok=True)
            self.filesystem.put_file(str(source), full)

    def move(self, path: str, new_path: str) -> None:
        """See StoreFiles. A copy, then a deletion: a crash or an error may leave both."""
        with self._changing():
            self.filesystem.mv(self._path(path), self._path(new_path))

    def delete(self, path: str) -> None:
        """See StoreFiles."""
        with self._changing(), contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(self._path(path))

    def delete_tree(self, path: str) -> None:
        """See StoreFiles."""
        with self._changing(), contextlib.suppress(FileNotFoundError):
            self.filesystem.rm(self._path(path), recursive=True)

    def exists(self, path: str) -> bool:
        """See StoreFiles."""
        with _as_os_errors():
            return bool(self.filesystem.isfile(self._path(path)))

    def names(self, path: str) -> list[str]:
        """See StoreFiles."""
        with _as_os_errors():
            self.filesystem.invalidate_cache()
            try:
                found = self.filesystem.ls(self._path(path), detail=False)
            except FileNotFoundError:
                return []
            return sorted(name.rstrip("/").rsplit("/", 1)[-1] for name in found)

    def may_be_written(self, path: str) -> bool:
        """See StoreFiles. Whatever changed within LEFTOVER_AGE, by the store's own clock against ours."""
        with _as_os_errors():
            try:
                changes = [self.filesystem.modified(name) for name in self.filesystem.find(self._path(path))]
            except NotImplementedError:
                return True
        oldest = datetime.now(UTC) - LEFTOVER_AGE
        return any(change.replace(tzinfo=change.tzinfo or UTC) > oldest for change in changes)

    # ---- for the lease ----

    def create(self, path: str, data: bytes) -> None:
        """See store_lease.LeaseFiles."""
        with _as_os_errors():
            full = self._path(path)
            self.filesystem.makedirs(full.rsplit("/", 1)[0], exist_ok=True)
            self.filesystem.pipe_file(full, data, mode="create")

    def replace(self, path: str, data: bytes) -> None:
        """See store_lease.LeaseFiles."""
        with _as_os_errors():
            self.filesystem.pipe_file(self._path(path), data)

    def remove(self, path: str) -> None:
        """See store_lease.LeaseFiles."""
        with _as_os_errors(), contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(self._path(path))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self._lease.check()
        with _as_os_errors():
            yield
        self._lease.check()  # lost meanwhile, another control plane may have undone it: that is not a success

    def _path(self, path: str) -> str:
        return f"{self.root}/{path}"


def has_own_creation(filesystem: Any) -> bool:
    """Whether `pipe_file` is the file system's own: with mode="create" the general one looks first, and then writes."""
    own = getattr(type(filesystem), "_pipe_file", None) or type(filesystem).pipe_file
    return own not in (fsspec.AbstractFileSystem.pipe_file, AsyncFileSystem._pipe_file)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """File systems raise what their libraries do; here all of it is OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
