"""The clients' port in front ends, real processes: RPCs of every kind are what they are without front ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from control_plane.api.rpc import listeners
from control_plane.errors import NoWorker, SlowConsumer
from control_plane.frontends.frontend import PING_EVERY_S
from control_plane.frontends.port import FrontendPort
from control_plane.frontends.setup import FrontendSetup
from tests.control_plane.api.fakes import details
from tests.fakes.raw_http2 import raw_call

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
TIMEOUT_S = 60.0  # a loaded machine may take long to start a process


class Service:
    """Methods of all kinds, as bytes; remembers what it saw."""

    def __init__(self) -> None:
        self.contexts: list[Any] = []
        self.ended: list[str] = []
        self.running = asyncio.Event()
        self.may_end = asyncio.Event()
        self.num_sent = 0

    async def echo(self, request: bytes, context: Any) -> bytes:
        self.contexts.append(context)
        return request[::-1]

    async def count(self, request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield str(number).encode()

    async def join(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        parts = [part async for part in requests]
        await context.send_initial_metadata(())
        return b"".join(parts)

    async def reflect(self, requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request * 2

    async def fail(self, _request: bytes, _context: Any) -> bytes:
        raise NoWorker("nobody is here")

    async def hang(self, request: bytes, _context: Any) -> AsyncIterator[bytes]:
        try:
            yield request
            self.running.set()
            await asyncio.Event().wait()
        finally:
            self.ended.append(request.decode())

    async def slow(self, request: bytes, _context: Any) -> AsyncIterator[bytes]:
        try:
            yield request
            await asyncio.Event().wait()
        finally:
            self.ended.append(f"{request.decode()} begins to end")
            await self.may_end.wait()
            self.ended.append(request.decode())

    async def flood(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        self.running.set()
        try:
            while True:
                yield bytes(1 << 16)
                self.num_sent += 1
        finally:
            self.ended.append("flood")

    def handlers(self) -> Any:
        return {
            "Echo": grpc.unary_unary_rpc_method_handler(self.echo),
            "Count": grpc.unary_stream_rpc_method_handler(self.count),
            "Join": grpc.stream_unary_rpc_method_handler(self.join),
            "Reflect": grpc.stream_stream_rpc_method_handler(self.reflect),
            "Fail": grpc.unary_unary_rpc_method_handler(self.fail),
            "Hang": grpc.unary_stream_rpc_method_handler(self.hang),
            "Slow": grpc.unary_stream_rpc_method_handler(self.slow),
            "Flood": grpc.unary_stream_rpc_method_handler(self.flood),
        }


@contextlib.asynccontextmanager
async def running(
    num_frontends: int = 1, write_timeout_s: float = 30.0, ping_every_s: float = PING_EVERY_S
) -> AsyncIterator[tuple[FrontendPort, Service, str]]:
    service = Service()
    refused: list[str] = []
    interceptor = listeners.client_interceptor(
        max_concurrent_rpcs=100,
        write_timeout_s=write_timeout_s,
        on_refused=lambda method, _caller, _error: refused.append(method),
    )
    options = (("grpc.so_reuseport", 1), ("grpc.max_receive_message_length", 1 << 22))
    setup = FrontendSetup(options=options, write_timeout_s=write_timeout_s)
    port = FrontendPort(interceptor, num_frontends, setup, ping_every_s=ping_every_s)
    port.add_registered_method_handlers("test.Service", service.handlers())
    address = port.bind("127.0.0.1:0")
    try:
        await port.start()
        yield port, service, address
    finally:
        await port.stop(0.0)


def call(channel: grpc.aio.Channel, name: str, kind: str = "unary_unary") -> Any:
    return getattr(channel, kind)(f"/test.Service/{name}")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_every_kind_of_method_has_its_messages_metadata_and_status() -> None:
    async with running() as (_, service, address), grpc.aio.insecure_channel(address) as channel:
        metadata = (("a-key", "value"), ("raw-bin", b"\x00\xff"))
        assert await call(channel, "Echo")(b"abc", metadata=metadata, timeout=TIMEOUT_S) == b"cba"
        (context,) = service.contexts
        assert set(metadata) <= set(context.invocation_metadata())
        assert context.peer().startswith("ipv4:127.0.0.1:") and 0 < context.time_remaining() <= TIMEOUT_S
        assert [raw async for raw in call(channel, "Count", "unary_stream")(b"50")] == [
            str(number).encode() for number in range(50)
        ]
        assert [raw async for raw in call(channel, "Count", "unary_stream")(b"0")] == []
        parts = [bytes([number]) * 100_000 for number in range(20)]
        assert await call(channel, "Join", "stream_unary")(iter(parts)) == b"".join(parts)
        assert await call(channel, "Join", "stream_unary")(iter([])) == b""
        stream = call(channel, "Reflect", "stream_stream")()
        for word in (b"a", b"", b"c"):
            await stream.write(word)
            assert await stream.read() == word * 2
        await stream.done_writing()
        assert await stream.read() is EOF
        assert await call(channel, "Echo")(b"") == b""

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "Fail")(b"")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details(caught.value)[0].reason == "NO_WORKER"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "Nothing")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_many_calls_at_once_keep_their_messages_apart() -> None:
    async with running(2) as (_, _, address):

        async def one(channel: grpc.aio.Channel, number: int) -> None:
            assert await call(channel, "Echo")(str(number).encode()) == str(number).encode()[::-1]
            got = [raw async for raw in call(channel, "Count", "unary_stream")(str(number).encode())]
            assert got == [str(each).encode() for each in range(number)]

        async with contextlib.AsyncExitStack() as stack:
            own: Any = [("grpc.use_local_subchannel_pool", 1)]  # a connection each
            channels = [
                await stack.enter_async_context(grpc.aio.insecure_channel(address, options=own)) for _ in range(8)
            ]
            await asyncio.gather(*(one(channels[number % 8], number) for number in range(80)))


async def test_a_client_that_leaves_ends_its_handler() -> None:
    async with running() as (_, service, address), grpc.aio.insecure_channel(address) as channel:
        stream = call(channel, "Hang", "unary_stream")(b"left")
        assert await stream.read() == b"left"
        stream.cancel()
        await until(lambda: service.ended == ["left"])
        late = call(channel, "Hang", "unary_stream")(b"late", timeout=1.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in late:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: service.ended == ["left", "late"])


async def test_a_client_that_does_not_read_holds_up_its_own_stream_alone() -> None:
    async with running(write_timeout_s=1.0) as (_, service, address), grpc.aio.insecure_channel(address) as channel:
        stream = call(channel, "Flood", "unary_stream")(b"")
        await asyncio.wait_for(service.running.wait(), TIMEOUT_S)
        assert await call(channel, "Echo")(b"ab") == b"ba"
        await until(lambda: service.ended == ["flood"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stream:
                pass
        assert details(caught.value)[0].reason == SlowConsumer.reason
        # What a connection takes without being read, and a few messages for each of the two processes.
        assert service.num_sent < 400


async def test_a_front_end_that_dies_takes_its_own_calls_and_another_one_follows() -> None:
    async with running(2) as (port, service, address), contextlib.AsyncExitStack() as stack:
        own: Any = [("grpc.use_local_subchannel_pool", 1)]
        streams = []
        for number in range(16):  # on both, but for one chance in thirty thousand
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=own))
            stream = call(channel, "Hang", "unary_stream")(str(number).encode())
            assert await stream.read() == str(number).encode()
            streams.append(stream)
        before = port.pids
        os.kill(before[0] or 0, signal.SIGKILL)
        await until(lambda: bool(service.ended))
        ended = {int(number) for number in service.ended}
        assert 0 < len(ended) < 16
        for number in ended:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await streams[number].read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: port.pids[0] != before[0])
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(16):  # some reach the new one, once it listens
                async with grpc.aio.insecure_channel(address, options=own) as channel:
                    assert await call(channel, "Echo")(b"ab", wait_for_ready=True) == b"ba"
        assert {int(number) for number in service.ended} == ended, "the other's calls go on"
        assert port.pids[1] == before[1]


async def test_a_front_end_that_hangs_is_ended_and_another_one_follows() -> None:
    """Each of its connections would wait for ever, and so would its part of all further ones."""
    async with running(ping_every_s=0.2) as (port, service, address):
        own: Any = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options=own) as channel:
            stream = call(channel, "Hang", "unary_stream")(b"held")
            assert await stream.read() == b"held"
            before = port.pids[0]
            os.kill(before or 0, signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await until(lambda: service.ended == ["held"] and port.pids[0] != before)
            assert await call(channel, "Echo")(b"ab", wait_for_ready=True) == b"ba"


async def test_a_call_that_ends_slowly_leaves_those_of_the_next_front_end_alone() -> None:
    async with running() as (port, service, address):
        own: Any = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options=own) as channel:
            slow = call(channel, "Slow", "unary_stream")(b"slow")  # the first call of its front end
            assert await slow.read() == b"slow"
            before = port.pids[0]
            os.kill(before or 0, signal.SIGKILL)
            await until(lambda: service.ended == ["slow begins to end"] and port.pids[0] != before)
        async with grpc.aio.insecure_channel(address, options=own) as channel:
            stream = call(channel, "Hang", "unary_stream")(b"next", wait_for_ready=True)  # the first one again
            assert await stream.read() == b"next"
            service.may_end.set()
            await until(lambda: service.ended[1:] == ["slow"])
            assert await call(channel, "Echo")(b"ab") == b"ba"
            stream.cancel()
            await until(lambda: service.ended[2:] == ["next"])


async def test_the_port_is_the_servers_own_and_is_free_after_its_end() -> None:
    async with running(2) as (port, _, address):
        pids = port.pids
        taken = FrontendPort(
            listeners.client_interceptor(max_concurrent_rpcs=1, write_timeout_s=1),
            1,
            FrontendSetup(options=(), write_timeout_s=1),
        )
        with pytest.raises(OSError, match=f"cannot listen on {address}"):
            taken.bind(address)
        await port.stop(0.0)
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", int(address.rpartition(":")[2])))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)


async def test_a_front_end_that_cannot_listen_is_an_error_at_the_start() -> None:
    interceptor = listeners.client_interceptor(max_concurrent_rpcs=1, write_timeout_s=1)
    files: Any = {"tls_cert": "/nonexistent/cert.pem", "tls_key": "/nonexistent/key.pem"}
    port = FrontendPort(interceptor, 1, FrontendSetup(options=(), write_timeout_s=1, **files))
    port.bind("127.0.0.1:0")
    with pytest.raises(OSError, match="front end 1 does not listen"):
        await port.start()
    await port.stop(0.0)


async def test_a_method_of_any_bytes_is_refused_and_the_front_end_goes_on() -> None:
    """A name that is not UTF-8 closed the front end's port, and its process went on without one."""
    channel: Any
    async with running() as (port, _, address), grpc.aio.insecure_channel(address) as channel:
        pids = port.pids
        assert await channel.unary_unary("/test.Service/Echo")(b"abc", timeout=TIMEOUT_S) == b"cba"
        for path in (b"/test.Service/\xff", b"\xff", b"/test.Service/echo"):
            response = await asyncio.wait_for(raw_call(address, path), TIMEOUT_S)
            assert response.is_ended and b"Method not found!" in response.headers, path
        assert await channel.unary_unary("/test.Service/Echo")(b"abc", timeout=TIMEOUT_S) == b"cba"
        assert port.pids == pids
