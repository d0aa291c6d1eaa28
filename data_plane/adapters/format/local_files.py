"""Chunks of a packed adapter in files that the control plane named. Does not trust its input. No torch here."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

from data_plane.adapters.format.manifest import ChunkEntry, Manifest, verify_chunk
from data_plane.errors import AdapterCorrupt, AdapterUnavailable


def read_files(manifest: Manifest, paths: Sequence[str]) -> Iterator[bytes]:
    """The chunks in order, every hash verified; `paths` has the file of each.

    Raises AdapterUnavailable for what cannot be read and AdapterCorrupt for other bytes.
    """
    if len(paths) != len(manifest.chunks):
        raise AdapterUnavailable(f"adapter {manifest.digest}: {len(paths)} files of {len(manifest.chunks)} chunks")
    for chunk, path in zip(manifest.chunks, paths, strict=True):
        try:
            data = _read(path, chunk)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise AdapterUnavailable(f"adapter {manifest.digest}: file of chunk {chunk.name}: {error}") from error
        if data is None:
            raise AdapterCorrupt(f"adapter {manifest.digest}: the file of chunk {chunk.name} is another one")
        verify_chunk(chunk, data, manifest.digest)
        yield data


def _read(path: str, chunk: ChunkEntry) -> bytes | None:
    """The file's bytes; None for what is not a plain file of the chunk's size, which may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_size != chunk.size_bytes:
            return None
        return file.read(chunk.size_bytes)
