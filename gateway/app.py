"""Builds the gateway's parts and joins them into one ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.config import GatewayConfig
from gateway.document import document_route
from gateway.http.bodies import Bodies
from gateway.http.health import health_routes
from gateway.http.keys import Keys
from gateway.http.metrics import Metrics
from gateway.http.origins import Origins
from gateway.http.siblings import Place, Siblings
from gateway.http.traces import Traces
from gateway.http.upstream import Upstream
from gateway.openai.handlers import EXCEPTION_HANDLERS
from gateway.openai.models import Models
from gateway.openai.routes import openai_routes
from gateway.registry.routes import registry_routes
from gateway.tinker.futures import Futures
from gateway.tinker.routes import tinker_app, tinker_routes
from gateway.tinker.samples import Samples
from gateway.vllm.routes import vllm_routes

SWEEP_EVERY_S = 1.0


def gateway_app(config: GatewayConfig, place: Place | None = None) -> ASGIApp:
    """The application. Its parts are made when it starts, in the loop that serves it.

    `place`: of this process among several.
    """
    place = place or Place()

    @contextlib.asynccontextmanager
    async def lifespan(_router: Starlette) -> AsyncIterator[None]:
        upstream, futures, metrics = Upstream(config.http), Futures(config.tinker), Metrics(place)
        siblings = Siblings(place)
        bodies, timeout_s = Bodies(config.http.max_body_bytes, upstream.check_key), config.http.request_timeout_s
        models = Models(config.http.base_model_names)
        samples = Samples(upstream, futures, bodies, siblings, timeout_s)
        tinker = tinker_routes(upstream, samples, bodies, config.http.base_model_names)
        await siblings.listen(samples.serve)
        known: list[BaseRoute] = [
            *health_routes(upstream),
            metrics.route(),
            *vllm_routes(upstream, bodies, models, timeout_s),
            *registry_routes(upstream, bodies, config.registry, timeout_s),
            Mount("/v1", routes=openai_routes(upstream, bodies, config.openai, models, timeout_s)),
        ]
        described = [*known, Mount("/api/v1", routes=tinker)]
        document = document_route(described)
        routes = [document, *known, Mount("/api/v1", tinker_app(tinker))]
        app = Starlette(routes=routes, exception_handlers=dict(EXCEPTION_HANDLERS))
        _redirect_nothing(app.router)
        guarded = Origins(Keys(Traces(app)), config.http.allowed_origins, config.http.known_hosts)
        joined.app = metrics.counted(guarded, [document, *described])
        sweeping = asyncio.create_task(_sweep(futures))
        try:
            yield
        finally:
            sweeping.cancel()
            await siblings.close()
            await futures.close()
            await upstream.close()

    joined = _Joined(Router(lifespan=lifespan))
    return joined


def _redirect_nothing(router: Router) -> None:
    """A path with a slash too many is not served, like any other that is not a route.

    A redirect would name this server as the client sees it only where no proxy with TLS stands before it: else a client
    sends its key once more, without TLS.
    """
    router.redirect_slashes = False
    for route in router.routes:
        if isinstance(route, Mount):
            inner = route.app.router if isinstance(route.app, Starlette) else route.app
            if isinstance(inner, Router):
                _redirect_nothing(inner)


class _Joined:
    """Stands for the application until its parts are there. `router` starts and ends them, and has no route."""

    def __init__(self, router: Router) -> None:
        self.app: ASGIApp | None = None
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._router(scope, receive, send)
            return
        assert self.app is not None, "a request before the start"
        await self.app(scope, receive, send)


async def _sweep(futures: Futures) -> None:
    while True:
        await asyncio.sleep(SWEEP_EVERY_S)
        futures.sweep()
