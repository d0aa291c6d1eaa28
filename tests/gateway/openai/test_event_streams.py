"""Streams of events: when the response begins, what an error becomes, comments in silence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from motet import Aborted, InvalidArgument
from starlette.types import Message

from gateway.openai.responses import EventStream
from gateway.openai.settings import OpenAiSettings


class Wire:
    """A client that stays, and what it was sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.begun = asyncio.Event()
        self._leaves = asyncio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and message["body"]:
            self.begun.set()

    async def receive(self) -> Message:
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        self._leaves.set()

    async def run(self, events: AsyncGenerator[Any, None], settings: OpenAiSettings) -> None:
        async with asyncio.timeout(30):
            await EventStream(events, lambda: {"x-request-id": "r"}, settings)({}, self.receive, self.send)


async def failing(after: asyncio.Event | None, num_events: int) -> AsyncGenerator[dict[str, int], None]:
    for number in range(num_events):
        yield {"n": number}
    if after is not None:
        await after.wait()
    raise Aborted("the worker is gone")


async def test_an_error_before_the_first_event_is_raised_and_nothing_is_sent() -> None:
    wire = Wire()
    with pytest.raises(Aborted):
        await wire.run(failing(None, 0), OpenAiSettings())
    assert wire.sent == []


async def test_an_error_after_the_first_event_is_an_event() -> None:
    wire = Wire()
    await wire.run(failing(None, 1), OpenAiSettings())
    first, error, done, rest = wire.body.split(b"\n\n")
    assert wire.sent[0]["status"] == 200 and (b"x-request-id", b"r") in wire.sent[0]["headers"]
    assert json.loads(first.removeprefix(b"data: ")) == {"n": 0}
    assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "the worker is gone"
    assert (done, rest) == (b"data: [DONE]", b"") and not wire.sent[-1]["more_body"]


async def test_a_response_begins_without_a_token_after_the_time_of_the_setting() -> None:
    wire = Wire()
    await wire.run(failing(wire.begun, 0), OpenAiSettings(sse_commit_after_s=0))
    waiting, error, _done, _rest = wire.body.split(b"\n\n")
    assert waiting == b": waiting" and wire.sent[0]["status"] == 200
    assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "invalid_request_error"


async def test_a_silent_stream_gets_comments() -> None:
    wire = Wire()

    async def silent() -> AsyncGenerator[dict[str, int], None]:
        while wire.body.count(b": keep-alive\n\n") < 2:
            await asyncio.sleep(0.01)
        yield {"n": 0}

    await wire.run(silent(), OpenAiSettings(sse_commit_after_s=0, sse_keep_alive_s=1))
    assert wire.body.endswith(b'data: {"n":0}\n\ndata: [DONE]\n\n')


async def test_a_client_that_leaves_ends_the_events() -> None:
    wire, ended = Wire(), asyncio.Event()

    async def endless() -> AsyncGenerator[dict[str, int], None]:
        try:
            yield {"n": 0}
            wire.leave()
            await asyncio.Event().wait()
        finally:
            ended.set()

    await wire.run(endless(), OpenAiSettings())
    assert ended.is_set()


async def test_a_refusal_before_the_first_event_ends_the_comments() -> None:
    wire = Wire()

    async def refused() -> AsyncGenerator[dict[str, int], None]:
        raise InvalidArgument("max_tokens: is 0")
        yield {}

    with pytest.raises(InvalidArgument):
        await wire.run(refused(), OpenAiSettings(sse_keep_alive_s=1))
    assert wire.sent == []
