"""One front end as the control plane sees it: its process, the socket to it, and the calls that came from it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from control_plane.api.rpc.frames import COUNT, Call, Kind, Link
from control_plane.api.rpc.remote_context import RemoteContext
from control_plane.child_process import ChildProcess, module_command
from control_plane.frontends.setup import FrontendSetup

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0  # a loaded machine may take long to start a process
PING_EVERY_S = 2.0
MAX_SILENT_PINGS = 10  # in a row without a response: the front end hangs, and each of its connections waits for ever
END_TIMEOUT_S = 5.0  # beyond the time that calls may take
RunCall = Callable[[RemoteContext], Awaitable[None]]


class Frontend:
    """One of them; started again with another process when that has ended."""

    def __init__(
        self, index: int, setup: FrontendSetup, run_call: RunCall, *, ping_every_s: float = PING_EVERY_S
    ) -> None:
        self.index = index
        self._ping_every_s = ping_every_s
        self._setup = setup
        self._run_call = run_call
        self._process: ChildProcess | None = None
        self._connection: _Connection | None = None

    @property
    def pid(self) -> int | None:
        """Its process; None before the first start."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start a process, and wait until it listens. Raises OSError."""
        if self._connection is not None:
            self._connection.end_calls()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                command, environment = module_command("control_plane.frontends.process")
                self._process = ChildProcess(command, stdin=theirs.fileno(), stderr=None, environment=environment)
            except OSError:
                ours.close()
                raise
        self._connection = connection = _Connection(self._run_call)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection.link, sock=ours)
        connection.link.send(0, Kind.SETUP, self._setup.named(self.index).encode())
        ready, ended = asyncio.ensure_future(connection.is_ready.wait()), asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait([ready, ended], timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                self._process.kill()
                raise OSError(f"front end {self.index} does not listen on {self._setup.address}; its log says why")
        finally:
            ready.cancel()
            ended.cancel()
        logger.info("front end started index=%d pid=%d", self.index, self._process.pid)

    async def wait(self) -> int:
        """Its exit status, once it has ended. A process that is hung is killed."""
        process, connection = self._process, self._connection
        assert process is not None and connection is not None, "it was started"
        watching = asyncio.ensure_future(self._end_if_hung(process, connection))
        try:
            return await process.wait()
        finally:
            watching.cancel()

    async def _end_if_hung(self, process: ChildProcess, connection: _Connection) -> None:
        num_silent = 0
        while num_silent < MAX_SILENT_PINGS:
            connection.has_responded = False
            connection.link.send(0, Kind.PING)
            await asyncio.sleep(self._ping_every_s)
            num_silent = 0 if connection.has_responded else num_silent + 1
        logger.error("front end does not respond and is killed index=%d pid=%s", self.index, process.pid)
        process.kill()

    async def stop(self, grace_s: float) -> None:
        """End it; calls that run get so many seconds. Harmless where it has ended."""
        process, connection = self._process, self._connection
        if process is None or connection is None:
            return
        connection.link.send(0, Kind.STOP, COUNT.pack(round(grace_s * 1000)))
        try:
            async with asyncio.timeout(grace_s + END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        connection.link.close()
        tasks = connection.end_calls()
        if tasks:
            await asyncio.wait(tasks, timeout=END_TIMEOUT_S)


class _Connection:
    """The socket to one process of a front end, and the calls that came through it."""

    def __init__(self, run_call: RunCall) -> None:
        self.link = Link(self._on_frame, self.end_calls)
        self.is_ready = asyncio.Event()
        self.has_responded = False  # since the last PING
        self._run_call = run_call
        self._contexts: dict[int, RemoteContext] = {}  # by number of the call
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def end_calls(self) -> list[asyncio.Task[None]]:
        """The clients' connections have ended with the front end. Returns the calls that end. Idempotent."""
        for call_id in self._tasks:
            self._end_call(call_id)
        return list(self._tasks.values())

    def _end_call(self, call_id: int) -> None:
        """The client has left. A handler is cancelled once: what it does at its end is left alone."""
        context = self._contexts[call_id]
        if not context.done():
            context.on_gone()
            self._tasks[call_id].cancel()

    def _on_frame(self, call_id: int, kind: int, body: bytes) -> None:
        if kind == Kind.CALL:
            self._begin_call(call_id, body)
            return
        if kind == Kind.READY:
            self.is_ready.set()
            return
        if kind == Kind.PONG:
            self.has_responded = True
            return
        context = self._contexts.get(call_id)
        if context is None:
            return  # it has ended here, and the front end did not know yet
        if kind == Kind.WRITTEN:
            context.on_written(COUNT.unpack(body)[0])
        elif kind == Kind.REQUEST:
            context.on_request(body)
        elif kind == Kind.END:
            context.on_end()
        elif kind == Kind.BEGUN:
            context.on_begun(is_sent=bool(COUNT.unpack(body)[0]))
        elif kind == Kind.GONE:
            self._end_call(call_id)
        else:
            raise AssertionError(f"a front end sent a frame of kind {kind}")

    def _begin_call(self, call_id: int, body: bytes) -> None:
        context = RemoteContext(Call.decode(body), partial(self.link.send, call_id))
        self._contexts[call_id] = context
        task = asyncio.ensure_future(self._run_call(context))
        self._tasks[call_id] = task
        task.add_done_callback(lambda _: self._forget(call_id))

    def _forget(self, call_id: int) -> None:
        del self._contexts[call_id]
        task = self._tasks.pop(call_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("call of a front end failed", exc_info=error)
