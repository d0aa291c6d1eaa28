"""What the cache must know of a manifest: that it is the digest's, and the size and hash of every chunk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """A verified manifest."""

    digest: str
    manifest: bytes
    sizes: tuple[int, ...]  # of the chunks, bytes
    hashes: tuple[str, ...]  # of the chunks, SHA-256

    @property
    def size_bytes(self) -> int:
        """Manifest and chunks."""
        return len(self.manifest) + sum(self.sizes)

    def is_chunk(self, index: int, data: bytes) -> bool:
        """Whether `data` is the chunk at `index`."""
        return len(data) == self.sizes[index] and hashlib.sha256(data).hexdigest() == self.hashes[index]


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter opened for reading."""

    manifest: bytes
    chunks: Callable[[], AsyncIterator[bytes]]  # whole chunks in order, verified


def read_layout(digest: str, manifest: bytes) -> Layout | None:
    """The layout, or None if the bytes are not the digest's manifest."""
    if hashlib.sha256(manifest).hexdigest() != digest:
        return None
    chunks = json.loads(manifest)["chunks"]
    return Layout(
        digest,
        manifest,
        tuple(int(chunk["size_bytes"]) for chunk in chunks),
        tuple(str(chunk["sha256"]) for chunk in chunks),
    )
