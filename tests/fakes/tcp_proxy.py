"""A TCP relay that a test can slow down, freeze or cut: what the network does to a plan stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType


class TcpProxy:
    """Relays one local port to another. An async context manager."""

    def __init__(
        self, target_port: int, *, delay_s: float = 0.0, on_bytes: Callable[[bytes], None] = lambda _: None
    ) -> None:
        """`on_bytes` is shown all that passes, in either direction."""
        self._target_port = target_port
        self._on_bytes = on_bytes
        self.delay_s = delay_s  # added to either direction
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.thaw()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def is_open(self) -> bool:
        """Whether bytes pass."""
        return self._is_open.is_set()

    def freeze(self) -> None:
        """Pass nothing on; connections stay open."""
        self._is_open.clear()

    def thaw(self) -> None:
        """Pass on what was held back, and go on."""
        self._is_open.set()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is handled in a task"
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.add(far_writer)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._relay(reader, far_writer))
                    group.create_task(self._relay(far_reader, writer))
            finally:
                self._writers.discard(far_writer)
                far_writer.transport.abort()
        except (asyncio.CancelledError, ExceptionGroup, OSError):
            pass  # cut, by the test or by either end
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 16):
            await self._is_open.wait()
            self._on_bytes(data)
            if self.delay_s:
                loop.call_later(self.delay_s, writer.write, data)
            else:
                writer.write(data)
        raise ConnectionResetError("one end closed")
