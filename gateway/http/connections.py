"""The connections of the HTTP port: how many there are, how long each may be without a request or a reader.

uvicorn bounds none of this: a caller could open connections, say nothing, and shut everybody else out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import ssl
import sys
import time
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from gateway.http.errors import STOPPING, closing_response

logger = logging.getLogger(__name__)

SILENCE_S = 30.0  # without a whole head of a request, at the start and behind a response
SLOW_READER_S = 30.0  # in which a reader takes less than what the buffer of a response holds
HANDSHAKE_S = 20  # of TLS
SWEEP_EVERY_S = 1.0
MAX_HEAD_BYTES = 16 << 10  # as h11 has it for a head that comes in pieces
_ABSOLUTE = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)


class Connections:
    """All connections of a port, at most `most`. Make it inside the loop; `sweep` has to be called now and then.

    At the bound, a new one takes the place of one that carries no request. If all carry requests, only a host with less
    than its equal part gets one more.
    """

    def __init__(
        self,
        most: int,
        context: Callable[[], ssl.SSLContext] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`context`: connections begin with TLS, each with what this returns then."""
        self.clock = clock
        self._most = most
        self._context = context
        self.open: dict[Connection, None] = {}  # in the order in which they came; read it only
        # Invariant: how many of them each host has; nobody has 0.
        self._num_by_host: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.open)

    def protocol(self, **arguments: Any) -> asyncio.Protocol:
        """What uvicorn makes for each connection."""
        return Connection(self, None if self._context is None else self._context(), **arguments)

    def add(self, connection: Connection) -> bool:
        """Whether a new connection gets a place. It may take that of another one, which is ended."""
        host = connection.host
        num_hosts = len(self._num_by_host.keys() | {host})
        has_room = len(self.open) < self._most or self._end_one_without_a_request()
        if not has_room and self._num_by_host[host] + 1 > self._most // num_hosts:
            return False
        self.open[connection] = None
        self._num_by_host[host] += 1
        return True

    def remove(self, connection: Connection) -> None:
        """Forget one that has ended."""
        if connection in self.open:
            del self.open[connection]
            self._num_by_host -= Counter((connection.host,))

    def sweep(self) -> None:
        """End those that say nothing, and those that read nothing."""
        now_s = self.clock()
        for connection in list(self.open):
            if not connection.carries_request:
                is_over = now_s - connection.silent_since_s > SILENCE_S
            else:
                since_s = connection.unread_since_s
                is_over = since_s is not None and now_s - since_s > SLOW_READER_S
            if is_over:
                connection.end()

    def _end_one_without_a_request(self) -> bool:
        """Of the host that has most of them, the one that has been without a request for the longest time."""
        free = [each for each in self.open if not each.carries_request]
        if not free:
            return False
        num_free = Counter(each.host for each in free)
        min(free, key=lambda each: (-num_free[each.host], each.silent_since_s)).end()
        return True


class Connection(H11Protocol):
    """One connection. uvicorn's protocol, with TLS begun here, so that a handshake counts and has a limit, too."""

    def __init__(self, connections: Connections, context: ssl.SSLContext | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._application, self.app = self.app, self._run  # uvicorn calls `app` with each request
        self.host = ""
        self.silent_since_s: float = connections.clock()  # without a request, if it carries none
        self.unread_since_s: float | None = None  # the buffer of what is sent is full
        self._connections = connections
        self._context = context
        self._tcp: asyncio.Transport | None = None

    @property
    def carries_request(self) -> bool:
        """Whether a request has come whose response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def end(self) -> None:
        """End it at once, whatever is still to be sent."""
        self._connections.remove(self)
        transport = self.transport or self._tcp
        assert transport is not None, "ended before it began"
        transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        if self._tcp is not None:  # once more: behind the handshake
            super().connection_made(transport)
            return
        self.host = host_of(transport)
        self._tcp = transport
        if not self._connections.add(self):
            transport.abort()
        elif self._context is None:
            super().connection_made(transport)
        else:
            self._begin_tls(transport, self._context)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        if self.transport is not None:
            super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the form of every refusal. uvicorn calls this while it handles h11's error."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # Another response has begun: with two of them uvicorn fails and logs a traceback.
            self.transport.abort()
            return
        has_body = True
        if self.carries_request:  # and its body is what is wrong: for its handler, the client has left
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            has_body = self.scope["method"] != "HEAD"
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        refusal = closing_response(status, f"the request is not valid HTTP/1.1: {str(error or msg)[:200]}")
        reason = HTTPStatus(status).phrase.encode()
        for event in (
            h11.Response(status_code=status, headers=refusal.raw_headers, reason=reason),
            h11.Data(data=bytes(refusal.body) if has_body else b""),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def pause_writing(self) -> None:
        self.unread_since_s = self._connections.clock()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.unread_since_s = None
        super().resume_writing()

    def on_response_complete(self) -> None:
        self.silent_since_s = self._connections.clock()
        super().on_response_complete()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (num_bytes := _head_bytes(scope)) > MAX_HEAD_BYTES:
            too_long = f"the head of the request has {num_bytes} bytes; send at most {MAX_HEAD_BYTES}"
            await closing_response(431, too_long)(scope, receive, send)
            return
        # The cycle is of this request: the next one begins behind the end of its response.
        chunks = _Chunks(self.cycle, scope, send)
        try:
            await self._application(_in_origin_form(scope), receive, chunks.send)
        except asyncio.CancelledError:  # the time for open requests has passed, see server.py
            await self._end_early(chunks, scope, receive)

    async def _end_early(self, chunks: _Chunks, scope: Scope, receive: Receive) -> None:
        """End a request that the server does not wait for any longer: with an error where nothing of it was sent."""
        with contextlib.suppress(asyncio.CancelledError):  # a client that reads nothing
            if not self.cycle.response_started:
                await closing_response(503, STOPPING, "server_error")(scope, receive, chunks.send)
        if not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.transport.abort()

    def _begin_tls(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        """In this call and not in a task: the client's first bytes may come before a task runs, and TLS misses them."""
        ended: asyncio.Future[None] = self.loop.create_future()
        tls = SSLProtocol(self.loop, self, context, ended, server_side=True, ssl_handshake_timeout=HANDSHAKE_S)
        ended.add_done_callback(self._on_handshake_ended)
        transport.set_protocol(tls)
        tls.connection_made(transport)

    def _on_handshake_ended(self, ended: asyncio.Future[None]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if self.transport is None:  # without success, which is the one way in which connection_lost is not called
            logger.debug("no TLS with %s: %s", self.host, error)
            self.end()


class _Chunks:
    """Sends a response. Its parts that are chunks of HTTP/1.1 go straight to the transport.

    h11 looks at its states for each of them, which took 12% of the CPU time of a stream of tokens. What begins and
    ends a response goes through uvicorn and h11, so that both know how it stands.
    """

    def __init__(self, cycle: RequestResponseCycle, scope: Scope, send: Send) -> None:
        self._cycle = cycle
        self._send = send
        self._may_have_chunks = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
        self._has_chunks = False

    async def send(self, message: Message) -> None:
        """As ASGI has it."""
        cycle = self._cycle
        if (
            self._has_chunks
            and message.get("more_body")
            and (body := message.get("body"))
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and cycle.conn.our_state is h11.SEND_BODY
        ):
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            return
        if message["type"] == "http.response.start" and self._may_have_chunks:
            names = [name.lower() for name, _ in message["headers"]]
            # Other statuses and lengths have a form of their own, which h11 knows.
            self._has_chunks = message["status"] == 200 and b"content-length" not in names
        await self._send(message)


def _head_bytes(scope: Scope) -> int:
    target = len(scope["raw_path"]) + len(scope["query_string"])
    return target + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def _in_origin_form(scope: Scope) -> Scope:
    """The same request where its target is a whole URL, as for a proxy: a server takes that, too (RFC 9112, 3.2.2)."""
    found = _ABSOLUTE.match(scope["raw_path"])
    if found is None:
        return scope
    path = scope["raw_path"][found.end() :].partition(b"#")[0] or b"/"
    return {**scope, "raw_path": path, "path": unquote(path.decode("ascii"))}


def host_of(transport: asyncio.Transport) -> str:
    """The address of the other end. Of an IPv6 address its network: a host has as many addresses there as it wants."""
    address = str((transport.get_extra_info("peername") or ("",))[0])
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(parsed.ipv4_mapped or ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
    return str(parsed)
