"""Responses that end with their client: a stream of server-sent events, or one that waits for its body.

Until the first event an error is an HTTP status; later it is an event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from motet import MotetError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gateway.http.errors import STOPPING, Refusal
from gateway.openai.errors import error_body, refusal_of
from gateway.openai.settings import OpenAiSettings

T = TypeVar("T")

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-store",
    "x-accel-buffering": "no",
}


class ClientGone(Exception):
    """Nobody waits for the response any more."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves. Raises ClientGone. The body has been read."""
    return await _while_connected(request.receive, work)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """ASGI: sends `events` as they come. `headers` is called when the response begins.

    Events of chats and completions have no type, and `[DONE]` follows them. `is_typed`: each has one, which it is sent
    with, and the last one is the end.
    """

    def __init__(
        self,
        events: AsyncGenerator[Any, None],
        headers: Callable[[], dict[str, str]],
        settings: OpenAiSettings,
        *,
        is_typed: bool = False,
    ) -> None:
        self._is_typed = is_typed
        self._last = b"" if is_typed else b"data: [DONE]\n\n"
        self._events = events
        self._headers = headers
        self._settings = settings

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        wire = _Wire(send, self._headers)
        keeping = asyncio.ensure_future(self._keep_alive(wire))
        try:
            await _while_connected(receive, self._write(wire))
        except ClientGone:
            return
        except asyncio.CancelledError:  # the gateway is stopping
            if wire.has_begun and not wire.has_ended:
                await wire.end(_error_event(Refusal(503, STOPPING)) + self._last)
            raise
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self._events.aclose()  # it may never have been entered

    async def _write(self, wire: _Wire) -> None:
        try:
            async for event in self._events:
                head = b"event: " + event["type"].encode() + b"\n" if self._is_typed else b""
                await wire.send(head + b"data: " + msgspec.json.encode(event) + b"\n\n")
        except (Refusal, MotetError) as error:
            if not wire.has_begun:
                wire.has_ended = True
                raise
            await wire.send(_error_event(refusal_of(error)))
        await wire.end(self._last)

    async def _keep_alive(self, wire: _Wire) -> None:
        await asyncio.sleep(self._settings.sse_commit_after_s)
        if not wire.has_begun:
            await wire.send(b": waiting\n\n")
        while True:
            silent_s = asyncio.get_running_loop().time() - wire.last_sent_s
            if silent_s >= self._settings.sse_keep_alive_s:
                await wire.send(b": keep-alive\n\n")
            else:
                await asyncio.sleep(self._settings.sse_keep_alive_s - silent_s)


def _error_event(refusal: Refusal) -> bytes:
    return b"data: " + msgspec.json.encode(error_body(refusal)) + b"\n\n"


class _Wire:
    """One response body. Two tasks write whole events to it, each with one message."""

    def __init__(self, send: Send, headers: Callable[[], dict[str, str]]) -> None:
        self.has_begun = False
        self.has_ended = False
        self.last_sent_s = 0.0
        self._send = send
        self._headers = headers
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()  # of the beginning and the end

    async def send(self, data: bytes) -> None:
        if not self.last_sent_s:
            await self._begin()
        if not self.has_ended:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self.last_sent_s = self._loop.time()

    async def end(self, data: bytes) -> None:
        if data:
            await self.send(data)
        async with self._lock:
            self.has_ended = True
            with contextlib.suppress(OSError):
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self) -> None:
        """Send the head, once."""
        async with self._lock:
            if self.has_ended or self.has_begun:
                return
            self.has_begun = True
            headers = [(name.encode(), value.encode()) for name, value in {**_HEADERS, **self._headers()}.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
