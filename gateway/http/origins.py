"""What web pages may do: nothing, unless the operator allows their origin.

A browser names the page's origin with every request of another page, and with every POST. Without this check a page
that somebody opens could use a gateway on their machine, or one that trusts their network. A page that points its own
name to this machine once it is loaded (DNS rebinding) has no other origin for the browser, and sends its name as Host.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import closing_response

FLAG = "--allow-origin"


class Origins:
    """ASGI: refuses requests of other origins with 403, and a body with two lengths (400) or an encoding (415)."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str], hosts: Collection[str] | None = None) -> None:
        """`allowed`: origins such as https://chat.example.org, or "*" for all. `hosts`: names of the server beside
        those of this machine, in lower case and without a port; None: any name.
        """
        # Without any, no request of a page gets through, so that no response needs the headers of CORS.
        self._app = (
            app
            if not allowed
            else CORSMiddleware(
                app,
                allow_origins=list(allowed),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "x-motet-adapter-digest", "retry-after", "retry-after-ms"],
            )
        )
        self._allowed = frozenset(allowed)
        self._hosts = None if hosts is None else frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (response := self._refusal(Headers(scope=scope))) is not None:
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        origin = headers.get("origin")
        if origin is not None and "*" not in self._allowed and origin not in self._allowed:
            return closing_response(
                403, f"Origin {origin[:200]!r} may not use this server; its operator allows it by {FLAG}"
            )
        # A proxy in front may believe the other one of the two, and take a part of the body for the next request.
        if "transfer-encoding" in headers and "content-length" in headers:
            return closing_response(400, "the request has Transfer-Encoding and Content-Length; send one of them")
        encoding = headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            return closing_response(
                415, f"Content-Encoding {encoding[:200]!r} is not served; send the body as it is, without the header"
            )
        host = headers.get("host", "")
        if self._hosts is not None and (name := _name_of(host)) not in self._hosts and not _is_this_machine(name):
            return closing_response(
                403,
                f"Host {host[:200]!r} is not a name of this server, which serves this machine alone; use 127.0.0.1 or "
                "localhost, or start it with --allow-host NAME",
            )
        return None


def _name_of(host: str) -> str:
    """The name in a header Host, without its port."""
    name = host.strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def _is_this_machine(name: str) -> bool:
    """Whether no page can have this name: localhost, a loopback address, or none at all."""
    parts = name.split(".")
    is_address = len(parts) == 4 and all(part.isascii() and part.isdecimal() for part in parts)
    return name in ("localhost", "::1", "") or (is_address and parts[0] == "127")
