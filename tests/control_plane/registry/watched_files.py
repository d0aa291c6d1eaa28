"""Local files of a store that note what was written."""

from __future__ import annotations

from pathlib import Path

from control_plane.registry.store.directory_store import DirectoryStore


class WatchedFiles(DirectoryStore):
    """Remembers what was written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.written: list[str] = []

    def put_if_absent(self, key: str, content: bytes | Path) -> str:
        self.written.append(key)
        return super().put_if_absent(key, content)

    def replace_if_match(self, key: str, content: bytes | Path, tag: str) -> str:
        self.written.append(key)
        return super().replace_if_match(key, content, tag)
