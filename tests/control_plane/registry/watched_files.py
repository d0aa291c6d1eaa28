"""Local files of a store that note what was written."""

from __future__ import annotations

from pathlib import Path

from control_plane.registry.store.store_files import LocalFiles


class WatchedFiles(LocalFiles):
    """Remembers what was written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.written: list[str] = []

    def write(self, path: str, data: bytes) -> None:
        self.written.append(path)
        super().write(path, data)

    def write_file(self, path: str, source: Path) -> None:
        self.written.append(path)
        super().write_file(path, source)
