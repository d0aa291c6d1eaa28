"""What open requests get when the gateway does not wait for them any longer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gateway.http.server import address_of, bound, serve
from gateway.http.settings import HttpSettings
from gateway.openai.responses import EventStream, while_connected
from gateway.openai.settings import OpenAiSettings

WAIT_S = 60.0
HEAD = b"GET /%s HTTP/1.1\r\nhost: a\r\n\r\n"


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def events() -> AsyncGenerator[dict[str, int], None]:
    yield {"number": 1}
    await never()


class App:
    """Responds never, or with a stream that does not end."""

    def __init__(self) -> None:
        self.begun = asyncio.Semaphore(0)  # requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for name in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{name}.complete"})
            return
        self.begun.release()
        if scope["path"] == "/whole":
            await while_connected(Request(scope, receive), never())
        elif scope["path"] == "/raw":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await never()
        else:
            await EventStream(events(), dict, OpenAiSettings(), is_typed=False)(scope, receive, send)


async def stopped(*paths: bytes) -> list[bytes]:
    """Open requests of these paths, then a signal: all that each client reads."""
    settings = HttpSettings(listen="127.0.0.1:0", drain_timeout_s=0)
    listener, app = bound(settings), App()
    _, _, port = address_of(listener).rpartition(":")
    serving = asyncio.create_task(serve(app, settings, listener))
    async with asyncio.timeout(WAIT_S):
        clients = []
        for path in paths:
            clients.append(await _connected(int(port), HEAD % path))
            await app.begun.acquire()
            if path != b"whole":
                await clients[-1][0].readuntil(b"\r\n\r\n")
        os.kill(os.getpid(), signal.SIGTERM)
        read = await asyncio.gather(*(reader.read() for reader, _ in clients), return_exceptions=True)
        await serving
    for _, writer in clients:
        writer.close()
    return [part if isinstance(part, bytes) else b"" for part in read]


async def _connected(port: int, head: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            return reader, writer
        await asyncio.sleep(0)


async def test_a_whole_request_gets_503_and_may_be_sent_again() -> None:
    (read,) = await stopped(b"whole")
    head, _, body = read.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in head
    assert json.loads(body)["error"]["type"] == "server_error"


async def test_a_stream_ends_with_an_error() -> None:
    (read,) = await stopped(b"stream")
    sent = [line for line in read.split(b"\r\n") if line.startswith(b"data: ")]
    found: list[Any] = [json.loads(line.split(b"\n")[0][6:]) for line in sent]
    assert found[-1]["error"]["message"].startswith("the gateway is stopping")
    assert read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), "the body has no end"


async def test_nothing_of_it_is_an_error_of_the_gateway(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="gateway"):
        await stopped(b"whole", b"stream", b"raw")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "open requests ended number=3 drain_timeout_s=0"
    ]
