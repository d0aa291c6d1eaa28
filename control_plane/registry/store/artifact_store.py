"""The artifact store: the only durable home of adapters. Content-addressed blobs and small documents by name.

    blobs/{digest}/00000.safetensors ...   chunks
    blobs/{digest}/manifest.json           written last: a blob without it does not exist
    blobs/{digest}/claims.json             which servers use the blob, on a storage that several could write
    adapters/{id}.json                     records; the registry defines their content
    versions/{id}/{digest}.json            one document per version; those that no record names do not count
    incarnation.json                       counts the times that the store was opened
    format.json                            how all of this is laid out; a store without it is from before there was one
    lock, leases/                          keep other control planes out

A document is replaced only in the state that the caller read: see documents.py. Every call blocks (see store_calls)
and is safe from several threads. Failures of the storage are StoreUnavailable or Exhausted; nothing here reads a path
that a client sent.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from contract.ids import is_adapter_id, is_digest
from control_plane.directory_lock import DirectoryAway
from control_plane.errors import Exhausted, StoreUnavailable
from control_plane.registry.store.blob_claims import BlobClaims
from control_plane.registry.store.directory_store import DirectoryStore
from control_plane.registry.store.keys import (
    DELETING_SUFFIX,
    RECORD_SUFFIX,
    blob_prefix,
    chunk_key,
    deleting_key,
    manifest_key,
    record_key,
    version_key,
    versions_prefix,
)
from control_plane.registry.store.open_store import open_store
from control_plane.registry.store.store import (
    LEFTOVER_AGE,
    Document,
    FencedStore,
    StoreConflict,
    StoreLocked,
    delete_below,
    read_document,
    replace,
)
from control_plane.registry.store.store_format import StoreFormat
from control_plane.registry.store.store_lease import LEASE_S, LeaseLost

logger = logging.getLogger(__name__)

# A store whose last control plane was killed is locked only once that one's lease ended.
MAX_LOCK_WAIT_S = 2 * LEASE_S
_INCARNATION = "incarnation.json"
_TEMP_SUFFIX = ".tmp"  # of files that an earlier version was writing
_HASHED_BYTES = 4 << 20  # of a stored chunk, in memory at a time


@dataclass(frozen=True, slots=True)
class StoredNames:
    """What lies in the store, by name only. Unknown files are left out, with a line in the log."""

    records: tuple[str, ...]  # adapter ids
    deleting: tuple[str, ...]  # adapter ids
    versions: tuple[str, ...]  # adapter ids that have a directory of versions
    blobs: tuple[str, ...]  # digests; not all of them need be whole


class DocumentChanged(Exception):
    """A document is not in the state that the caller read: another server changed it."""


class ArtifactStore:
    """Blobs and documents at a path, a URL, or on storage given as such."""

    def __init__(
        self, place: str | FencedStore, *, is_exclusive: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        """`is_exclusive`: the operator says that no other control plane uses a remote store. Raises StoreUrlError."""
        self._store = open_store(place, is_exclusive=is_exclusive) if isinstance(place, str) else place
        self.place = place if isinstance(place, str) else ""  # a path or a URL
        self.is_sole = self._store.fence.is_sole  # no other process can write while this one has the store open
        root = self._store.root if isinstance(self._store, DirectoryStore) else None
        self.directory = root if self.is_sole else None  # where it is one of this machine that is ours alone
        self._clock = clock  # wall clock, seconds
        self._claims = BlobClaims(self._store, clock)
        self.format = StoreFormat(self._store)

    def acquire(self) -> int:
        """Lock the store and return its incarnation, one more than ever before. What fails leaves it unlocked.

        Raises WrongStoreFormat, before anything is changed.
        """
        with _reading("open"):
            self._store.fence.lock()
        try:
            with _reading("open"):
                self.format.check()
            return self._next_incarnation()
        except BaseException:
            self._store.fence.close()
            raise

    def close(self) -> None:
        """Give the lock back."""
        self._store.fence.close()

    def list_names(
        self, *, cleans: bool = True, when_records: Callable[[Sequence[str]], None] | None = None
    ) -> StoredNames:
        """What there is. With `cleans`, leftovers of writes that an earlier version broke off are removed.

        `when_records` is called with the names of the records as soon as they are known.
        """
        records, deleting = [], []
        with _reading("list"):
            for name in [entry.name for entry in self._store.list("adapters", names_only=True)]:
                stem, dot, suffix = name.rpartition(".")
                is_id = is_adapter_id(stem)
                if is_id and dot + suffix == RECORD_SUFFIX:
                    records.append(stem)
                elif is_id and dot + suffix == DELETING_SUFFIX:
                    deleting.append(stem)
                elif name.endswith(_TEMP_SUFFIX):
                    if cleans:
                        self._store.delete(f"adapters/{name}")
                else:
                    logger.warning("file in the store is not a record, left alone name=%r", name)
            # A rename that broke off in a remote store left both: the deletion had not begun.
            for adapter_id in set(records) & set(deleting):
                if cleans:
                    self._store.delete(deleting_key(adapter_id))
                deleting.remove(adapter_id)
            if when_records is not None:
                when_records(records)
            return StoredNames(
                tuple(records),
                tuple(deleting),
                self._known("versions", is_adapter_id),
                self._known("blobs", is_digest),
            )

    def _next_incarnation(self) -> int:
        while True:
            last, tag = 0, None
            with _reading("open"):
                try:
                    content, tag = self._store.get(_INCARNATION)
                    last = json.loads(content)["incarnation"]
                    if type(last) is not int or last < 0:
                        raise ValueError(f"incarnation is {last!r}")
                except FileNotFoundError:
                    pass
                except (ValueError, KeyError, TypeError, RecursionError):
                    # The clock's seconds are beyond any count of starts.
                    last = int(self._clock())
                    logger.warning("incarnation unreadable, going on from the clock incarnation=%d", last)
            # With a mark of this start: two servers never write the same content.
            document = json.dumps({"incarnation": last + 1, "start": uuid.uuid4().hex}).encode()
            try:
                with _changing("open"):
                    if tag is None:
                        self._store.put_if_absent(_INCARNATION, document)
                    else:
                        self._store.replace_if_match(_INCARNATION, document, tag)
                return last + 1
            except DocumentChanged:
                logger.warning("another server counted its start, counting again")

    def _known(self, directory: str, is_known: Callable[[str], bool]) -> tuple[str, ...]:
        names = [entry.name for entry in self._store.list(directory, names_only=True)]
        known = tuple([name for name in names if is_known(name)])
        if len(known) < len(names):
            for name in names:
                if not is_known(name):
                    logger.warning("directory in the store is not ours, left alone name=%r", f"{directory}/{name}")
        return known

    # ---- blobs ----

    def has_blob(self, digest: str) -> bool:
        """Whether the blob is complete, and nobody is deleting it."""
        with _reading("read"):
            return self._store.head(manifest_key(digest)) is not None

    def claim_blob(self, digest: str) -> None:
        """Keep other servers from deleting this blob: call it before a chunk is written or taken as present.

        A claim protects what is registered within `blob_claims.CLAIM_S`: see `renew_claim`. Raises StoreUnavailable
        while another server deletes the blob.
        """
        with _changing("write"):
            self._claims.claim(blob_prefix(digest))

    def renew_claim(self, digest: str) -> bool:
        """Claim the blob again if the claim is old. False: another server deleted the blob meanwhile."""
        with _changing("write"):
            if self._claims.is_valid(blob_prefix(digest)):
                return True
            self._claims.claim(blob_prefix(digest))
        return self.has_blob(digest)

    def put_chunk(self, digest: str, index: int, source: Path) -> None:
        """Store a chunk of a blob that is not complete, or the same bytes again of one that is damaged."""
        with _changing("write"):
            replace(self._store, chunk_key(digest, index), source)

    def put_manifest(self, digest: str, manifest: bytes) -> None:
        """Complete a blob, whose chunks are all there."""
        assert hashlib.sha256(manifest).hexdigest() == digest, "a digest is the hash of its manifest"
        with _changing("write"):
            replace(self._store, manifest_key(digest), manifest)

    def is_whole_chunk(self, digest: str, index: int, size_bytes: int, sha256: str) -> bool:
        """Whether the stored chunk begins with so many bytes of this hash. Reads them a few MiB at a time."""
        found, position = hashlib.sha256(), 0
        with _reading("read"):
            while position < size_bytes:
                count = min(_HASHED_BYTES, size_bytes - position)
                try:
                    data, _ = self._store.get(chunk_key(digest, index), position, count)
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
            return self._store.get(manifest_key(digest))[0]

    def read_range(self, digest: str, index: int, start: int, size_bytes: int) -> bytes:
        """A part of a chunk, shorter where the chunk ends. Raises FileNotFoundError if there is no such chunk."""
        with _reading("read"):
            return self._store.get(chunk_key(digest, index), start, size_bytes)[0]

    def delete_blob(self, digest: str) -> bool:
        """Remove a blob, its completeness first. A missing one is fine. False: another server may use it, it stays."""
        with _changing("delete"):
            if not self._claims.seal(blob_prefix(digest)):
                return False
            self._store.delete(manifest_key(digest))
            for entry in self._store.list(blob_prefix(digest)):
                if not self._claims.is_claims(entry.name):
                    self._store.delete(f"{blob_prefix(digest)}/{entry.name}")
            self._claims.remove(blob_prefix(digest))
            self._store.delete(blob_prefix(digest))
            return True

    def may_be_written(self, digest: str) -> bool:
        """Whether another process may still be writing this blob."""
        with _reading("list"):
            return self._may_be_written(blob_prefix(digest))

    def _may_be_written(self, prefix: str) -> bool:
        """Whether anything below changed lately, by the storage's clock against ours."""
        if self.is_sole:
            return False
        oldest_s = self._clock() - LEFTOVER_AGE.total_seconds()
        return any(entry.modified_s > oldest_s for entry in self._store.list(prefix))

    # ---- records and versions ----

    def read_record(self, adapter_id: str, known_tag: str = "") -> Document:
        """The record of a name. Raises FileNotFoundError. See `Document`."""
        return self._read(record_key(adapter_id), known_tag)

    def write_record(self, adapter_id: str, document: bytes, *, expected: Expected) -> None:
        """Write the record of a name if the present one is as expected. Raises DocumentChanged."""
        self._write(record_key(adapter_id), document, expected)

    def delete_record(self, adapter_id: str, *, expected: Expected) -> None:
        """Remove the record of a name: from here on the name does not exist. Raises DocumentChanged. Needs no space."""
        self._delete(record_key(adapter_id), expected)

    def read_version(self, adapter_id: str, digest: str, known_tag: str = "") -> Document:
        """The document of one version. Raises FileNotFoundError. See `Document`."""
        return self._read(version_key(adapter_id, digest), known_tag)

    def _read(self, key: str, known_tag: str) -> Document:
        try:  # without `_reading`: a start makes hundreds of thousands of these calls
            return read_document(self._store, key, known_tag)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _storage_error("read", error) from error

    def write_version(self, adapter_id: str, digest: str, document: bytes) -> None:
        """Write the document of one version, before the record that names it.

        What is there is of no record, or is the same.
        """
        with _changing("write"):
            replace(self._store, version_key(adapter_id, digest), document)

    def delete_version(self, adapter_id: str, digest: str, *, expected: Expected) -> None:
        """Remove the document of one version: from here on the version does not exist. Raises DocumentChanged.

        Needs no space.
        """
        self._delete(version_key(adapter_id, digest), expected)

    def delete_versions(self, adapter_id: str) -> None:
        """Remove the documents of all versions of a name that has no record, unless somebody may be writing them."""
        with _changing("delete"):
            if not self._may_be_written(versions_prefix(adapter_id)):
                delete_below(self._store, versions_prefix(adapter_id))
            self._store.delete(deleting_key(adapter_id))

    def _write(self, key: str, document: bytes, expected: Expected) -> None:
        with _changing("write"):
            tag = self._expected_tag(key, expected)
            if tag is None:
                self._store.put_if_absent(key, document)
            else:
                self._store.replace_if_match(key, document, tag)

    def _delete(self, key: str, expected: Expected) -> None:
        with _changing("delete"):
            tag = self._expected_tag(key, expected)
            if tag is not None:
                self._store.delete(key, tag)

    def _expected_tag(self, key: str, expected: Expected) -> str | None:
        """The tag of the present document, None if there is none. Raises StoreConflict if it is not as expected."""
        content: bytes | None
        tag: str | None
        try:
            content, tag = self._store.get(key)
        except FileNotFoundError:
            content, tag = None, None
        if not expected(content):
            raise StoreConflict(f"{key} is not as it was read")
        return tag


# Whether a document, or None for none, is the one that the caller read.
Expected = Callable[[bytes | None], bool]


class _reading:  # noqa: N801 - used as a function
    """Turn failures of the storage into errors for clients. A missing file stays FileNotFoundError.

    A class, since a generator takes three times as long and a start reads hundreds of thousands of keys.
    """

    __slots__ = ("_verb",)

    def __init__(self, verb: str) -> None:
        self._verb = verb

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, (FileNotFoundError, StoreLocked)):
            raise _storage_error(self._verb, error) from error


@contextmanager
def _changing(verb: str) -> Iterator[None]:
    """`_reading` for calls that fail if a file is missing, or is not in the state that the caller read."""
    try:
        yield
    except StoreConflict as error:
        raise DocumentChanged(str(error)) from error
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
