"""The key that an HTTP request came with. It is handed on to Motet, which judges it; the gateway keeps no keys.

The key of a request is set for the task that handles it, and for tasks that this one starts.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import closing_response

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

    `prefix` is taken off: what clients of a protocol put before every key. A request that names two keys is refused: a
    proxy in front may have checked the other one.
    """

    def __init__(self, app: ASGIApp, *, prefix: str = "") -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                set_key(_key_of(Headers(scope=scope)).removeprefix(self._prefix))
            except ValueError as error:
                await closing_response(400, str(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _key_of(headers: Headers) -> str:
    """The one key that a request names; empty: none. Raises ValueError if it names several."""
    for name in ("Authorization", "X-API-Key"):
        if (count := len(headers.getlist(name))) > 1:
            raise ValueError(f"the header {name} appears {count} times; send it once")
    scheme, _, credential = headers.get("authorization", "").partition(" ")
    other = headers.get("x-api-key", "")
    if scheme.lower() != "bearer":
        return other
    if other not in ("", credential.strip()):
        raise ValueError("the headers Authorization and X-API-Key have different keys; send one of them")
    return credential.strip()
