"""Runs an ASGI application on its port: binds it, prints the ready line, drains on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from contract.ready_lines import gateway_ready
from gateway.http.settings import HttpSettings, split_address


async def serve(app: ASGIApp, settings: HttpSettings) -> None:
    """Serve until a signal. Raises OSError if the port cannot be bound, or a file of TLS cannot be used."""
    host, port = split_address(settings.listen)
    config = uvicorn.Config(
        app,
        lifespan="on",
        access_log=False,
        log_config=None,  # the process has set up its log
        server_header=False,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_graceful_shutdown=round(settings.drain_timeout_s),
    )
    config.load()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        bound_host, bound_port = listener.getsockname()[:2]
        shown_host = f"[{bound_host}]" if ":" in bound_host else bound_host
        await _Announced(config, f"{shown_host}:{bound_port}").serve(sockets=[listener])


class _Announced(uvicorn.Server):
    """Prints the ready line once connections are accepted."""

    def __init__(self, config: uvicorn.Config, address: str) -> None:
        super().__init__(config)
        self._address = address

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal ends the server in order. uvicorn's own form would raise it once more at the end."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.handle_exit, signum, None)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            print(gateway_ready(self._address), flush=True)
