"""A blocking call that an event loop reads.

grpc.aio cannot send a stream that the server may refuse before its end: where a write fails because of the refusal,
grpc.aio reports the failed write ("Internal error from Core") in place of the server's status.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

READ_AHEAD = 32  # responses that nobody has read yet; then the server waits


class BridgedCall:
    """The responses of one call, read by a thread of its own. Has what a stream uses of a call of grpc.aio."""

    def __init__(self, call: Any, on_ended: Callable[[], None]) -> None:
        """`call`: of grpc, a stream of responses. `on_ended` is called by the thread when no response follows."""
        self._call = call
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._responses: asyncio.Queue[Any] = asyncio.Queue()  # the last one is an error, or None
        self._room = threading.Semaphore(READ_AHEAD)
        self._is_cancelled = False
        threading.Thread(target=self._pump, name="motet-bridged-call", daemon=True).start()

    async def read(self) -> Any:
        """The next response, None after the last one. Raises grpc.RpcError. For one reader; not to be called again
        after None or an error."""
        item = await self._responses.get()
        self._room.release()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        """End the call. Its reader gets an error with the status CANCELLED. From any thread; again is fine."""
        self._is_cancelled = True
        self._call.cancel()
        self._room.release()

    def _pump(self) -> None:
        last: Exception | None = None
        try:
            for response in self._call:
                self._room.acquire()
                if not self._is_cancelled:
                    self._post(response)
        except Exception as error:
            last = error
        self._on_ended()
        self._post(last)

    def _post(self, item: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody reads
            self._loop.call_soon_threadsafe(self._responses.put_nowait, item)
