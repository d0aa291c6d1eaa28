"""The server's end: one child process and the socket to it."""

from __future__ import annotations

import asyncio
import socket
from typing import Self

from control_plane.child_process import ChildProcess, module_command
from control_plane.framed_child.frames import FRAME_HEADER


class FramedChild:
    """Gets one request after the other. Used from one event loop."""

    def __init__(self, process: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, module: str) -> Self:
        """Run a module of this installation, whose standard input is the socket. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                command, environment = module_command(module)
                process = ChildProcess(command, stdin=theirs.fileno(), stderr=None, environment=environment)
            except OSError:
                ours.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer)

    async def ask(self, request: bytes) -> tuple[str, bool]:
        """The text that comes back, and whether it is a result. Raises OSError or IncompleteReadError if it ended."""
        self._writer.write(FRAME_HEADER.pack(len(request), 1) + request)
        await self._writer.drain()
        size_bytes, is_result = FRAME_HEADER.unpack(await self._reader.readexactly(FRAME_HEADER.size))
        return (await self._reader.readexactly(size_bytes)).decode(), bool(is_result)

    async def end(self, *, is_running: bool = True) -> int:
        """Its exit status, once it is gone. `is_running`: it does not end by itself."""
        if is_running:
            self.process.kill()
        self._writer.transport.abort()
        return await self.process.wait()
