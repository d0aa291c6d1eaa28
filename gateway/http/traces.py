"""The trace that an HTTP request belongs to: its header `traceparent` goes on to Motet with every call."""

from __future__ import annotations

from motet.connection.trace import TRACEPARENT
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

_MAX_CHARS = 256


class Traces:
    """ASGI: sets the trace of the task that handles a request. Motet judges its form."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            value = Headers(scope=scope).get("traceparent", "")
            is_sendable = len(value) <= _MAX_CHARS and value.isascii() and value.isprintable()
            TRACEPARENT.set(value if is_sendable else "")
        await self._app(scope, receive, send)
