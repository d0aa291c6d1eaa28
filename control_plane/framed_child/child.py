"""The server's end: one child process and the socket to it. Used from one event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Self

from control_plane.child_process import ChildProcess, module_command
from control_plane.framed_child.frames import FRAME_HEADER


class SocketChild:
    """A child whose standard input is a socket. Subclasses say what goes over it."""

    def __init__(self, process: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.reader = reader
        self.writer = writer

    @classmethod
    async def start(cls, module: str, environment: Mapping[str, str] | None = None) -> Self:
        """Run a module of this installation, with these variables beside the usual ones. Raises OSError.

        A cancelled start kills the child.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                command, usual = module_command(module)
                process = ChildProcess(
                    command, stdin=theirs.fileno(), stderr=None, environment={**(environment or {}), **usual}
                )
            except OSError:
                ours.close()
                raise
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            process.kill()
            raise
        return cls(process, reader, writer)

    async def end(self, *, is_running: bool = True) -> int:
        """Its exit status, once it is gone. `is_running`: it does not end by itself."""
        if is_running:
            self.process.kill()
        self.writer.transport.abort()
        return await self.process.wait()


class FramedChild(SocketChild):
    """Gets one request after the other, in the frames of `frames.py`."""

    async def ask(self, request: bytes) -> tuple[str, bool]:
        """The text that comes back, and whether it is a result. Raises OSError or IncompleteReadError if it ended."""
        self.writer.write(FRAME_HEADER.pack(len(request), 1) + request)
        await self.writer.drain()
        size_bytes, is_result = FRAME_HEADER.unpack(await self.reader.readexactly(FRAME_HEADER.size))
        return (await self.reader.readexactly(size_bytes)).decode(), bool(is_result)
