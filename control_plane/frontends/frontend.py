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
END_TIMEOUT_S = 5.0  # beyond the time that calls may take
RunCall = Callable[[RemoteContext], Awaitable[None]]


class Frontend:
    """One of them; started again with another process when that has ended."""

    def __init__(self, index: int, setup: FrontendSetup, run_call: RunCall) -> None:
        self.index = index
        self._setup = setup
        self._run_call = run_call
        self._process: ChildProcess | None = None
        self._link: Link | None = None
        self._is_ready = asyncio.Event()
        self._contexts: dict[int, RemoteContext] = {}  # by number of the call
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def pid(self) -> int | None:
        """Its process; None before the first start."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start a process, and wait until it listens. Raises OSError."""
        self._is_ready.clear()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                command, environment = module_command("control_plane.frontends.process")
                self._process = ChildProcess(command, stdin=theirs.fileno(), stderr=None, environment=environment)
            except OSError:
                ours.close()
                raise
        loop = asyncio.get_running_loop()
        _, self._link = await loop.create_unix_connection(lambda: Link(self._on_frame, self._end_calls), sock=ours)
        self._link.send(0, Kind.SETUP, self._setup.named(self.index).encode())
        ready, ended = asyncio.ensure_future(self._is_ready.wait()), asyncio.ensure_future(self._process.wait())
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
        """Its exit status, once it has ended."""
        assert self._process is not None, "it was started"
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """End it; calls that run get so many seconds. Harmless where it has ended."""
        process, link = self._process, self._link
        if process is None or link is None:
            return
        link.send(0, Kind.STOP, COUNT.pack(round(grace_s * 1000)))
        try:
            await asyncio.wait_for(process.wait(), grace_s + END_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        self._end_calls()
        link.close()

    @property
    def num_calls(self) -> int:
        """Calls that run."""
        return len(self._tasks)

    # ---- for the connection ----

    def _on_frame(self, call_id: int, kind: int, body: bytes) -> None:
        if kind == Kind.CALL:
            self._begin_call(call_id, body)
            return
        if kind == Kind.READY:
            self._is_ready.set()
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
            context.on_gone()
            self._tasks[call_id].cancel()
        else:
            raise AssertionError(f"a front end sent a frame of kind {kind}")

    def _begin_call(self, call_id: int, body: bytes) -> None:
        assert self._link is not None
        context = RemoteContext(Call.decode(body), partial(self._link.send, call_id))
        self._contexts[call_id] = context
        task = asyncio.ensure_future(self._run_call(context))
        self._tasks[call_id] = task
        task.add_done_callback(lambda _: self._forget(call_id))

    def _forget(self, call_id: int) -> None:
        del self._contexts[call_id]
        task = self._tasks.pop(call_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("call of a front end failed", exc_info=error)

    def _end_calls(self) -> None:
        """The front end has ended, and its clients' connections with it."""
        for call_id, task in self._tasks.items():
            self._contexts[call_id].on_gone()
            task.cancel()
