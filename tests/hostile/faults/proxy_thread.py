"""A TCP relay in a thread of its own, whose connections can be cut from any thread."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self

from tests.fakes.tcp_proxy import TcpProxy


class ProxyThread:
    """Relays a local port of its own to another. A context manager."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._proxy = TcpProxy(target_port)
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._proxy.__aenter__(), self._loop).result(10.0)
        self.port = self._proxy.port
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._proxy.__aexit__(None, None, None), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def freeze(self) -> None:
        """Pass nothing on; connections stay open."""
        self._loop.call_soon_threadsafe(self._proxy.freeze)

    def thaw(self) -> None:
        """Pass on what was held back, and go on."""
        self._loop.call_soon_threadsafe(self._proxy.thaw)

    def cut(self) -> None:
        """Reset every connection."""
        self._loop.call_soon_threadsafe(self._proxy.cut)
