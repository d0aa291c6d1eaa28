"""The key that an HTTP request came with. It is handed on to Motet, which judges it; the gateway keeps no keys.

The key of a request is set for the task that handles it, and for tasks that this one starts.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

_key: ContextVar[str] = ContextVar("key", default="")


def current_key() -> str:
    """The key of the request that this task handles; empty: it came without one."""
    return _key.get()


def set_key(key: str) -> None:
    """Handle, in this task, a request that came with `key`."""
    _key.set(key)


def current_owner() -> str:
    """Stands for the key where something is kept for it: two requests with one key have the same owner."""
    return hashlib.sha256(_key.get().encode()).hexdigest()


class Keys:
    """ASGI: sets the key from `Authorization: Bearer KEY` or `X-API-Key: KEY`.

    `prefix` is taken off: what clients of a protocol put before every key.
    """

    def __init__(self, app: ASGIApp, *, prefix: str = "") -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            scheme, _, credential = headers.get("authorization", "").partition(" ")
            key = credential.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            set_key(key.removeprefix(self._prefix))
        await self._app(scope, receive, send)
