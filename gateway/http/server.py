"""Runs an ASGI application on a port: binds it, prints the ready line, shuts down on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from contract.metrics.port import cannot_listen
from contract.ready_lines import gateway_ready
from gateway.http.certificate import Certificate
from gateway.http.connections import SWEEP_EVERY_S, Connections
from gateway.http.settings import HttpSettings, split_address

logger = logging.getLogger(__name__)

OTHER_FILES = 128  # open files that are not connections of callers
UNREAD_S = 2.0  # in which clients read the error of a request that is ended


def bound(settings: HttpSettings, address: str = "", *, is_shared: bool = False) -> socket.socket:
    """A socket on the port, not listening yet. Raises OSError if the port cannot be bound.

    `address`: HOST:PORT in place of the settings'. `is_shared`: other processes of this user may listen there, too.
    """
    host, port = split_address(address or settings.listen)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(cannot_listen("--listen", settings.listen, error)) from error
    except BaseException:
        listener.close()
        raise
    return listener


def address_of(listener: socket.socket) -> str:
    """HOST:PORT, with the port that was taken."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def serve(app: ASGIApp, settings: HttpSettings, listener: socket.socket, *, leash: int | None = None) -> None:
    """Serve until a signal, or until the pipe `leash` ends. Closes `listener`.

    Raises OSError if there may not be files enough, or a file of TLS cannot be used.
    """
    _make_room(settings.max_connections)
    # It warns of every request that is not HTTP, as often as a caller sends one.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        app,
        lifespan="on",
        access_log=False,
        proxy_headers=False,  # nothing here depends on what they say
        log_config=None,  # the process has set up its log
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s + UNREAD_S),
    )
    config.load()
    certificate = _certificate(settings)
    # The connections begin TLS themselves.
    connections = Connections(settings.max_connections, None if certificate is None else lambda: certificate.context)
    protocol: Any = connections.protocol
    config.http_protocol_class = protocol
    beside = [asyncio.create_task(_sweep(connections))]
    if certificate is not None:
        beside.append(asyncio.create_task(certificate.watch()))
    try:
        with listener:
            await _Announced(config, address_of(listener), leash, settings.drain_timeout_s).serve(sockets=[listener])
    finally:
        for task in beside:
            task.cancel()


def _certificate(settings: HttpSettings) -> Certificate | None:
    """None: no TLS. Raises OSError, which names the files."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    try:
        return Certificate(settings.tls_cert, settings.tls_key)
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror
        raise OSError(f"--tls-cert, --tls-key: {settings.tls_cert}, {settings.tls_key}: {reason}") from error


async def _sweep(connections: Connections) -> None:
    while True:
        await asyncio.sleep(SWEEP_EVERY_S)
        connections.sweep()


def _make_room(max_connections: int) -> None:
    """Raise this process's limit of open files as far as its connections need. Raises OSError where it may not be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Equal parts of hosts can be more than the bound together.
    wanted = 2 * max_connections + OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise OSError(
            f"--max-connections: {max_connections} need a limit of {wanted} open files, and this process may have "
            f"{hard}: raise its limit (ulimit -Hn, LimitNOFILE=) or lower --max-connections"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Announced(uvicorn.Server):
    """Prints the ready line once connections are accepted. Requests that are open when the time to shut down has passed
    end with an error (uvicorn would log a traceback for each)."""

    def __init__(self, config: uvicorn.Config, address: str, leash: int | None, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._address = address
        self._leash = leash
        self._drain_timeout_s = drain_timeout_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_open_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_open_requests(self) -> None:
        await asyncio.sleep(self._drain_timeout_s)
        if open_requests := list(self.server_state.tasks):
            logger.warning(
                "open requests ended number=%d drain_timeout_s=%g", len(open_requests), self._drain_timeout_s
            )
        for request in open_requests:
            request.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal ends the server in order. uvicorn's own form would raise it once more at the end."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.handle_exit, signum, None)
        if self._leash is not None:
            loop.add_reader(self._leash, self._let_go, loop, self._leash)
        yield

    def _let_go(self, loop: asyncio.AbstractEventLoop, leash: int) -> None:
        """Nothing is ever written to it: it has ended."""
        loop.remove_reader(leash)
        self.handle_exit(signal.SIGTERM, None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            print(gateway_ready(self._address), flush=True)
