"""TLS in front of a server on a Unix socket: the embedded Redis has none of its own."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from types import TracebackType


class TlsFront:
    """Takes TLS connections on a port of 127.0.0.1 and relays what is in them. An async context manager."""

    def __init__(self, socket: Path, cert: Path, key: Path, *, client_ca: Path | None = None) -> None:
        """`client_ca`: whoever connects needs a certificate of it."""
        self._socket = socket
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(cert, key)
        if client_ca is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(client_ca)
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.num_connections = 0  # whose handshake succeeded

    async def __aenter__(self) -> TlsFront:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is handled in a task"
        self._tasks.add(task)
        self.num_connections += 1
        far_reader, far_writer = await asyncio.open_unix_connection(str(self._socket))
        relays = [
            asyncio.ensure_future(_relay(reader, far_writer)),
            asyncio.ensure_future(_relay(far_reader, writer)),
        ]
        try:
            await asyncio.wait(relays, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pass
        finally:
            for relay in relays:
                relay.cancel()
            await asyncio.gather(*relays, return_exceptions=True)
            writer.transport.abort()
            far_writer.transport.abort()
            self._tasks.discard(task)


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
