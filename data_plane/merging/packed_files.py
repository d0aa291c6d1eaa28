"""A packed adapter in a directory: manifest.json, and the chunks as 0, 1, ...  Every hash is verified."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from data_plane.adapters.format.manifest import read_manifest, verify_chunk
from data_plane.adapters.format.packed import ModuleTensors, read_chunk, read_rows
from data_plane.merging.weights import ReplacedRows

MANIFEST_FILE = "manifest.json"


class PackedFiles:
    """Reads one chunk at a time."""

    def __init__(self, directory: Path) -> None:
        data = (directory / MANIFEST_FILE).read_bytes()
        self._directory = directory
        self.manifest = read_manifest(data, hashlib.sha256(data).hexdigest())
        chunks = self.manifest.chunks
        # The chunk of a module, and those of rows, by the module's name.
        self.modules = {entry.name: index for index, chunk in enumerate(chunks) for entry in chunk.modules}
        self.rows: dict[str, list[int]] = {}
        for index, chunk in enumerate(chunks):
            for entry in chunk.rows:
                self.rows.setdefault(entry.name, []).append(index)
        self._latest: tuple[int, dict[str, ModuleTensors]] = (-1, {})

    def read_modules(self, index: int) -> Iterator[ModuleTensors]:
        """The modules of a chunk."""
        chunk = self.manifest.chunks[index]
        if chunk.modules:
            yield from read_chunk(self.manifest, chunk, self._content(index))

    def module(self, name: str) -> ModuleTensors:
        """One module. Its chunk is kept until a module of another one is read: a layer's weights lie together."""
        index = self.modules[name]
        if self._latest[0] != index:
            self._latest = (-1, {})  # one chunk in memory, not two
            self._latest = (index, {part.module.name: part for part in self.read_modules(index)})
        return self._latest[1][name]

    def read_rows(self, name: str) -> list[ReplacedRows]:
        """All rows of one module."""
        return [
            ReplacedRows(part.ids, part.rows, part.bias)
            for index in self.rows.get(name, [])
            for part in read_rows(self.manifest, self.manifest.chunks[index], self._content(index))
            if part.entry.name == name
        ]

    def _content(self, index: int) -> bytes:
        content = (self._directory / str(index)).read_bytes()
        verify_chunk(self.manifest.chunks[index], content, self.manifest.digest)
        return content
