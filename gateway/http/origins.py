"""What web pages may do: nothing, unless the operator allows their origin.

A browser names the page's origin with every request of another page, and with every POST. Without this check a page
that somebody opens could use a gateway on their machine, or one that trusts their network.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

FLAG = "--allow-origin"


class Origins:
    """ASGI: refuses requests of other origins with 403, and one whose body has two lengths with 400."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        """`allowed`: origins such as https://chat.example.org, or "*" for all."""
        self._app = CORSMiddleware(
            app,
            allow_origins=list(allowed),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-motet-adapter-digest", "retry-after", "retry-after-ms"],
        )
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (response := self._refusal(Headers(scope=scope))) is not None:
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        origin = headers.get("origin")
        if origin is not None and "*" not in self._allowed and origin not in self._allowed:
            return _refused(403, f"Origin {origin[:200]!r} may not use this server; its operator allows it by {FLAG}")
        # A proxy in front may believe the other one of the two, and take a part of the body for the next request.
        if "transfer-encoding" in headers and "content-length" in headers:
            return _refused(400, "the request has Transfer-Encoding and Content-Length; send one of them")
        return None


def _refused(status: int, message: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers={"connection": "close"})
