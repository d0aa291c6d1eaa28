"""Reads of blobs, those included that are on their way to the artifact store and lie in local files until then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class BlobStore(Protocol):
    """Where adapters lie for good (registry.store.ArtifactStore). Blocks; missing ones raise FileNotFoundError."""

    def read_manifest(self, digest: str) -> bytes:
        """The canonical manifest."""

    def read_range(self, digest: str, index: int, start: int, size_bytes: int) -> bytes:
        """A part of a chunk, shorter where the chunk ends."""


@dataclass(frozen=True, slots=True)
class FreshBlob:
    """A packed adapter in local files."""

    digest: str
    manifest: bytes
    chunks: Sequence[Path]


class FreshBlobs:
    """A store, and what is not in it yet. Used from threads; a blob is added and removed by the event loop."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._fresh: dict[str, FreshBlob] = {}

    @contextlib.contextmanager
    def serving(self, blob: FreshBlob) -> Iterator[None]:
        """Read this blob from its files until the block ends. The caller holds the blob's lock, so no other has it."""
        self._fresh[blob.digest] = blob
        try:
            yield
        finally:
            del self._fresh[blob.digest]

    def paths(self, digest: str) -> Sequence[Path]:
        """The files of a blob's chunks. Empty: it is not among those that this process has in files."""
        blob = self._fresh.get(digest)
        return () if blob is None else blob.chunks

    def read_manifest(self, digest: str) -> bytes:
        """See BlobStore."""
        blob = self._fresh.get(digest)
        return blob.manifest if blob is not None else self._store.read_manifest(digest)

    def read_range(self, digest: str, index: int, start: int, size_bytes: int) -> bytes:
        """See BlobStore."""
        blob = self._fresh.get(digest)
        if blob is None:
            return self._store.read_range(digest, index, start, size_bytes)
        with blob.chunks[index].open("rb") as file:
            file.seek(start)
            return file.read(size_bytes)
