"""close() from another thread or task ends a stream, and every call of a client, whatever they wait for."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from motet import AsyncClient, Cancelled, Client

from tests.client.scripted_server import Response, ScriptedServer, abort, delta, started

STATES = ["first message", "next token", "connection", "pause"]
JOIN_S = 30.0  # what lasts longer hangs


class Place:
    """A server at which a call gets into one state and stays there. `wait` returns when it is in it."""

    def __init__(self, state: str, server: ScriptedServer) -> None:
        self.state = state
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing
        self.target = server.target
        if state == "connection":
            self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        elif state == "first message":
            server.scripts.append(server.waiting_for_cancel())
        elif state == "next token":
            server.scripts.append(server.waiting_for_cancel(started(), delta(0, [5], "a")))
        else:
            server.scripts.append(_refuse_for_a_minute)

    def wait(self) -> None:
        """Until the call has come as far as the network shows it."""
        if self.state == "connection":
            self._listener.settimeout(JOIN_S)
            self._connection, _ = self._listener.accept()
            return
        waiting = threading.Event()
        for _ in range(int(JOIN_S * 100)):
            if self._server.requests:
                return
            waiting.wait(0.01)
        raise AssertionError("no request came")

    def close(self) -> None:
        if self.state == "connection":
            self._connection.close()
        self._listener.close()


def _refuse_for_a_minute(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
    info = error_details_pb2.ErrorInfo(reason="STORE_DOWN")
    abort(
        context,
        grpc.StatusCode.UNAVAILABLE,
        "the store is away",
        info,
        error_details_pb2.RetryInfo(retry_delay=Duration(seconds=60)),
    )
    yield Response()


@pytest.fixture(params=STATES)
def place(request: pytest.FixtureRequest, server: ScriptedServer) -> Iterator[Place]:
    made = Place(request.param, server)
    yield made
    made.close()


class Reader:
    """A thread that reads a stream to its end; `outcome` is the number of chunks or the error."""

    def __init__(self, stream: Any) -> None:
        self.outcome: int | BaseException | None = None
        self._got_chunk = threading.Event()
        self._stream = stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        num_chunks = 0
        try:
            for _ in self._stream:
                num_chunks += 1
                self._got_chunk.set()
            self.outcome = num_chunks
        except BaseException as error:
            self.outcome = error

    def wait(self, place: Place) -> None:
        """Until the call is in the place's state."""
        place.wait()
        if place.state == "next token":
            assert self._got_chunk.wait(JOIN_S)
        if place.state == "pause":
            self._wait_until_in("pauses.py")

    def _wait_until_in(self, file_name: str) -> None:
        """Until the thread runs, or waits in, a function of this file."""
        waiting = threading.Event()
        for _ in range(int(JOIN_S * 100)):
            frame = sys._current_frames().get(self._thread.ident or 0)
            while frame is not None:
                if frame.f_code.co_filename.endswith(file_name):
                    return
                frame = frame.f_back
            waiting.wait(0.01)
        raise AssertionError(f"the reader never came to {file_name}")

    def join(self) -> None:
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), "the reader hangs"


def test_closing_a_stream_from_another_thread_ends_its_reader(place: Place) -> None:
    with Client(place.target) as client:
        stream = client.generate("hi")
        reader = Reader(stream)
        reader.wait(place)
        stream.close()
        reader.join()
        assert reader.outcome == (1 if place.state == "next token" else 0)
        with pytest.raises(Cancelled):
            stream.result()


def test_closing_a_client_from_another_thread_ends_its_streams(place: Place) -> None:
    client = Client(place.target)
    reader = Reader(client.generate("hi"))
    reader.wait(place)
    client.close()
    reader.join()
    assert isinstance(reader.outcome, Cancelled) and "client was closed" in str(reader.outcome)


async def test_closing_an_async_stream_from_another_task_ends_its_reader(place: Place) -> None:
    is_there, client = _async_client(place)
    async with client:
        stream = client.generate("hi")
        reader = asyncio.create_task(_read(stream, is_there))
        await asyncio.to_thread(place.wait)
        if place.state in ("next token", "pause"):
            await asyncio.wait_for(is_there.wait(), JOIN_S)
        await stream.aclose()
        assert await asyncio.wait_for(reader, JOIN_S) == (1 if place.state == "next token" else 0)
        with pytest.raises(Cancelled):
            await stream.result()


async def test_closing_an_async_client_ends_its_streams(place: Place) -> None:
    is_there, client = _async_client(place)
    reader = asyncio.create_task(_read(client.generate("hi"), is_there))
    await asyncio.to_thread(place.wait)
    if place.state in ("next token", "pause"):
        await asyncio.wait_for(is_there.wait(), JOIN_S)
    await client.close()
    with pytest.raises(Cancelled, match="client was closed"):
        await asyncio.wait_for(reader, JOIN_S)


def test_closed_client_says_so(server: ScriptedServer) -> None:
    client = Client(server.target)
    client.close()
    with pytest.raises(Cancelled, match="client was closed"):
        client.status()
    with pytest.raises(Cancelled, match="client was closed"):
        client.generate("hi")


async def test_closed_async_client_says_so(server: ScriptedServer) -> None:
    client = AsyncClient(server.target)
    await client.close()
    with pytest.raises(Cancelled, match="client was closed"):
        await client.status()
    with pytest.raises(Cancelled, match="client was closed"):
        client.generate("hi")


def _async_client(place: Place) -> tuple[asyncio.Event, AsyncClient]:
    """The client, and what is set once a call of it waits before another attempt; that wait never ends by itself."""
    is_there = asyncio.Event()

    async def sleep(seconds: float) -> None:
        is_there.set()
        await asyncio.Event().wait()

    return is_there, AsyncClient(place.target, sleep=sleep)


async def _read(stream: Any, is_there: asyncio.Event) -> int:
    """The number of chunks; sets `is_there` at the first one."""
    num_chunks = 0
    async for _ in stream:
        num_chunks += 1
        is_there.set()
    return num_chunks
