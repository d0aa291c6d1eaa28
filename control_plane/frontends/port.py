"""The clients' port where front ends have it: in the place of a grpc.aio server, whose services it offers.

Front ends are processes that hold the clients' connections on one port. They do TLS, HTTP/2 and gRPC's framing; an RPC
comes through a private socket to this process, which runs the same interceptor and handlers as without front ends. So
callers, limits, quotas, the audit log and all other state have their one owner here. A front end that ends takes its
connections with it, and another one is started. One that does not respond for 20 s is ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from control_plane.api.rpc.interceptor import RpcInterceptor
from control_plane.api.rpc.rpc_server import methods_of
from control_plane.frontends.calls import OfferedMethods
from control_plane.frontends.frontend import PING_EVERY_S, Frontend
from control_plane.frontends.reserved_port import ReservedPort
from control_plane.frontends.setup import FrontendSetup

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0  # before a front end that ended is started again
STEADY_S = 60.0  # a front end that ran for this time begins with the first pause again


class FrontendPort:
    """Offers services through front ends."""

    def __init__(
        self,
        interceptor: RpcInterceptor,
        num_frontends: int,
        setup: FrontendSetup,
        *,
        ping_every_s: float = PING_EVERY_S,
    ) -> None:
        """`setup`: of each front end, but for the address and the methods."""
        self._ping_every_s = ping_every_s
        self._methods = OfferedMethods(interceptor)
        self._num_frontends = num_frontends
        self._setup = setup
        self._reserved: ReservedPort | None = None
        self._frontends: list[Frontend] = []
        self._keepers: list[asyncio.Task[None]] = []

    # ---- as grpc.aio.Server has them ----

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Offer the methods that `methods_of` finds; newer stubs register them, too."""
        for handler in handlers:
            if methods := methods_of(handler):
                self._methods.add(handler.service_name(), methods)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """Offer the methods of a service."""
        self._methods.add(service_name, method_handlers)

    async def start(self) -> None:
        """Start the front ends; they listen when this returns. Raises OSError."""
        assert self._reserved is not None, "the port is bound before its start"
        setup = replace(self._setup, address=self._reserved.address, methods=self._methods.paths)
        self._frontends = [
            Frontend(index, setup, self._methods.run, ping_every_s=self._ping_every_s)
            for index in range(1, self._num_frontends + 1)
        ]
        await asyncio.gather(*(frontend.start() for frontend in self._frontends))
        self._keepers = [asyncio.create_task(self._keep(frontend)) for frontend in self._frontends]

    async def stop(self, grace_s: float | None) -> None:
        """End the front ends; calls that run get so many seconds. Idempotent."""
        for keeper in self._keepers:
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers)
        await asyncio.gather(*(frontend.stop(grace_s or 0.0) for frontend in self._frontends))
        if self._reserved is not None:
            self._reserved.close()

    # ---- beyond that ----

    def bind(self, address: str) -> str:
        """Take the port for this process and its front ends; HOST:PORT with the port that was taken. Raises OSError."""
        self._reserved = ReservedPort(address)
        return self._reserved.address

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the front ends."""
        return [frontend.pid for frontend in self._frontends]

    async def _keep(self, frontend: Frontend) -> None:
        """Start a front end again whenever it ends."""
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = time.monotonic()
            status = await frontend.wait()
            if time.monotonic() - began_s >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            logger.error(
                "front end ended and is started again index=%d status=%d pause_s=%g", frontend.index, status, pause_s
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            try:
                await frontend.start()
            except OSError as error:
                logger.error("front end not started index=%d error=%s", frontend.index, error)
