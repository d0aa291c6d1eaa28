"""Child processes that pack adapters, with limits of memory, CPU time and time. A child packs one after the other.

A child is started when all are busy, and kept. It is killed when it exceeds a limit or when the caller leaves, and when
the pool is closed. Where the server dies, its children read the end of their sockets and end, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.errors import FieldViolation, InvalidAdapter, StoreUnavailable
from control_plane.framed_child.child import SocketChild
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.packing.ingest_child import HEADER, read_result
from control_plane.registry.peft.ingest import WEIGHTS_FILE, PackedInfo

logger = logging.getLogger(__name__)

_MIB = 1 << 20
# Else glibc's malloc gives every block of 128 KiB or more back to the kernel. Packing makes thousands of them, and to
# touch fresh pages took half of its time. Other allocators do not know the variables.
_KEEP_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": str(32 * _MIB), "MALLOC_TRIM_THRESHOLD_": str(64 * _MIB)}


@dataclass(frozen=True, slots=True)
class IngestLimits:
    """What packing one adapter may take. 1 GiB of an adapter takes 5 s of a core, and some MiB of memory."""

    memory_bytes: int = 1 << 30  # beyond what the process has at its start
    cpu_s: float = 30.0
    cpu_s_per_gib: float = 60.0  # of the adapter's files, in addition
    wall_s: float = 30.0  # and a second for each MiB of the files


class IngestPool:
    """The children of one server. The caller bounds how many pack at once."""

    def __init__(self, limits: IngestLimits | None = None) -> None:
        self._limits = limits or IngestLimits()
        self._children: set[_Child] = set()
        self._idle: list[_Child] = []
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return sorted(child.process.pid for child in self._children)

    @property
    def num_busy(self) -> int:
        """Children that pack at this moment."""
        return len(self._children) - len(self._idle)

    async def pack(self, files: Mapping[str, Path], base_model: BaseModel, **arguments: Any) -> PackedInfo:
        """What `ingest` returns or raises, in a child. Raises InvalidAdapter where the adapter exceeds a limit.

        Cancelled, the child is killed. `arguments` are those of `ingest`, without `check`.
        """
        size_bytes = await asyncio.to_thread(_size, files)
        cpu_s = self._limits.cpu_s + self._limits.cpu_s_per_gib * size_bytes / (1 << 30)
        job = {"files": dict(files), "base_model": base_model, "arguments": arguments, "cpu_s": cpu_s}
        request = await asyncio.to_thread(pickle.dumps, job)
        wall_s = self._limits.wall_s + size_bytes / _MIB
        for _ in range(2):  # a kept child that died meanwhile of something else: a new one gets the adapter
            child = self._idle.pop() if self._idle else await self._start()
            try:
                async with asyncio.timeout(wall_s):
                    frame = await child.ask(request)
            except TimeoutError as error:
                await self._drop(child)
                raise StoreUnavailable(
                    f"packing the adapter took more than {wall_s:g} s; the server's disk may be slow: try again",
                    retry_after_s=30.0,
                ) from error
            except (OSError, asyncio.IncompleteReadError) as error:
                status = await self._drop(child, is_running=False)
                logger.warning("process that packs adapters ended pid=%d status=%d", child.process.pid, status)
                if status == -signal.SIGPROF:
                    raise _exceeds(f"takes more than {cpu_s:g} s of CPU time to be packed") from error
                continue
            except BaseException:
                await self._drop(child)
                raise
            return await self._result(child, frame)
        raise StoreUnavailable("the process that packs adapters ended twice; try again", retry_after_s=5.0)

    async def close(self) -> None:
        """Kill the children."""
        self._is_closed = True
        for child in list(self._children):
            await self._drop(child)

    async def _result(self, child: _Child, frame: bytes) -> PackedInfo:
        try:
            result = read_result(frame)
        except (MemoryError, pickle.UnpicklingError) as error:
            await self._drop(child)
            if isinstance(error, pickle.UnpicklingError):
                raise
            raise _exceeds(f"takes more than {self._limits.memory_bytes // _MIB} MiB of memory to be packed") from error
        finally:
            if child in self._children:
                self._idle.append(child)
        assert isinstance(result, PackedInfo), "a child sends the result of `ingest`"
        return result

    async def _start(self) -> _Child:
        if self._is_closed:
            # Not ShuttingDown, which says that nothing was begun.
            raise StoreUnavailable("the server is shutting down; try another one, or again in a moment")
        try:
            child = await _Child.start("control_plane.registry.packing.ingest_child", _KEEP_BLOCKS)
            child.send(pickle.dumps({"memory_bytes": self._limits.memory_bytes}))
        except OSError as error:
            logger.error("process that packs adapters not started error=%s", error)
            raise StoreUnavailable("the process that packs adapters could not be started; try again") from error
        self._children.add(child)
        return child

    async def _drop(self, child: _Child, *, is_running: bool = True) -> int:
        """Its exit status, once it is gone."""
        self._children.discard(child)
        with contextlib.suppress(ValueError):
            self._idle.remove(child)
        return await child.end(is_running=is_running)


def _exceeds(what: str) -> InvalidAdapter:
    return InvalidAdapter(
        FieldViolation(WEIGHTS_FILE, f"{what}, the server's limit; save the adapter with fewer or smaller tensors")
    )


def _size(files: Mapping[str, Path]) -> int:
    return sum(path.stat().st_size for path in files.values())


class _Child(SocketChild):
    """Gets its limits, then one adapter after the other, in the frames of `ingest_child.py`."""

    def send(self, content: bytes) -> None:
        """Send one frame."""
        self.writer.write(HEADER.pack(len(content)) + content)

    async def ask(self, request: bytes) -> bytes:
        """Send the adapter and read the result. Raises OSError or IncompleteReadError where the process ended."""
        self.send(request)
        await self.writer.drain()
        (size_bytes,) = HEADER.unpack(await self.reader.readexactly(HEADER.size))
        return await self.reader.readexactly(size_bytes)
