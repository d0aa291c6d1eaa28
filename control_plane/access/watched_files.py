"""Files of the operator that are read again when they change: keys, certificates, lists.

A file that cannot be read, or that is half-written, never takes effect: the content that was read last stays, and the
log says why. No file is read while a call waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from contract.process_log import printable, shown

logger = logging.getLogger(__name__)

T = TypeVar("T")
INTERVAL_S = 1.0  # between two looks at the files
MAX_FILE_BYTES = 16 << 20


class WatchedFiles(Generic[T]):
    """What one file, or several that belong together, say at present."""

    def __init__(self, paths: Sequence[Path], parse: Callable[..., T], *, what: str) -> None:
        """Reads the files, or raises OSError or ValueError. `parse` gets the content of each file, in order.

        `parse` raises ValueError for content that is not valid; its text must not have secrets of the files. `what`
        names the files in the log.
        """
        self._paths = tuple(paths)
        self._parse = parse
        self.what = what
        self._lock = threading.Lock()  # a handshake looks at certificates in a thread of gRPC
        self._on_change: list[Callable[[T], None]] = []
        self._seen = self._stamp()
        self._value = self._read()

    @property
    def names(self) -> tuple[str, ...]:
        """The files' names."""
        return tuple(map(str, self._paths))

    @property
    def digest(self) -> str:
        """SHA-256 of what was read last, over all files."""
        return self._digest

    @property
    def value(self) -> T:
        """What was read last."""
        return self._value

    def on_change(self, call: Callable[[T], None]) -> None:
        """Call with the new value after every change, in the thread that notices the change."""
        self._on_change.append(call)

    def refresh(self) -> bool:
        """Read the files if they changed since they were read last. Whether there is a new value. Never raises."""
        with self._lock:
            try:
                stamp = self._stamp()
                if stamp == self._seen:
                    return False
                # Before reading: a change while the files are read is found by the next look.
                self._seen = stamp
                self._value = self._read()
            except (OSError, ValueError) as error:
                self._seen = self._stamp_or_none()
                reason = printable(str(error), 300)
                logger.warning(
                    "file not read again, the former content stays what=%s files=%s error=%s",
                    self.what,
                    ",".join(self.names),
                    reason,
                    extra=shown(f"{self.what}: not read again, what was read before stays: {reason}"),
                )
                return False
        logger.info("file read again what=%s", self.what, extra=shown(f"{self.what}: read again"))
        for call in self._on_change:
            call(self._value)
        return True

    def _stamp(self) -> tuple[Any, ...] | None:
        stats = [path.stat() for path in self._paths]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)

    def _stamp_or_none(self) -> tuple[Any, ...] | None:
        """None where a file is missing at present: logged once, and read when it is back."""
        try:
            return self._stamp()
        except OSError:
            return None

    def _read(self) -> T:
        contents = list(map(read_content, self._paths))
        value = self._parse(*contents)
        self._digest = hashlib.sha256(b"".join(contents)).hexdigest()
        return value


class FileWatcher:
    """Looks at files again and again, in a thread, until it is closed."""

    def __init__(
        self,
        *,
        interval_s: float = INTERVAL_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_read: Callable[[WatchedFiles[Any]], None] | None = None,
    ) -> None:
        """`on_read` is called with files that were read again, in any thread."""
        self._on_read = on_read
        self._interval_s = interval_s
        self._sleep = sleep
        self._files: list[WatchedFiles[Any]] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, files: WatchedFiles[T]) -> WatchedFiles[T]:
        """Watch these too; returns them."""
        self._files.append(files)
        if self._on_read is not None:
            files.on_change(lambda _value: self._on_read and self._on_read(files))
        return files

    def start(self) -> None:
        """Begin; call once, in the event loop."""
        if self._files:
            self._task = asyncio.create_task(self._run(), name="file watcher")

    async def close(self) -> None:
        """Look at nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await self._sleep(self._interval_s)
            for files in self._files:
                await asyncio.to_thread(files.refresh)


def read_content(path: Path) -> bytes:
    """What is in a file, if it is not too large. Raises OSError or ValueError."""
    with path.open("rb") as opened:
        content = opened.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    return content
