"""A front end: `python -m control_plane.frontends.process`, started by the control plane (`frontend.py`).

Holds connections of clients. Carries each RPC to the control plane as it comes, and its responses back; decides nothing
but how long a client may leave the last responses unread. Standard input is the socket to the control plane; when that
ends, so does the front end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from contract.process_log import configure_logging, quiet_grpc

quiet_grpc()

import grpc  # noqa: E402 - gRPC reads once what to log
import grpc.aio  # noqa: E402
import uvloop  # noqa: E402

from control_plane.access.watched_files import FileWatcher  # noqa: E402
from control_plane.api.rpc.connection_shares import BusyPeers, ConnectionShares  # noqa: E402
from control_plane.api.rpc.error_status import DETAILS_KEY, status_proto  # noqa: E402
from control_plane.api.rpc.frames import ACKNOWLEDGE_EVERY, COUNT, Call, Kind, Link, Status  # noqa: E402
from control_plane.api.rpc.rpc_server import RpcServer, offer, rpc_server  # noqa: E402
from control_plane.errors import SlowConsumer  # noqa: E402
from control_plane.frontends.setup import FrontendSetup  # noqa: E402
from control_plane.setup.garbage import collect_rarely  # noqa: E402

logger = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def main() -> int:
    """Serve until the control plane ends it, or ends."""
    return uvloop.run(_serve(socket.socket(fileno=sys.stdin.fileno())))


async def _serve(sock: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):  # the control plane decides when its front ends end
        loop.add_signal_handler(signum, lambda: None)
    frontend = _Frontend()
    await loop.create_unix_connection(lambda: frontend.link, sock=sock)
    return await frontend.run()


class _Frontend:
    """The gRPC server of this process, and the calls that run."""

    def __init__(self) -> None:
        self.link = Link(self._on_frame, self._on_lost)
        self._setup: asyncio.Future[FrontendSetup] = asyncio.get_running_loop().create_future()
        self._grace_s: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._calls: dict[int, _RunningCall] = {}
        self._last_id = 0
        self._write_timeout_s = 0.0
        self._busy = BusyPeers()

    async def run(self) -> int:
        """Its exit status."""
        first: list[asyncio.Future[Any]] = [self._setup, self._grace_s]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not self._setup.done():
            return 0
        setup = self._setup.result()
        configure_logging(setup.log_level, log_format=setup.log_format, process=f"front end {setup.index}")
        self._write_timeout_s = setup.write_timeout_s
        async with contextlib.AsyncExitStack() as stack:
            server = rpc_server(options=setup.options, connections=ConnectionShares(setup.max_connections, self._busy))
            self._offer(setup.methods, server)
            try:
                _listen(server, setup, stack)
            except (OSError, RuntimeError, ValueError) as error:
                logger.error("front end cannot listen address=%s error=%s", setup.address, error)
                return 1
            await server.start()
            collecting = asyncio.create_task(collect_rarely(), name="garbage")
            stack.callback(collecting.cancel)
            self.link.send(0, Kind.READY)
            grace_s = await self._grace_s
            await server.stop(grace_s)
        self.link.close()
        return 0

    def _offer(self, methods: Sequence[str], server: RpcServer) -> None:
        def handler_of(method: str) -> Any:
            async def handle(_requests: Any, context: Context) -> None:
                await self._handle(method, context)

            return grpc.stream_stream_rpc_method_handler(handle, None, None)

        for method in methods:
            _, service, name = method.split("/")
            offer(server, service, {name: handler_of(method)})

    async def _handle(self, method: str, context: Context) -> None:
        self._last_id = self._last_id % 0xFFFFFFFF + 1
        while self._last_id in self._calls:
            self._last_id += 1
        call = self._calls[self._last_id] = _RunningCall(
            self._last_id, context, self.link, self._write_timeout_s, self._busy
        )
        try:
            await call.run(method)
        finally:
            del self._calls[call.call_id]

    def _on_frame(self, call_id: int, kind: int, body: bytes) -> None:
        if kind == Kind.SETUP:
            self._setup.set_result(FrontendSetup.decode(body))
        elif kind == Kind.PING:
            self.link.send(0, Kind.PONG)
        elif kind == Kind.STOP:
            self._stop(COUNT.unpack(body)[0] / 1000)
        elif (call := self._calls.get(call_id)) is not None:  # else it has ended here already
            call.on_frame(kind, body)

    def _on_lost(self) -> None:
        """The control plane is gone: no call has anybody any more."""
        self._stop(0.0)

    def _stop(self, grace_s: float) -> None:
        if not self._grace_s.done():
            self._grace_s.set_result(grace_s)


def _listen(server: grpc.aio.Server, setup: FrontendSetup, stack: contextlib.AsyncExitStack) -> None:
    files = setup.tls_files
    if files is None:
        server.add_insecure_port(setup.address)
        return
    from control_plane.access import server_certificates  # needs the package cryptography

    watcher = FileWatcher()
    watched = watcher.add(server_certificates.watch(*files, port="clients'"))
    watcher.start()
    stack.push_async_callback(watcher.close)
    server.add_secure_port(setup.address, server_certificates.credentials(watched))


class _RunningCall:
    """One RPC between its client and the control plane."""

    def __init__(self, call_id: int, context: Context, link: Link, write_timeout_s: float, busy: BusyPeers) -> None:
        self._busy = busy
        self._accepted = contextlib.ExitStack()  # holds the peer once the control plane has accepted the call
        self._is_accepted = False
        self.call_id = call_id
        self._context = context
        self._link = link
        self._write_timeout_s = write_timeout_s
        self._responses: deque[bytes] = deque()
        self._status: Status | None = None
        self._waiter: asyncio.Future[None] | None = None  # of `run`, for responses or the status
        self._others: set[asyncio.Task[None]] = set()  # that read a message or send the initial metadata
        self._write_began_s: float | None = None
        self._task: asyncio.Task[Any] | None = None
        self._limit: asyncio.TimerHandle | None = None  # of what is left to send, once the status is known
        self._is_too_slow = False

    async def run(self, method: str) -> None:
        """Until the client has the status, or has left."""
        self._task = asyncio.current_task()
        self._link.send(self.call_id, Kind.CALL, self._begun(method).encode())
        try:
            await self._write_responses()
            await self._end()
        finally:
            self._accepted.close()
            if self._limit is not None:
                self._limit.cancel()
            for other in self._others:
                other.cancel()
            if self._status is None:
                self._link.send(self.call_id, Kind.GONE)

    def on_frame(self, kind: int, body: bytes) -> None:
        """The control plane sent something for this call: it has accepted the call, unless it is the status."""
        if kind != Kind.STATUS and not self._is_accepted:
            self._is_accepted = True
            self._accepted.enter_context(self._busy.busy(self._context.peer()))
        if kind == Kind.RESPONSE:
            self._responses.append(body)
            self._wake()
        elif kind == Kind.READ:
            self._spawn(self._read())
        elif kind == Kind.STATUS:
            self._status = Status.decode(body)
            began_s, now_s = self._write_began_s, time.monotonic()
            left_s = self._write_timeout_s - (0.0 if began_s is None else now_s - began_s)
            self._limit = asyncio.get_running_loop().call_later(max(left_s, 0.0), self._give_up)
            self._wake()
        elif kind == Kind.BEGIN:
            self._spawn(self._begin())
        else:
            raise AssertionError(f"the control plane sent a frame of kind {kind}")

    def _begun(self, method: str) -> Call:
        context = self._context
        metadata = tuple((str(key), value) for key, value in context.invocation_metadata() or ())
        auth = {str(key): list(values) for key, values in (context.auth_context() or {}).items()}
        return Call(method, context.peer(), metadata, auth, context.time_remaining())

    async def _write_responses(self) -> None:
        """Hand gRPC every response; returns when the status is known and all responses before it are sent."""
        num_written = 0
        try:
            while self._responses or self._status is None:
                if not self._responses:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
                    continue
                response = self._responses.popleft()
                self._write_began_s = time.monotonic()
                await self._context.write(response)
                self._write_began_s = None
                num_written += 1
                if num_written == ACKNOWLEDGE_EVERY:
                    self._link.send(self.call_id, Kind.WRITTEN, COUNT.pack(num_written))
                    num_written = 0
        except asyncio.CancelledError:
            if not self._is_too_slow or self._task is None or self._task.uncancel():
                raise
            self._limit = asyncio.get_running_loop().call_later(self._write_timeout_s, self._give_up)

    async def _end(self) -> None:
        status = self._status
        assert status is not None, "the status is known"
        if self._is_too_slow and status.code == grpc.StatusCode.OK.value[0]:
            error = SlowConsumer(f"the stream was not read for {self._write_timeout_s:g} s; read faster")
            found = status_proto(error)
            status = Status(found.code, found.message, ((DETAILS_KEY, found.SerializeToString()),))
        if status.code != grpc.StatusCode.OK.value[0]:
            await self._context.abort(_CODES[status.code], status.details, status.trailing)

    def _give_up(self) -> None:
        """The client does not read what is left for it."""
        self._is_too_slow = True
        if self._task is not None:
            self._task.cancel()

    async def _read(self) -> None:
        """Read one message of the client."""
        message = await self._context.read()
        if message is _EOF:
            self._link.send(self.call_id, Kind.END)
        else:
            self._link.send(self.call_id, Kind.REQUEST, message)

    async def _begin(self) -> None:
        is_sent = True
        try:
            await self._context.send_initial_metadata(())
        except Exception:
            is_sent = False
        self._link.send(self.call_id, Kind.BEGUN, COUNT.pack(is_sent))

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._others.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._others.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The client has left; what gRPC raises then differs.
            logger.debug("call not read call_id=%d error=%r", self.call_id, error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


if __name__ == "__main__":
    sys.exit(main())
