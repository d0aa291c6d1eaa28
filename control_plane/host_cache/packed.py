"""What the cache must know of a manifest: that it is the digest's, and the size and hash of every chunk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path


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


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter opened for reading."""

    manifest: bytes
    # The bytes of the chunks in order, verified chunk by chunk, in parts of at most PART_BYTES that cross no chunk.
    parts: Callable[[], AsyncIterator[bytes]]
    # The chunks' files, where it lies in some of this process: they may be gone at any moment. Empty: it does not.
    paths: tuple[Path, ...] = ()


def read_layout(digest: str, manifest: bytes) -> Layout | None:
    """The layout, or None if the bytes are not the digest's manifest, or no manifest at all."""
    if hashlib.sha256(manifest).hexdigest() != digest:
        return None
    try:
        chunks = json.loads(manifest)["chunks"]
        sizes, hashes = [chunk["size_bytes"] for chunk in chunks], [chunk["sha256"] for chunk in chunks]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not all(type(size) is int and size >= 0 for size in sizes) or not all(type(value) is str for value in hashes):
        return None
    return Layout(digest, manifest, tuple(sizes), tuple(hashes))
