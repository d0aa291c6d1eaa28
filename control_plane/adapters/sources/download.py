"""Downloads an adapter's files into a directory, going on where an earlier try ended. Blocks: call it in a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from control_plane.adapters.sources.partial_files import PartialFiles
from control_plane.adapters.sources.progress import Progress
from control_plane.adapters.sources.remote_adapter import Changed, RemoteAdapter, RemoteFile, TryLater
from control_plane.checks import quoted, refuse
from control_plane.errors import StoreUnavailable
from control_plane.signatures.bundle import MAX_SIGNATURE_BYTES
from control_plane.signatures.verifier import SIGNATURE_FILE

logger = logging.getLogger(__name__)

MAX_FAILURES = 6  # in a row, without a byte in between
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 15.0
TIME_LIMIT_S = 3600.0  # for one registration
_READ_BYTES = 1 << 20
_T = TypeVar("_T")


class Stopped(Exception):
    """Nobody waits for the download any more."""


class Download:
    """One download, in one thread. `stop` ends it between two pieces, or while it waits."""

    def __init__(
        self,
        source: str,
        progress: Progress,
        stop: threading.Event,
        *,
        max_bytes: int,
        first_wait_s: float = FIRST_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._progress = progress
        self._stop = stop
        self._max_bytes = max_bytes
        self._first_wait_s = first_wait_s
        self._clock = clock
        self._end_s = clock() + TIME_LIMIT_S
        self._num_failures = 0

    def run(self, find: Callable[[], RemoteAdapter], partial: PartialFiles) -> tuple[RemoteAdapter, Path]:
        """The adapter and the directory with its whole files, which the caller gives back.

        Raises MotetError, or Stopped; what has been downloaded is kept then. Files that are replaced meanwhile are
        read once more from the start.
        """
        try:
            return self._run(find, partial)
        except OSError as error:  # of the directory: the network has errors of its own
            raise StoreUnavailable(
                f"source {quoted(self._source)}: the server's directory for downloads cannot be used "
                f"({error.strerror or type(error).__name__}); have its disk looked at, and register it again",
                retry_after_s=30.0,
            ) from None

    def _run(self, find: Callable[[], RemoteAdapter], partial: PartialFiles) -> tuple[RemoteAdapter, Path]:
        for is_last in (False, True):
            self._progress.phase = "resolve"
            adapter = self._retried(find)
            self._check_size(adapter)
            place = partial.take(adapter.identity)
            is_whole, is_kept = False, True
            try:
                self._fetch(adapter, place)
                self._retried(adapter.check_unchanged)
                is_whole = True
                return adapter, place
            except Changed as error:
                is_kept = False
                if is_last:
                    raise StoreUnavailable(
                        f"source {quoted(self._source)}: {error} while it was read; try again", retry_after_s=5.0
                    ) from None
            finally:
                if not is_whole:
                    partial.give_back(place, is_kept=is_kept)
        raise AssertionError("the second round returns or raises")

    def _check_size(self, adapter: RemoteAdapter) -> None:
        total = sum(file.size_bytes for file in adapter.files)
        if total > self._max_bytes:
            raise refuse(
                "source",
                f"{quoted(self._source)} has {total} bytes; this server takes {self._max_bytes} (--max-adapter-bytes)",
            )
        for file in adapter.files:
            if file.name == SIGNATURE_FILE and file.size_bytes > MAX_SIGNATURE_BYTES:
                raise refuse(
                    "source", f"{quoted(self._source)}: {SIGNATURE_FILE} is larger than {MAX_SIGNATURE_BYTES} bytes"
                )
        self._progress.bytes_total = total

    def _fetch(self, adapter: RemoteAdapter, place: Path) -> None:
        self._progress.phase, self._progress.bytes_done = "download", 0
        before = 0  # bytes of the files before this one
        for file in adapter.files:
            path = place / file.name
            for is_last in (False, True):
                self._fetch_file(adapter, file, path, before)
                error = adapter.error(file, self._pieces_of(path))
                if not error:
                    break
                path.unlink()  # what an earlier try left may be damaged: once more from the start
                if is_last:
                    raise StoreUnavailable(f"source {quoted(self._source)}: {error}; try again", retry_after_s=5.0)
            before += file.size_bytes

    def _fetch_file(self, adapter: RemoteAdapter, file: RemoteFile, path: Path, before: int) -> None:
        with path.open("ab") as out:
            if out.tell() > file.size_bytes:
                out.truncate(0)
            start = out.seek(0, 2)

            def fetch() -> None:
                nonlocal start
                for piece in adapter.read(file, start):
                    self._check_stopped()
                    start += len(piece)
                    if start > file.size_bytes:
                        raise Changed(f"{file.name} is longer than listed")
                    out.write(piece)
                    self._num_failures = 0
                    self._progress.bytes_done = before + start
                if start < file.size_bytes:
                    raise TryLater("the connection ended too soon")

            self._progress.bytes_done = before + start
            if start < file.size_bytes:
                self._retried(fetch)

    def _pieces_of(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                self._check_stopped()
                yield piece

    def _retried(self, call: Callable[[], _T]) -> _T:
        while True:
            self._check_stopped()
            try:
                return call()
            except TryLater as error:
                self._num_failures += 1
                logger.info(
                    "download interrupted source=%s failures=%d error=%s",
                    quoted(self._source),
                    self._num_failures,
                    error,
                )
                if self._num_failures >= MAX_FAILURES:
                    raise StoreUnavailable(
                        f"source {quoted(self._source)}: {error}; tried {MAX_FAILURES} times. "
                        "What came is kept for a day; "
                        "register it again to go on",
                        retry_after_s=30.0,
                    ) from None
                wait_s = self._first_wait_s * 2 ** (self._num_failures - 1) if error.wait_s is None else error.wait_s
                self._stop.wait(min(wait_s, LONGEST_WAIT_S) if error.wait_s is None else wait_s)

    def _check_stopped(self) -> None:
        if self._stop.is_set():
            raise Stopped
        if self._clock() > self._end_s:
            raise StoreUnavailable(
                f"source {quoted(self._source)}: not read within {TIME_LIMIT_S:g} s; register it again to go on",
                retry_after_s=30.0,
            )


def files_in(adapter: RemoteAdapter, place: Path) -> Mapping[str, Path]:
    """The downloaded files by name."""
    return {file.name: place / file.name for file in adapter.files}
