"""Parts of a response that go past h11: the bytes are those that uvicorn's own protocol sends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gateway.http.connections import Connections

WAIT_S = 60.0
START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def sending(*messages: Message) -> Application:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        for message in messages:
            await send(dict(message))

    return app


async def received(app: Application, request: bytes, *, is_ours: bool) -> bytes:
    """All that a client gets which sends `request` and no more."""
    config = uvicorn.Config(app, interface="asgi3", log_config=None, access_log=False)
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    connections = Connections(8)

    def protocol() -> asyncio.Protocol:
        arguments: dict[str, Any] = {"config": config, "server_state": state, "app_state": {}}
        return connections.protocol(**arguments) if is_ours else H11Protocol(**arguments)

    server = await loop.create_server(protocol, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    try:
        async with asyncio.timeout(WAIT_S):
            writer.write(request)
            return await reader.read()
    finally:
        writer.close()
        server.close()
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


CLOSED = b"host: a\r\nconnection: close\r\n\r\n"
LENGTH = {**START, "headers": [(b"Content-Length", b"6")]}


@pytest.mark.parametrize(
    ("request_bytes", "messages"),
    [
        (b"GET / HTTP/1.1\r\n" + CLOSED, [START, part(b"one"), part(b"two" * 9000), part(b"end", more=False)]),
        (b"GET / HTTP/1.1\r\n" + CLOSED, [START, part(b""), part(b"one"), part(b"", more=False)]),
        (b"GET / HTTP/1.1\r\n" + CLOSED, [LENGTH, part(b"abc"), part(b"def", more=False)]),
        (b"GET / HTTP/1.1\r\n" + CLOSED, [{**START, "status": 500}, part(b"abc"), part(b"", more=False)]),
        (b"GET / HTTP/1.0\r\n" + CLOSED, [START, part(b"one"), part(b"two"), part(b"", more=False)]),
        (b"HEAD / HTTP/1.1\r\n" + CLOSED, [START, part(b"one"), part(b"two"), part(b"", more=False)]),
    ],
)
async def test_a_response_has_the_bytes_that_h11_would_send(request_bytes: bytes, messages: list[Message]) -> None:
    ours = await received(sending(*messages), request_bytes, is_ours=True)
    assert ours == await received(sending(*messages), request_bytes, is_ours=False)
    assert ours.startswith(b"HTTP/1.1 ")


async def test_parts_of_a_second_response_of_a_connection_have_chunks_too() -> None:
    two = b"GET / HTTP/1.1\r\nhost: a\r\n\r\nGET / HTTP/1.1\r\n" + CLOSED
    app = sending(START, part(b"one"), part(b"", more=False))
    got = await received(app, two, is_ours=True)
    assert got.count(b"\r\n\r\n3\r\none\r\n0\r\n\r\n") == 2
    assert got == await received(app, two, is_ours=False)


async def test_nothing_is_sent_behind_the_end_of_a_response() -> None:
    refused: list[RuntimeError] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        for message in (START, part(b"one"), part(b"", more=False)):
            await send(dict(message))
        try:
            await send(part(b"late"))
        except RuntimeError as error:
            refused.append(error)

    got = await received(app, b"GET / HTTP/1.1\r\n" + CLOSED, is_ours=True)
    assert got.endswith(b"\r\n\r\n3\r\none\r\n0\r\n\r\n") and len(refused) == 1
