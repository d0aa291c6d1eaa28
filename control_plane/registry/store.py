"""The artifact store: the only durable home of adapters. Content-addressed blobs and one small document per name.

    blobs/{digest}/00000.safetensors ...   chunks
    blobs/{digest}/manifest.json           written last: a blob without it does not exist
    adapters/{id}.json                     records; what is inside is the registry's affair
    incarnation.json                       counts the times that the store was opened

Every call blocks (use threads) and is safe from several threads. Failures of the storage are StoreUnavailable or
Exhausted; nothing here reads a path that a client sent.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from control_plane.errors import Exhausted, StoreUnavailable
from control_plane.registry.store_files import StoreFiles, StoreLocked, open_files

logger = logging.getLogger(__name__)

ADAPTER_ID = re.compile(r"^(?!.*\.\.)[a-z0-9][a-z0-9._-]{0,62}\Z")
DIGEST = re.compile(r"^[0-9a-f]{64}\Z")
_MANIFEST = "manifest.json"
_INCARNATION = "incarnation.json"


class ArtifactStore:
    """Blobs and records at a path, an fsspec URL, or on storage given as such."""

    def __init__(self, place: str | StoreFiles, *, clock: Callable[[], float] = time.time) -> None:
        self._files: StoreFiles = open_files(place) if isinstance(place, str) else place
        self._clock = clock  # wall clock, seconds

    def acquire(self) -> int:
        """Lock the store and return its incarnation, one more than ever before."""
        with _storage_errors("open"):
            self._files.lock()
            try:
                last = json.loads(self._files.read(_INCARNATION))["incarnation"]
                if type(last) is not int or last < 0:
                    raise ValueError(f"incarnation is {last!r}")
            except FileNotFoundError:
                last = 0
            except (ValueError, KeyError, TypeError):
                # The clock's seconds are beyond any count of starts.
                last = int(self._clock())
                logger.warning("incarnation unreadable, going on from the clock incarnation=%d", last)
            self._files.write(_INCARNATION, json.dumps({"incarnation": last + 1}).encode())
        return last + 1

    def close(self) -> None:
        """Give the lock back."""
        self._files.close()

    # ---- blobs ----

    def has_blob(self, digest: str) -> bool:
        """Whether the blob is complete."""
        with _storage_errors("read"):
            return self._files.exists(f"{_blob(digest)}/{_MANIFEST}")

    def put_blob(self, digest: str, manifest: bytes, chunks: Iterable[bytes]) -> None:
        """Store a blob; all of it or, after a crash, nothing that counts."""
        assert hashlib.sha256(manifest).hexdigest() == digest, "a digest is the hash of its manifest"
        with _storage_errors("write"):
            for index, chunk in enumerate(chunks):
                self._files.write(f"{_blob(digest)}/{index:05d}.safetensors", chunk)
            self._files.write(f"{_blob(digest)}/{_MANIFEST}", manifest)

    def read_manifest(self, digest: str) -> bytes:
        """The canonical manifest. Raises FileNotFoundError for an unknown digest."""
        with _storage_errors("read"):
            return self._files.read(f"{_blob(digest)}/{_MANIFEST}")

    def read_chunk(self, digest: str, index: int) -> bytes:
        """One chunk. Raises FileNotFoundError if it is not there."""
        with _storage_errors("read"):
            return self._files.read(f"{_blob(digest)}/{index:05d}.safetensors")

    def delete_blob(self, digest: str) -> None:
        """Remove a blob, its completeness first."""
        with _storage_errors("delete"):
            self._files.delete(f"{_blob(digest)}/{_MANIFEST}")
            self._files.delete_tree(_blob(digest))

    def blobs(self) -> dict[str, bool]:
        """Every blob directory's name -> whether the blob is complete."""
        with _storage_errors("list"):
            names = self._files.names("blobs")
            return {name: self._files.exists(f"blobs/{name}/{_MANIFEST}") for name in names}

    def delete_stray_blob(self, name: str) -> None:
        """Remove what `blobs` listed, whatever its name."""
        with _storage_errors("delete"):
            self._files.delete_tree(f"blobs/{name}")

    # ---- records ----

    def write_record(self, adapter_id: str, document: bytes) -> None:
        """Replace the record of a name."""
        with _storage_errors("write"):
            self._files.write(_record(adapter_id), document)

    def delete_record(self, adapter_id: str) -> None:
        """Remove the record of a name."""
        with _storage_errors("delete"):
            self._files.delete(_record(adapter_id))

    def records(self) -> Iterator[tuple[str, bytes]]:
        """Every record as (id, document), by id. Leftovers of broken-off writes are removed on the way."""
        with _storage_errors("list"):
            for name in self._files.names("adapters"):
                adapter_id = name.removesuffix(".json")
                if name.endswith(".json") and ADAPTER_ID.match(adapter_id):
                    yield adapter_id, self._files.read(f"adapters/{name}")
                elif name.endswith(".tmp"):
                    self._files.delete(f"adapters/{name}")
                else:
                    logger.warning("file in the store is no record, left alone name=%r", name)


def _blob(digest: str) -> str:
    assert DIGEST.match(digest), "digests are checked before they reach the store"
    return f"blobs/{digest}"


def _record(adapter_id: str) -> str:
    assert ADAPTER_ID.match(adapter_id), "ids are checked before they reach the store"
    return f"adapters/{adapter_id}.json"


@contextmanager
def _storage_errors(verb: str) -> Iterator[None]:
    """Storage trouble in a client's words; the log has the rest."""
    try:
        yield
    except (FileNotFoundError, StoreLocked):
        raise
    except OSError as error:
        logger.error("artifact store failed verb=%s error=%s", verb, error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Exhausted("the artifact store is full; the operator must free space", retry_after_s=30.0) from error
        raise StoreUnavailable(f"the artifact store does not answer ({verb}); try again") from error
