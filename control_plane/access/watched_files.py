"""Files of the operator that are read again when they change: keys, certificates, lists.

A file that cannot be read, or that is half-written, never takes effect: the content that was read last stays, and the
log says why. No file is read while a call waits. A file whose file system hangs stops neither the others nor the end
of the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import stat
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from contract.process_log import printable, shown
from control_plane.daemon_threads import DaemonThreads

logger = logging.getLogger(__name__)

T = TypeVar("T")
INTERVAL_S = 1.0  # between two looks at the files
SLOW_AFTER_S = 10.0  # a look that takes longer is logged
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
        self._seen = self._stamp_or_none()
        self._failure = ""  # of the latest attempt to open the files: the next look tries again
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
            stamp = self._stamp_or_none()
            if stamp == self._seen and not self._failure:
                return False
            # Before reading: a change while the files are read is found by the next look.
            self._seen = stamp
            former_failure, self._failure = self._failure, ""
            try:
                self._value = self._read()
            except (OSError, ValueError) as error:
                reason = printable(str(error), 300)
                # What kept the files from being opened, such as their mode or too many open files, may end without a
                # change of them. Content that is not valid stays so until it changes.
                if isinstance(error, OSError):
                    self._failure = reason
                if reason == former_failure:
                    return False  # logged once
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
            try:
                call(self._value)
            except Exception:
                # The others still learn of the change: one of them ends the calls of those that are refused now.
                logger.exception("a change of files is not noted everywhere what=%s", self.what)
        return True

    def _stamp_or_none(self) -> tuple[Any, ...] | None:
        """None where a file is missing at present: logged once, and read when it is back."""
        try:
            stats = [path.stat() for path in self._paths]
        except OSError:
            return None
        return tuple((found.st_mtime_ns, found.st_size, found.st_ino) for found in stats)

    def _read(self) -> T:
        contents = list(map(read_content, self._paths))
        value = self._parse(*contents)
        self._digest = hashlib.sha256(b"".join(contents)).hexdigest()
        return value


class FileWatcher:
    """Looks at files again and again, until it is closed: each in a thread of its own, since a look may hang."""

    def __init__(
        self,
        *,
        interval_s: float = INTERVAL_S,
        slow_after_s: float = SLOW_AFTER_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_read: Callable[[WatchedFiles[Any]], None] | None = None,
    ) -> None:
        """`on_read` is called with files that were read again, in any thread."""
        self._on_read = on_read
        self._interval_s = interval_s
        self._slow_after_s = slow_after_s
        self._sleep = sleep
        self._files: list[WatchedFiles[Any]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, files: WatchedFiles[T]) -> WatchedFiles[T]:
        """Watch these too; returns them."""
        self._files.append(files)
        if self._on_read is not None:
            files.on_change(lambda _value: self._on_read and self._on_read(files))
        return files

    def start(self) -> None:
        """Begin; call once, in the event loop."""
        self._tasks = [
            asyncio.create_task(self._look_on(files), name=f"file watcher: {files.what}") for files in self._files
        ]

    async def close(self) -> None:
        """Look at nothing any more. A look that has begun is not waited for."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _look_on(self, files: WatchedFiles[Any]) -> None:
        thread = DaemonThreads(1, name=f"files: {files.what}")
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._sleep(self._interval_s)
                timer = loop.call_later(self._slow_after_s, self._say_slow, files)
                try:
                    await thread.run(files.refresh)
                except Exception:
                    logger.exception("look at files failed what=%s files=%s", files.what, ",".join(files.names))
                finally:
                    timer.cancel()
        finally:
            thread.close()

    def _say_slow(self, files: WatchedFiles[Any]) -> None:
        logger.warning(
            "look at files has not ended, the former content stays what=%s files=%s after_s=%g",
            files.what,
            ",".join(files.names),
            self._slow_after_s,
            extra=shown(
                f"{files.what}: a look at the file has not ended for {self._slow_after_s:g} s, what was read before "
                "stays; look at its file system"
            ),
        )


def read_content(path: Path) -> bytes:
    """What is in a regular file, if it is not too large. Raises OSError or ValueError."""
    # Without O_NONBLOCK the open of a named pipe waits until somebody writes it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is not a regular file")
        content = opened.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    return content
