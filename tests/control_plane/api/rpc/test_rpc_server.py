"""The server of every port goes on whatever the headers of a call say."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.longrunning import operations_pb2_grpc

from control_plane.api.rpc import listeners, rpc_server
from control_plane.api.rpc.rpc_server import RpcServer
from tests.fakes.raw_http2 import raw_call

ODD_PATHS = [
    b"/t.T/\xff\xfe",
    b"\xff",
    b"/t.T/Echo\xff",
    b"/t.T/Ec\x00ho",
    b"/t.T/Echo/",
    b"/t.T/echo",
    b"//",
    b"/" + b"a" * 5000,
    b"/t.T/\xed\xa0\x80",  # half of a surrogate pair
]
UNKNOWN = b"Method not found!"


def client_server() -> RpcServer:
    return listeners.client_server(
        max_streams_per_connection=10, max_concurrent_rpcs=10, max_connections=100, write_timeout_s=30.0
    )


async def echo(request: bytes, _context: Any) -> bytes:
    return request


async def open_with_echo(server: RpcServer) -> str:
    server.add_registered_method_handlers("t.T", {"Echo": grpc.unary_unary_rpc_method_handler(echo)})
    address = listeners.bind(server, "127.0.0.1:0")
    await server.start()
    return address


@pytest.fixture(params=[client_server, listeners.worker_server, listeners.scaler_server])
async def address(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    server = request.param()
    yield await open_with_echo(server)
    await server.stop(None)


async def test_a_method_of_any_bytes_is_refused_and_the_port_goes_on(address: str) -> None:
    """A name that is not UTF-8 closed the port for good, before any credential was read."""
    channel: Any
    async with grpc.aio.insecure_channel(address) as channel:
        for path in ODD_PATHS:
            response = await asyncio.wait_for(raw_call(address, path), 30)
            assert response.is_ended and UNKNOWN in response.headers, path
        assert await channel.unary_unary("/t.T/Echo")(b"still here", timeout=30) == b"still here"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t.T/Other")(b"", timeout=30)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_calls_that_run_are_untouched_by_a_refused_one() -> None:
    server = client_server()
    release = asyncio.Event()

    async def wait(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        yield b"begun"
        await release.wait()
        yield b"ended"

    server.add_registered_method_handlers("t.W", {"Wait": grpc.unary_stream_rpc_method_handler(wait)})
    address = await open_with_echo(server)
    channel: Any
    async with grpc.aio.insecure_channel(address) as channel:
        stream = channel.unary_stream("/t.W/Wait")(b"")
        assert await stream.read() == b"begun"
        await asyncio.wait_for(raw_call(address, b"/\xff"), 30)
        release.set()
        assert await stream.read() == b"ended"
    await server.stop(None)


async def test_calls_end_within_the_grace_of_a_stop_and_later_ones_are_refused() -> None:
    server = client_server()
    release, entered = asyncio.Event(), asyncio.Event()

    async def wait(_request: bytes, _context: Any) -> bytes:
        entered.set()
        await release.wait()
        return b"ended"

    server.add_registered_method_handlers("t.W", {"Wait": grpc.unary_unary_rpc_method_handler(wait)})
    address = await open_with_echo(server)
    channel: Any
    async with grpc.aio.insecure_channel(address) as channel:
        running = asyncio.ensure_future(channel.unary_unary("/t.W/Wait")(b"", timeout=30))
        await entered.wait()
        stopping = asyncio.ensure_future(server.stop(30.0))
        await asyncio.sleep(0)
        release.set()
        assert await running == b"ended"
        await asyncio.wait_for(stopping, 30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t.T/Echo")(b"", timeout=30)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    await server.stop(None)  # repeating it changes nothing


async def test_an_unknown_version_of_grpc_is_logged_and_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(client_server(), RpcServer), "the version of constraints.txt is known"
    monkeypatch.setattr(rpc_server, "has_needed_names", lambda: False)
    with caplog.at_level(logging.ERROR):
        server = client_server()
    assert "may close the port" in caplog.text and grpc.__version__ in caplog.text
    channel: Any
    async with grpc.aio.insecure_channel(await open_with_echo(server)) as channel:
        assert await channel.unary_unary("/t.T/Echo")(b"x", timeout=30) == b"x"
    await server.stop(None)


async def test_a_stub_that_registers_nothing_is_served() -> None:
    """As that of google.longrunning: it gives the server a generic handler only."""
    server = client_server()
    add: Any = operations_pb2_grpc.add_OperationsServicer_to_server
    add(operations_pb2_grpc.OperationsServicer(), server)
    channel: Any
    async with grpc.aio.insecure_channel(await open_with_echo(server)) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="correlation id"):  # of the stub's own NotImplementedError
            await channel.unary_unary("/google.longrunning.Operations/GetOperation")(b"", timeout=30)
    await server.stop(None)
