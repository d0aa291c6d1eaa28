"""Keeps the processes of a gateway: starts them, starts one again that ends, and stops them in order.

Each listens on the port with a socket of its own, and the kernel deals connections out evenly (SO_REUSEPORT): with one
socket for all, four processes got 10, 16, 67 and 107 of 200 connections. This process holds the port and does not
listen. A process that dies takes its own connections with it and no other ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from contract.ready_lines import GATEWAY_READY, gateway_ready
from gateway.config import GatewayConfig
from gateway.http.server import address_of, bound
from gateway.http.siblings import Place

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0  # before a process that ended is started again
STEADY_S = 60.0  # one that ran for so long begins with the first pause again
STOP_MARGIN_S = 5.0  # what a process gets beyond --drain-timeout-s
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class NotStarted(Exception):
    """A process ended before it was ready for the first time. It has said why."""


def supervise(config: GatewayConfig) -> int:
    """Run the processes until SIGTERM or SIGINT; the exit status. Raises OSError if the port cannot be bound."""
    bound(config.http).close()  # sharing the port with another gateway would deal connections out to both
    with (
        bound(config.http, is_shared=True) as reserved,
        tempfile.TemporaryDirectory(prefix="motet-gateway-") as directory,
    ):
        (Path(directory) / "metrics").mkdir()
        return asyncio.run(Supervisor(config, reserved, Path(directory)).run())


class Supervisor:
    """One use. `command` and what follows it are for tests."""

    def __init__(
        self,
        config: GatewayConfig,
        reserved: socket.socket,
        directory: Path,
        *,
        command: tuple[str, ...] = ("-m", "gateway.processes.child"),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._address = address_of(reserved)
        self._directory = directory
        self._command = command
        self._sleep = sleep
        self._clock = clock
        self._children: dict[int, asyncio.subprocess.Process] = {}  # that run, by index
        self._stopping = asyncio.Event()
        self._order: signal.Signals | None = None  # the last one to all processes, for one that is being started
        self._was_in_order = True

    async def run(self) -> int:
        """Until a signal, or until a process does not get ready at the start."""
        loop, count = asyncio.get_running_loop(), self._config.http.processes
        with self._signals(loop):
            ready = [loop.create_future() for _ in range(count)]
            keepers = [asyncio.create_task(self._keep(index, ready[index])) for index in range(count)]
            announcing = asyncio.create_task(self._announce(ready))
            stop = asyncio.create_task(self._stopping.wait())
            try:
                await asyncio.wait({stop, *keepers}, return_when=asyncio.FIRST_COMPLETED)
                failed = [keeper for keeper in keepers if keeper.done()]
                await self._stop(keepers)
                for keeper in failed:
                    keeper.result()
            except NotStarted:
                return 1
            finally:
                for task in (announcing, stop):
                    task.cancel()
                await asyncio.gather(announcing, stop, return_exceptions=True)
        return 0 if self._was_in_order else 1

    async def _announce(self, ready: list[asyncio.Future[None]]) -> None:
        await asyncio.gather(*ready)
        print(gateway_ready(self._address), flush=True)

    async def _keep(self, index: int, ready: asyncio.Future[None]) -> None:
        """One process after the other. Raises NotStarted if the first one never gets ready."""
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            begun_s = self._clock()
            status = await self._run_one(index, ready)
            self._forget_open_requests(index)
            if self._stopping.is_set():
                self._was_in_order &= status == 0
                return
            if not ready.done():
                raise NotStarted
            if self._clock() - begun_s >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            logger.error(
                "gateway process ended and is started again index=%d status=%d pause_s=%g", index, status, pause_s
            )
            stopping = asyncio.create_task(self._stopping.wait())
            pausing = asyncio.ensure_future(self._sleep(pause_s))
            await asyncio.wait({stopping, pausing}, return_when=asyncio.FIRST_COMPLETED)
            for task in (stopping, pausing):
                task.cancel()
            await asyncio.gather(stopping, pausing, return_exceptions=True)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _forget_open_requests(self, index: int) -> None:
        """Take a dead process's gauges out of the metrics. What it counted stays."""
        mark_process_dead(index, str(self._directory / "metrics"))  # type: ignore[no-untyped-call]

    async def _run_one(self, index: int, ready: asyncio.Future[None]) -> int:
        """The exit status of a process, once it has ended."""
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._command,
            self._address,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C reaches this process only, which stops the others in order
        )
        self._children[index] = child
        if self._order is not None:  # it came while this process was being started
            self._send(self._order)
        try:
            assert child.stdin is not None and child.stdout is not None, "started with pipes"
            place = Place(index, self._config.http.processes, self._directory)
            child.stdin.write(pickle.dumps((self._config, place)))
            async for line in child.stdout:
                text = line.decode(errors="replace").rstrip("\n")
                if GATEWAY_READY.match(text) is None:
                    print(text, file=sys.stderr, flush=True)
                elif not ready.done():
                    ready.set_result(None)
                else:
                    logger.info("gateway process is ready again index=%d pid=%d", index, child.pid)
            return await child.wait()
        finally:
            del self._children[index]

    async def _stop(self, keepers: list[asyncio.Task[None]]) -> None:
        """Let every process shut down. One that does not end in time is killed."""
        self._stopping.set()
        self._send(signal.SIGTERM)
        await asyncio.wait(keepers, timeout=self._config.http.drain_timeout_s + STOP_MARGIN_S)
        self._send(signal.SIGKILL)
        await asyncio.gather(*keepers, return_exceptions=True)

    def _send(self, order: signal.Signals) -> None:
        """To the processes that run now, and to those that are being started as soon as they run."""
        self._order = order
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(order)

    def _on_signal(self, signum: signal.Signals) -> None:
        """Stop in order. Ctrl-C behind that stops at once."""
        if self._stopping.is_set() and signum == signal.SIGINT:
            self._send(signal.SIGKILL)
        self._stopping.set()

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        for signum in _SIGNALS:
            loop.add_signal_handler(signum, self._on_signal, signum)
        try:
            yield
        finally:
            for signum in _SIGNALS:
                loop.remove_signal_handler(signum)
