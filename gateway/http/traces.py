"""The trace that an HTTP request belongs to: its headers `traceparent` and `tracestate` go on with every call."""

from __future__ import annotations

from motet.connection.trace import MAX_TRACESTATE_CHARS, TRACEPARENT, TRACESTATE
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

_MAX_CHARS = 256


class Traces:
    """ASGI: sets the trace of the task that handles a request. Motet judges its form."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            TRACEPARENT.set(_sendable(headers.get("traceparent", ""), _MAX_CHARS))
            TRACESTATE.set(_sendable(",".join(headers.getlist("tracestate")), MAX_TRACESTATE_CHARS))
        await self._app(scope, receive, send)


def _sendable(value: str, max_chars: int) -> str:
    """The value, with spaces in place of tabs, or "" if it cannot be metadata."""
    value = value.replace("\t", " ")
    return value if len(value) <= max_chars and value.isascii() and value.isprintable() else ""
