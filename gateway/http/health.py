"""Routes for probes. They need no key."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.http.described import Described, Description
from gateway.http.upstream import Upstream


def health_routes(upstream: Upstream) -> list[Described]:
    """`/healthz`: the process runs. `/readyz`: Motet responds, too."""

    async def healthz(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_request: Request) -> Response:
        if await upstream.is_reachable():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "Motet's server does not respond"}, status_code=503)

    return [
        Described("GET", "/healthz", healthz, Description(summary="The process runs", is_open=True)),
        Described("GET", "/readyz", readyz, Description(summary="Motet's server responds, too", is_open=True)),
    ]
