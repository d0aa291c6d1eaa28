"""The artifact store: the only durable home of adapters. Content-addressed blobs and small documents by name.

    blobs/{digest}/00000.safetensors ...   chunks
    blobs/{digest}/manifest.json           written last: a blob without it does not exist
    adapters/{id}.json                     records; the registry defines their content
    adapters/{id}.deleting                 the record of a name that is being deleted, renamed
    versions/{id}/{digest}.json            one document per version; those that no record names do not count
    incarnation.json                       counts the times that the store was opened
    lock, leases/                          keep other control planes out

Every call blocks (see store_calls) and is safe from several threads. Failures of the storage are StoreUnavailable or
Exhausted; nothing here reads a path that a client sent.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from contract.ids import is_adapter_id, is_digest
from control_plane.directory_lock import DirectoryAway
from control_plane.errors import Exhausted, StoreUnavailable
from control_plane.registry.store.remote_files import open_files
from control_plane.registry.store.store_files import TEMP_SUFFIX, StoreFiles, StoreLocked
from control_plane.registry.store.store_lease import LEASE_S, LeaseLost

logger = logging.getLogger(__name__)

# A store whose last control plane was killed is locked only once that one's lease ended.
MAX_LOCK_WAIT_S = 2 * LEASE_S
_MANIFEST = "manifest.json"
_INCARNATION = "incarnation.json"
_RECORD_SUFFIX = ".json"
_DELETING_SUFFIX = ".deleting"
_HASHED_BYTES = 4 << 20  # of a stored chunk, in memory at a time


@dataclass(frozen=True, slots=True)
class StoredNames:
    """What lies in the store, by name only. Unknown files are left out, with a line in the log."""

    records: tuple[str, ...]  # adapter ids
    deleting: tuple[str, ...]  # adapter ids
    versions: tuple[str, ...]  # adapter ids that have a directory of versions
    blobs: tuple[str, ...]  # digests; not all of them need be whole


class ArtifactStore:
    """Blobs and documents at a path, an fsspec URL, or on storage given as such."""

    def __init__(
        self, place: str | StoreFiles, *, is_exclusive: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        """`is_exclusive`: the operator says that no other control plane uses a remote store. Raises StoreUrlError."""
        self._files = open_files(place, is_exclusive=is_exclusive) if isinstance(place, str) else place
        self._clock = clock  # wall clock, seconds

    def acquire(self) -> int:
        """Lock the store and return its incarnation, one more than ever before. What fails leaves it unlocked."""
        with _reading("open"):
            self._files.lock()
        try:
            return self._next_incarnation()
        except BaseException:
            self._files.close()
            raise

    def close(self) -> None:
        """Give the lock back."""
        self._files.close()

    def list_names(self) -> StoredNames:
        """What there is. Leftovers of broken-off writes and renames of records are removed on the way."""
        records, deleting = [], []
        with _reading("list"):
            for name in self._files.names("adapters"):
                stem, dot, suffix = name.rpartition(".")
                is_id = is_adapter_id(stem)
                if is_id and dot + suffix == _RECORD_SUFFIX:
                    records.append(stem)
                elif is_id and dot + suffix == _DELETING_SUFFIX:
                    deleting.append(stem)
                elif name.endswith(TEMP_SUFFIX):
                    self._files.delete(f"adapters/{name}")
                else:
                    logger.warning("file in the store is not a record, left alone name=%r", name)
            # A rename that broke off in a remote store leaves both: the deletion had not begun.
            for adapter_id in set(records) & set(deleting):
                self._files.delete(_deleting(adapter_id))
                deleting.remove(adapter_id)
            return StoredNames(
                tuple(records),
                tuple(deleting),
                self._known("versions", is_adapter_id),
                self._known("blobs", is_digest),
            )

    def _next_incarnation(self) -> int:
        with _reading("open"):
            try:
                last = json.loads(self._files.read(_INCARNATION))["incarnation"]
                if type(last) is not int or last < 0:
                    raise ValueError(f"incarnation is {last!r}")
            except FileNotFoundError:
                last = 0
            except (ValueError, KeyError, TypeError, RecursionError):
                # The clock's seconds are beyond any count of starts.
                last = int(self._clock())
                logger.warning("incarnation unreadable, going on from the clock incarnation=%d", last)
        with _changing("open"):
            self._files.write(_INCARNATION, json.dumps({"incarnation": last + 1}).encode())
        return last + 1

    def _known(self, directory: str, is_known: Callable[[str], bool]) -> tuple[str, ...]:
        known = []
        for name in self._files.names(directory):
            if is_known(name):
                known.append(name)
            else:
                logger.warning("directory in the store is not ours, left alone name=%r", f"{directory}/{name}")
        return tuple(known)

    # ---- blobs ----

    def has_blob(self, digest: str) -> bool:
        """Whether the blob is complete."""
        with _reading("read"):
            return self._files.exists(f"{_blob(digest)}/{_MANIFEST}")

    def put_chunk(self, digest: str, index: int, source: Path) -> None:
        """Store a chunk of a blob that is not complete, or the same bytes again of one that is damaged."""
        with _changing("write"):
            self._files.write_file(_chunk(digest, index), source)

    def put_manifest(self, digest: str, manifest: bytes) -> None:
        """Complete a blob, whose chunks are all there."""
        assert hashlib.sha256(manifest).hexdigest() == digest, "a digest is the hash of its manifest"
        with _changing("write"):
            self._files.write(f"{_blob(digest)}/{_MANIFEST}", manifest)

    def is_whole_chunk(self, digest: str, index: int, size_bytes: int, sha256: str) -> bool:
        """Whether the stored chunk begins with so many bytes of this hash. Reads them a few MiB at a time."""
        found, position = hashlib.sha256(), 0
        with _reading("read"):
            while position < size_bytes:
                count = min(_HASHED_BYTES, size_bytes - position)
                try:
                    data = self._files.read_range(_chunk(digest, index), position, count)
                except FileNotFoundError:
                    return False
                if len(data) != count:
                    return False
                found.update(data)
                position += count
        return found.hexdigest() == sha256

    def read_manifest(self, digest: str) -> bytes:
        """The canonical manifest. Raises FileNotFoundError for an unknown digest."""
        with _reading("read"):
            return self._files.read(f"{_blob(digest)}/{_MANIFEST}")

    def read_range(self, digest: str, index: int, start: int, size_bytes: int) -> bytes:
        """That part of a chunk, shorter where the chunk ends. Raises FileNotFoundError if the chunk is not there."""
        with _reading("read"):
            return self._files.read_range(_chunk(digest, index), start, size_bytes)

    def delete_blob(self, digest: str) -> None:
        """Remove a blob, its completeness first. A missing one is fine."""
        with _changing("delete"):
            self._files.delete(f"{_blob(digest)}/{_MANIFEST}")
            self._files.delete_tree(_blob(digest))

    def may_be_written(self, digest: str) -> bool:
        """Whether another process may still be writing this blob."""
        with _reading("list"):
            return self._files.may_be_written(_blob(digest))

    # ---- records and versions ----

    def read_record(self, adapter_id: str) -> bytes:
        """The record of a name. Raises FileNotFoundError."""
        with _reading("read"):
            return self._files.read(_record(adapter_id))

    def write_record(self, adapter_id: str, document: bytes) -> None:
        """Replace the record of a name."""
        with _changing("write"):
            self._files.write(_record(adapter_id), document)

    def mark_deleting(self, adapter_id: str) -> None:
        """Rename the record of a name: without it the name is being deleted. Needs no space on a local disk."""
        with _changing("delete"):
            try:
                self._files.move(_record(adapter_id), _deleting(adapter_id))
            except FileNotFoundError:
                if self._files.exists(_record(adapter_id)):
                    raise
                # No record, or marked already by a call that failed after that.

    def delete_record(self, adapter_id: str) -> None:
        """Remove all documents of a name that is marked."""
        with _changing("delete"):
            self._files.delete_tree(_versions(adapter_id))
            self._files.delete(_deleting(adapter_id))

    def read_version(self, adapter_id: str, digest: str) -> bytes:
        """The document of one version. Raises FileNotFoundError."""
        with _reading("read"):
            return self._files.read(_version(adapter_id, digest))

    def write_version(self, adapter_id: str, digest: str, document: bytes) -> None:
        """Write the document of one version, before the record that names it."""
        with _changing("write"):
            self._files.write(_version(adapter_id, digest), document)

    def delete_version(self, adapter_id: str, digest: str) -> None:
        """Remove the document of one version: from here on the version does not exist. Needs no space."""
        with _changing("delete"):
            self._files.delete(_version(adapter_id, digest))

    def delete_versions(self, adapter_id: str) -> None:
        """Remove the documents of all versions of a name that has no record."""
        with _changing("delete"):
            self._files.delete_tree(_versions(adapter_id))


def _blob(digest: str) -> str:
    assert is_digest(digest), "digests are checked before they reach the store"
    return f"blobs/{digest}"


def _chunk(digest: str, index: int) -> str:
    return f"{_blob(digest)}/{index:05d}.safetensors"


def _record(adapter_id: str) -> str:
    assert is_adapter_id(adapter_id), "ids are checked before they reach the store"
    return f"adapters/{adapter_id}{_RECORD_SUFFIX}"


def _deleting(adapter_id: str) -> str:
    return _record(adapter_id).removesuffix(_RECORD_SUFFIX) + _DELETING_SUFFIX


def _versions(adapter_id: str) -> str:
    assert is_adapter_id(adapter_id), "ids are checked before they reach the store"
    return f"versions/{adapter_id}"


def _version(adapter_id: str, digest: str) -> str:
    assert is_digest(digest), "digests are checked before they reach the store"
    return f"{_versions(adapter_id)}/{digest}.json"


@contextmanager
def _reading(verb: str) -> Iterator[None]:
    """Turn failures of the storage into errors for clients. A missing file stays FileNotFoundError."""
    try:
        yield
    except (FileNotFoundError, StoreLocked):
        raise
    except OSError as error:
        raise _storage_error(verb, error) from error


@contextmanager
def _changing(verb: str) -> Iterator[None]:
    """As `_reading`, for calls that fail if a file is missing."""
    try:
        yield
    except OSError as error:
        raise _storage_error(verb, error) from error


def _storage_error(verb: str, error: OSError) -> Exhausted | StoreUnavailable:
    logger.error("artifact store failed verb=%s error=%s", verb, error)
    if isinstance(error, DirectoryAway):
        return StoreUnavailable(
            "the artifact store's directory is not the one that this server opened; the operator must bring it back",
            retry_after_s=5.0,
        )
    if isinstance(error, LeaseLost):
        return StoreUnavailable(f"this server does not hold the artifact store: {error}", retry_after_s=5.0)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Exhausted("the artifact store is full; the operator must free space", retry_after_s=30.0)
    return StoreUnavailable(f"the artifact store does not respond ({verb}); try again")
