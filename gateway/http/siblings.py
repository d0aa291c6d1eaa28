"""Processes of one gateway that serve a port together, and what one of them hands to another.

Any process may get any connection. What lives in the memory of one process has its home there: the others hand requests
about it over, through a socket in a folder that only this user reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gateway.http.errors import Refusal


@dataclass(frozen=True, slots=True)
class Place:
    """Which process this is, from 0 on, of how many; `directory` is theirs together."""

    index: int = 0
    count: int = 1
    directory: Path = Path()

    @property
    def metrics_dir(self) -> Path:
        """Where each process keeps its metrics, so that any of them can show those of all."""
        return self.directory / "metrics"

    def socket_of(self, index: int) -> Path:
        """Where a process takes what others hand over."""
        return self.directory / f"{index}.sock"


class Call(msgspec.Struct, array_like=True):
    """A request that is handed over."""

    action: str
    key: str  # that the caller sent
    traceparent: str  # of the trace that the request belongs to; may be empty
    tracestate: str  # may be empty
    body: bytes


class Result(msgspec.Struct, array_like=True):
    """What the caller is sent."""

    status: int
    headers: dict[str, str]
    body: bytes


class Siblings:
    """The processes, as one of them sees them. Alone, it never hands anything over."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._server: asyncio.Server | None = None

    def home_of(self, name: str) -> int | None:
        """The process where everything of this name lives; None: this one."""
        home = zlib.crc32(name.encode()) % self._place.count
        return None if home == self._place.index else home

    async def hand_over(self, home: int, call: Call) -> Result:
        """What another process makes of a call. Raises Refusal while it does not run."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._place.socket_of(home)))
            with contextlib.closing(writer):
                writer.write(msgspec.msgpack.encode(call))
                writer.write_eof()
                data = await reader.read()
        except OSError:
            data = b""
        if not data:  # it ended before it was done
            raise Refusal(503, "a process of the gateway is starting; send it again", headers={"retry-after": "1"})
        return msgspec.msgpack.decode(data, type=Result)

    async def listen(self, serve: Callable[[Call], Awaitable[Result]]) -> None:
        """Take what others hand over, until `close`."""
        if self._place.count == 1:
            return

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer), contextlib.suppress(OSError):
                call = msgspec.msgpack.decode(await reader.read(), type=Call)
                writer.write(msgspec.msgpack.encode(await serve(call)))
                await writer.drain()

        path = self._place.socket_of(self._place.index)
        path.unlink(missing_ok=True)  # of the process that this one replaces
        self._server = await asyncio.start_unix_server(handle, str(path))

    async def close(self) -> None:
        """Take nothing any more. Idempotent."""
        if self._server is not None:
            self._server.close()
