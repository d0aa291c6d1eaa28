"""Watches a directory of the operator: each folder in it is an adapter of that name, each change of one a new version.

Polls, since network file systems report no changes. A folder is registered once two looks in a row found it the
same, so that a copy has ended. What cannot be registered is named in the log, once for each content, and whatever a
later look may mend is tried again. A folder that is removed leaves its adapter as it is: deleting is a client's call.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from contract.ids import ADAPTER_ID_FORM, is_adapter_id
from contract.process_log import printable, shown
from control_plane.adapters.directories.registrar import DirectoryRegistrar
from control_plane.adapters.sources.adapter_directory import find_files
from control_plane.adapters.sources.held_files import held_open
from control_plane.errors import Exhausted, MotetError, Unavailable

logger = logging.getLogger(__name__)

MAX_FOLDERS = 100_000
# Of each file, by name: time of its last change and of its last entry, size, inode. Empty: nothing can be read.
Signature = tuple[tuple[str, int, int, int, int], ...]


class DirectoryWatcher:
    """Looks at one directory again and again. Used from one event loop."""

    def __init__(
        self,
        directory: Path,
        registrar: DirectoryRegistrar,
        *,
        interval_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._directory = directory
        self._registrar = registrar
        self._interval_s = interval_s
        self._sleep = sleep
        self._last: dict[str, Signature] = {}  # what the last look found, by folder
        self._done: dict[str, Signature] = {}  # what was registered, or refused for good
        self._waiting: dict[str, str] = {}  # why a folder has to wait, as the log has it

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            try:
                await self.look()
            except MotetError as error:
                logger.warning("look at adapter directory failed directory=%s error=%s", self._directory, error)
            except Exception:  # the loop's edge: the next look must come
                logger.exception("look at adapter directory failed directory=%s", self._directory)
            await self._sleep(self._interval_s)

    async def look(self) -> None:
        """Look once, and register what has settled since the look before."""
        found = await self._registrar.calls.read(_signatures, self._directory)
        settled = [name for name in sorted(found) if found[name] == self._last.get(name) != self._done.get(name)]
        for gone in self._done.keys() - found.keys():
            del self._done[gone]
        self._last = found
        for name in settled:
            if await self._take(name):
                self._done[name] = found[name]

    async def _take(self, name: str) -> bool:
        """Register one folder; whether that has ended, well or not."""
        described = f"folder {printable(name)!r} of --adapter-dir"
        if not is_adapter_id(name):
            return self._refuse(name, f"its name is not a valid adapter id: {ADAPTER_ID_FORM}")
        folder, root = self._directory / name, self._directory.resolve()
        try:
            calls = self._registrar.calls
            found = await calls.read(partial(find_files, folder, described, below=root))
            async with held_open(calls, found, described, below=root) as files:
                await self._registrar.register(name, files, source=str(folder), keeps_known=name not in self._done)
        except (Unavailable, Exhausted) as error:
            if self._waiting.get(name) != error.reason:
                logger.warning("adapter directory waits folder=%s error=%s", printable(name), error)
            self._waiting[name] = error.reason
            return False
        except MotetError as error:
            return self._refuse(name, str(error))
        self._waiting.pop(name, None)
        return True

    def _refuse(self, name: str, reason: str) -> bool:
        logger.warning(
            "folder of the adapter directory not registered folder=%s reason=%s",
            printable(name),
            reason,
            extra=shown(f"--adapter-dir: {printable(name)} is not registered: {reason}"),
        )
        return True


def _signatures(directory: Path) -> dict[str, Signature]:
    """What the files of each folder look like, by the folder's name. Names that begin with a dot are left out."""
    found: dict[str, Signature] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and entry.is_dir():
                found[entry.name] = _signature(Path(entry.path))
            if len(found) > MAX_FOLDERS:
                raise ValueError(f"--adapter-dir: {directory} has more than {MAX_FOLDERS} folders")
    return found


def _signature(folder: Path) -> Signature:
    try:
        with os.scandir(folder) as files:
            stats = [(file.name, file.stat()) for file in files]
    except OSError:  # it is being removed, or may not be read
        return ()
    return tuple(sorted((name, at.st_mtime_ns, at.st_ctime_ns, at.st_size, at.st_ino) for name, at in stats))
