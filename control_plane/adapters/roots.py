"""Finds adapters below the operator's roots. With sources/locations.py the only place where a client's text becomes a
path.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from control_plane.adapters.sources.adapter_directory import exists, find_files
from control_plane.adapters.sources.adapter_source import AdapterSource, LocalSource, RemoteRoots
from control_plane.checks import quoted, refuse
from control_plane.errors import PathNotAllowed
from control_plane.store_calls import StoreCalls


class AdapterRoots:
    """Directories and remote roots by name, from --adapter-root. They may lie on another machine, and hang."""

    def __init__(
        self, roots: Mapping[str, Path], calls: StoreCalls | None = None, remote: RemoteRoots | None = None
    ) -> None:
        self._remote = remote
        self._roots = {name: path.resolve() for name, path in roots.items()}
        self._calls = calls or StoreCalls(what="the adapter root")

    async def find(self, source: str) -> AdapterSource:
        """What "{root}/{relative path}[@revision]" names. Raises as `files` does; a remote root is not read yet."""
        remote = None if self._remote is None else self._remote.find(source)
        if remote is not None:
            return remote
        files = await self.files(source)
        return LocalSource(files, self._roots[source.partition("/")[0]], self._calls, source)

    async def files(self, source: str) -> dict[str, Path]:
        """Files of "{root}/{relative path}" by name. Raises PathNotAllowed, InvalidRequest or StoreUnavailable."""
        return await self._calls.read(self._find, source)

    def close(self) -> None:
        """Let the threads end."""
        self._calls.close()
        if self._remote is not None:
            self._remote.close()

    def _find(self, source: str) -> dict[str, Path]:
        root_name, _, relative = source.partition("/")
        root = self._roots.get(root_name)
        if root is None:
            raise PathNotAllowed(
                f"source {quoted(source)}: {quoted(root_name)} is not one of the server's adapter roots, which its "
                "operator names by --adapter-root NAME=PLACE; name one of those, or upload the files"
            )
        parts = relative.split("/")
        if any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts) or len(source) > 1024:
            raise PathNotAllowed(f"source {quoted(source)}: not a plain relative path below its root")
        directory = root.joinpath(*parts)
        if "@" in parts[-1] and not exists(directory):
            raise refuse(
                "source", f"{quoted(source)}: there is none, and a directory has no @revision; name the path alone"
            )
        return find_files(directory, f"source {quoted(source)}", below=root)
