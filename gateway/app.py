"""Builds the gateway's parts and joins them into one ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from gateway.config import GatewayConfig
from gateway.http.bodies import Bodies
from gateway.http.health import health_routes
from gateway.http.upstream import Upstream
from gateway.openai.routes import openai_app
from gateway.tinker.futures import Futures
from gateway.tinker.routes import tinker_app

SWEEP_EVERY_S = 1.0


def gateway_app(config: GatewayConfig) -> Starlette:
    """The application. Its parts are made when it starts, in the loop that serves it."""
    joined = _Joined()

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        upstream, futures = Upstream(config.http), Futures(config.tinker)
        bodies, timeout_s = Bodies(config.http.max_body_bytes, upstream.check_key), config.http.request_timeout_s
        tinker = tinker_app(upstream, futures, bodies, config.tinker, timeout_s)
        openai = openai_app(upstream, bodies, config.openai, config.tinker.base_model_names, timeout_s)
        joined.app = Starlette(routes=[*health_routes(upstream), Mount("/api/v1", tinker), Mount("/v1", openai)])
        sweeping = asyncio.create_task(_sweep(futures))
        try:
            yield
        finally:
            sweeping.cancel()
            await futures.close()
            await upstream.close()

    return Starlette(routes=[Mount("/", joined)], lifespan=lifespan)


class _Joined:
    """Stands for the application until its parts are there."""

    app: Starlette | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None, "a request before the start"
        await self.app(scope, receive, send)


async def _sweep(futures: Futures) -> None:
    while True:
        await asyncio.sleep(SWEEP_EVERY_S)
        futures.sweep()
