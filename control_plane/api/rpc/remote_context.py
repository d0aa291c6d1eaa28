"""The context of an RPC whose client is connected to another process, as grpc.aio's servicer context for handlers.

Has what handlers and interceptors of this server use. The front end that has the connection sends and receives; every
decision about the call is taken in this process.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from control_plane.api.rpc.frames import MAX_UNWRITTEN, Call, Kind, Status

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


class ClientGone(ConnectionError):
    """Nothing can be sent to the client any more."""


class RemoteContext:
    """One call. Its front end's connection calls the methods that begin with `on_`."""

    def __init__(
        self,
        call: Call,
        send: Callable[[Kind, bytes], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call = call
        self._send = send
        self._parse: Callable[[bytes], Any] | None = None
        self._serialize: Callable[[Any], bytes] | None = None
        self._clock = clock
        self._deadline_s = None if call.remaining_s is None else clock() + call.remaining_s
        self._requests: deque[Any] = deque()  # that came and were not read, _EOF after the last
        self._is_reading = False  # one more message was requested
        self._num_unwritten = 0  # responses that gRPC does not have yet
        self._waiters: set[asyncio.Future[None]] = set()  # of what reads, writes or begins
        self._has_begun: bool | None = None  # None: not known
        self._is_over = False

    @property
    def method(self) -> str:
        """ "/package.Service/Method"."""
        return self._call.method

    def use(self, parse: Callable[[bytes], Any] | None, serialize: Callable[[Any], bytes] | None) -> None:
        """How the method's messages are read and written; None: they are bytes. Before anything is."""
        self._parse, self._serialize = parse, serialize

    # ---- for handlers ----

    def invocation_metadata(self) -> Any:
        """What the client sent beside its messages."""
        return self._call.metadata

    def peer(self) -> str:
        """The client's address, as gRPC writes it."""
        return self._call.peer

    def auth_context(self) -> Any:
        """What TLS knows of the client."""
        return self._call.auth_context

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None without one."""
        return None if self._deadline_s is None else max(self._deadline_s - self._clock(), 0.0)

    def done(self) -> bool:
        """Whether nothing more reaches the client."""
        return self._is_over

    async def read(self) -> Any:
        """The client's next message, or grpc.aio.EOF after the last one."""
        if not self._requests and not self._is_reading:
            self._is_reading = True
            self._send(Kind.READ, b"")
        while not self._requests:
            await self._wait()
        if self._requests[0] is _EOF:
            return _EOF  # for every further read, too
        raw = self._requests.popleft()
        return raw if self._parse is None else self._parse(raw)

    async def requests(self) -> AsyncIterator[Any]:
        """The client's messages until their end."""
        while (message := await self.read()) is not _EOF:
            yield message

    def write_at_once(self, message: Any) -> bool:
        """Send a response; False, and nothing is sent, where the front end has enough that gRPC did not take yet."""
        if self._num_unwritten >= MAX_UNWRITTEN:
            return False
        self._num_unwritten += 1
        self._send(Kind.RESPONSE, message if self._serialize is None else self._serialize(message))
        return True

    async def write(self, message: Any) -> None:
        """Send a response when there is room for it."""
        while not self.write_at_once(message):
            await self._wait()

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Begin the response. Raises ClientGone where the client has left."""
        assert not metadata, "initial metadata of this server is empty"
        self._send(Kind.BEGIN, b"")
        while self._has_begun is None:
            await self._wait()
        if not self._has_begun:
            raise ClientGone("the client has left")

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """End the call with this status."""
        self.end(Status(code.value[0], details, tuple(trailing_metadata)))
        raise grpc.aio.AbortError

    # ---- for the connection to the front end ----

    def end(self, status: Status) -> None:
        """Send the status, once."""
        if not self._is_over:
            self._is_over = True
            self._send(Kind.STATUS, status.encode())

    def on_request(self, raw: bytes) -> None:
        """A message of the client came."""
        self._requests.append(raw)
        self._is_reading = False
        self._wake()

    def on_end(self) -> None:
        """The client sends no more."""
        self._requests.append(_EOF)
        self._wake()

    def on_written(self, num_responses: int) -> None:
        """gRPC took so many further responses."""
        self._num_unwritten -= num_responses
        self._wake()

    def on_begun(self, *, is_sent: bool) -> None:
        """The initial metadata was sent, or cannot be."""
        self._has_begun = is_sent
        self._wake()

    def on_gone(self) -> None:
        """The call is over at the client; its handler is cancelled by the caller."""
        self._is_over = True

    async def _wait(self) -> None:
        """Until something came."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
