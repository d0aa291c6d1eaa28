"""Packs the files of an adapter into a directory that is removed when the registration ends. A few adapters at a time.

The files may be on a disk that hangs, so reading them has a time limit, which grows with their size.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from control_plane.errors import Exhausted, StoreUnavailable
from control_plane.registry.changes import Abandoned
from control_plane.registry.companions.documents import CHAT, decode_chat
from control_plane.registry.companions.inherited import NOT_INHERITED, Inherited
from control_plane.registry.companions.packing import pack_whole
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.packing.ingest_pool import IngestPool
from control_plane.registry.peft.ingest import PackedInfo
from control_plane.signatures.verdict import SignatureVerdict
from control_plane.store_calls import BYTES_PER_S, StoreCalls

logger = logging.getLogger(__name__)

# Looks at the files of an adapter before they are packed, and returns the files to pack, and what their signature is. A
# file that may change meanwhile is copied to the given directory, and what lies there is packed.
CheckFiles = Callable[[Mapping[str, Path], Path], tuple[Mapping[str, Path], SignatureVerdict | None]]

# Compiles and renders a chat template, given with its special tokens. Raises InvalidAdapter.
CheckTemplate = Callable[[str, Mapping[str, str]], Awaitable[None]]

_CONCURRENT_INGESTS = 2
_ABANDONED_CHECK_S = 0.05
TIMEOUT_S = 30.0  # and a second for every BYTES_PER_S of the files; 1 GiB takes 5 s of a core


def take_as_they_are(files: Mapping[str, Path], _copies: Path) -> tuple[Mapping[str, Path], None]:
    """The check of files that nobody has to have signed."""
    return files, None


class Packer:
    """Packs adapters of one base model."""

    def __init__(
        self,
        base_model: BaseModel,
        reports: WorkerReports,
        *,
        max_adapter_bytes: int,
        scratch_dir: Path | None,
        calls: StoreCalls | None = None,
        pool: IngestPool | None = None,
        check_template: CheckTemplate | None = None,
    ) -> None:
        """`scratch_dir` takes adapters while they are packed; None: the system's directory for such files.

        `pool`: its processes pack, with limits; None: a thread of this process does. `check_template`: None if
        nobody renders templates.
        """
        self._base_model = base_model
        self._reports = reports
        self._max_adapter_bytes = max_adapter_bytes
        self._scratch_dir = scratch_dir
        self._turns = asyncio.Semaphore(_CONCURRENT_INGESTS)
        self._pool = pool
        self._check_template = check_template
        self._calls = calls or StoreCalls(timeout_s=TIMEOUT_S, what="the disk with the adapter's files")

    @asynccontextmanager
    async def packed(
        self,
        files: Mapping[str, Path],
        is_abandoned: threading.Event,
        check_files: CheckFiles,
        inherited: Inherited = NOT_INHERITED,
    ) -> AsyncIterator[PackedInfo]:
        """The adapter, with what it has of another version; its chunks lie on the disk until the block ends.

        `check_files` is called in a thread. Raises what it raises, InvalidAdapter, StoreUnavailable where the files
        cannot be read in time, and Abandoned soon after `is_abandoned` is set.
        """
        async with self._turns:
            with _disk_errors():
                scratch = await asyncio.to_thread(
                    tempfile.TemporaryDirectory, prefix="motet-pack-", dir=self._scratch_dir, ignore_cleanup_errors=True
                )
            try:
                with _disk_errors():
                    info = await self._pack(dict(files), Path(scratch.name), is_abandoned, check_files, inherited)
                yield info
            finally:
                await asyncio.to_thread(scratch.cleanup)

    async def _pack(
        self,
        files: dict[str, Path],
        scratch: Path,
        is_abandoned: threading.Event,
        check_files: CheckFiles,
        inherited: Inherited,
    ) -> PackedInfo:
        reported, is_over = self._reports.modules, threading.Event()

        def check() -> None:
            if is_abandoned.is_set() or is_over.is_set():
                raise Abandoned

        def size() -> int:
            return sum(path.stat().st_size for path in files.values())

        def look() -> tuple[Mapping[str, Path], SignatureVerdict | None]:
            chunks, copies = scratch / "chunks", scratch / "files"
            chunks.mkdir()
            copies.mkdir()
            return check_files(files, copies)

        arguments: dict[str, Any] = {
            "reported": dict(reported),
            "max_adapter_bytes": self._max_adapter_bytes,
            "directory": scratch / "chunks",
            "inherited": inherited,
        }

        def pack(checked: Mapping[str, Path]) -> PackedInfo:
            return pack_whole(checked, self._base_model, check=check, **arguments)

        try:
            extra_s = await self._calls.read(size) / BYTES_PER_S
            checked, signature = await self._calls.read(look, extra_s=extra_s)
            inherited.check_signature(signature)
            check()
            if self._pool is None:
                info = await self._calls.read(pack, checked, extra_s=extra_s)
            else:
                packing = self._pool.pack(checked, self._base_model, **arguments)
                info = await _unless_abandoned(packing, is_abandoned)
            if CHAT not in inherited.documents:  # that one was checked when it was registered
                await self._check_chat(info)
            return replace(info, signature=signature)
        finally:
            is_over.set()  # the packing ends if it still runs

    async def _check_chat(self, info: PackedInfo) -> None:
        if self._check_template is None or CHAT not in info.companions:
            return
        place = info.companions.index(CHAT) - len(info.companions)
        chat = decode_chat(await self._calls.read(info.chunks[place].path.read_bytes))
        await self._check_template(chat.template, chat.special_tokens)

    async def close(self) -> None:
        """Kill the pool's processes, and let the threads end; a hung one does not keep the process."""
        if self._pool is not None:
            await self._pool.close()
        self._calls.close()


async def _unless_abandoned(packing: Coroutine[Any, Any, PackedInfo], is_abandoned: threading.Event) -> PackedInfo:
    """What packing returns. Raises Abandoned, and cancels it, soon after `is_abandoned` is set."""
    task = asyncio.ensure_future(packing)
    try:
        while not (await asyncio.wait([task], timeout=_ABANDONED_CHECK_S))[0]:
            if is_abandoned.is_set():
                raise Abandoned
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn failures of the disk into errors for clients. The log has the details."""
    try:
        yield
    except OSError as error:
        logger.error("adapter not packed error=%s", error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Exhausted("the server has too little disk space to pack this adapter", retry_after_s=60.0) from error
        raise StoreUnavailable("the server could not read and pack the adapter's files; try again") from error
