"""Where the files of a registration come from: a directory of this machine, or a download."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from control_plane.adapters.sources import bucket_files
from control_plane.adapters.sources.download import FIRST_WAIT_S, Download, files_in
from control_plane.adapters.sources.held_files import held_open
from control_plane.adapters.sources.hub import Hub
from control_plane.adapters.sources.locations import HUB_SCHEME, RemoteRoot
from control_plane.adapters.sources.partial_files import PartialFiles
from control_plane.adapters.sources.progress import Progress
from control_plane.adapters.sources.remote_adapter import RemoteAdapter
from control_plane.checks import quoted
from control_plane.daemon_threads import DaemonThreads
from control_plane.registry.store.bucket import Bucket, open_bucket
from control_plane.store_calls import StoreCalls

DOWNLOADS_AT_ONCE = 4  # others wait


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Files that can be registered."""

    files: Mapping[str, Path]
    source: str = ""  # what is stored with the version
    may_change: bool = False  # somebody else may write to them


class AdapterSource(Protocol):
    """The files of one registration."""

    def open(self, progress: Progress) -> contextlib.AbstractAsyncContextManager[SourceFiles]:
        """The files, which lie there while the block runs. Raises MotetError."""


@dataclass(frozen=True, slots=True)
class LocalSource:
    """Files of a directory of the operator."""

    files: Mapping[str, Path]
    below: Path  # every file has to lie there, also when it is opened
    calls: StoreCalls  # open them
    source: str = ""

    @contextlib.asynccontextmanager
    async def open(self, progress: Progress) -> AsyncIterator[SourceFiles]:
        """See AdapterSource."""
        progress.phase = "check"
        described = f"source {quoted(self.source)}"
        async with held_open(self.calls, self.files, described, below=self.below) as files:
            yield SourceFiles(files, self.source, may_change=True)


class RemoteRoots:
    """The operator's remote roots by name, and the downloads from them."""

    def __init__(
        self,
        roots: Mapping[str, RemoteRoot],
        partial_files: PartialFiles,
        *,
        max_bytes: int,
        hub: Hub,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        """Raises StoreUrlError for the URL of a bucket that obstore refuses. Nothing is sent yet."""
        self._roots = roots
        self._partial = partial_files
        self._max_bytes = max_bytes
        self._hub = hub
        self._first_wait_s = first_wait_s
        self._buckets = {name: open_bucket(root.url) for name, root in roots.items() if root.scheme != HUB_SCHEME}
        self._threads = DaemonThreads(DOWNLOADS_AT_ONCE, name="motet-download")

    def find(self, source: str) -> AdapterSource | None:
        """The source that the text names; None if its root is not remote. Raises PathNotAllowed. Sends nothing."""
        root = self._roots.get(source.partition("/")[0].partition("@")[0])
        if root is None:
            return None
        root.place(source)
        bucket: Bucket | None = self._buckets.get(root.name)
        if bucket is None:
            return _RemoteSource(self, source, lambda: self._hub.find(root, source))
        return _RemoteSource(self, source, lambda: bucket_files.find(bucket, root, source))

    def close(self) -> None:
        """Let the threads end."""
        self._threads.close()

    @contextlib.asynccontextmanager
    async def fetched(
        self, source: str, find: Callable[[], RemoteAdapter], progress: Progress
    ) -> AsyncIterator[SourceFiles]:
        """The downloaded files, removed after the block. Cancelled, the download ends soon and keeps what it has."""
        stop = threading.Event()
        download = Download(source, progress, stop, max_bytes=self._max_bytes, first_wait_s=self._first_wait_s)
        run = asyncio.ensure_future(self._threads.run(download.run, find, self._partial))
        try:
            adapter, place = await asyncio.shield(run)
        except asyncio.CancelledError:
            stop.set()
            run.add_done_callback(self._drop)
            raise
        try:
            progress.phase = "check"
            yield SourceFiles(files_in(adapter, place), adapter.source)
        finally:
            await asyncio.to_thread(self._partial.give_back, place, is_kept=False)

    def _drop(self, run: asyncio.Future[tuple[RemoteAdapter, Path]]) -> None:
        """Nobody waits for what this download gave, whole or not."""
        if not run.cancelled() and run.exception() is None:
            give_back = partial(self._partial.give_back, run.result()[1], is_kept=True)
            run.get_loop().run_in_executor(None, give_back)


@dataclass(frozen=True, slots=True)
class _RemoteSource:
    roots: RemoteRoots
    source: str
    find: Callable[[], RemoteAdapter] = field(repr=False)

    def open(self, progress: Progress) -> contextlib.AbstractAsyncContextManager[SourceFiles]:
        """See AdapterSource."""
        return self.roots.fetched(self.source, self.find, progress)
