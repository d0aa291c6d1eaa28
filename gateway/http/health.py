"""Routes for probes. They need no key."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.http.upstream import Upstream


def health_routes(upstream: Upstream) -> list[Route]:
    """`/healthz`: the process runs. `/readyz`: Motet responds, too."""

    async def healthz(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_request: Request) -> Response:
        if await upstream.is_reachable():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "Motet's server does not respond"}, status_code=503)

    return [Route("/healthz", healthz), Route("/readyz", readyz)]
