"""Whatever a handler of any kind does, the client gets a defined status and no inner detail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from motet.v1 import types_pb2

from control_plane import errors
from control_plane.api.rpc import listeners
from control_plane.api.rpc.error_status import MAX_MESSAGE_BYTES
from control_plane.api.rpc.interceptor import RpcInterceptor
from control_plane.api.rpc.rpc_limits import RpcLimits
from control_plane.api.rpc.rpc_server import rpc_server
from tests.control_plane.api.fakes import details
from tests.fakes.fleet_rig import FakeClock

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
GOOD = types_pb2.TokenIds(ids=[1, 2]).SerializeToString()


class Handlers:
    """One method of each kind; all do `action`, then respond."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.entered = asyncio.Event()
        self.closed = asyncio.Event()
        self.waits = False
        self.floods = False  # the streamed response has no end
        self.task: asyncio.Task[Any] | None = None  # of the streamed response

    async def _act(self) -> None:
        self.entered.set()
        try:
            if self.waits:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
        finally:
            self.closed.set()

    async def unary_unary(self, request: Any, context: Any) -> types_pb2.TokenIds:
        await self._act()
        return types_pb2.TokenIds(ids=request.ids)

    async def unary_stream(self, request: Any, context: Any) -> AsyncIterator[types_pb2.TokenIds]:
        self.task = asyncio.current_task()
        yield types_pb2.TokenIds(ids=request.ids)
        while self.floods:
            yield types_pb2.TokenIds(ids=[0] * 100_000)
        await self._act()

    async def stream_unary(self, requests: AsyncIterator[Any], context: Any) -> types_pb2.TokenIds:
        ids = [token async for request in requests for token in request.ids]
        await self._act()
        return types_pb2.TokenIds(ids=ids)

    async def stream_stream(self, requests: Any, context: Any) -> None:
        request = await context.read()
        await context.write(types_pb2.TokenIds(ids=request.ids))
        await self._act()


@pytest.fixture
async def served() -> AsyncIterator[tuple[Handlers, grpc.aio.Channel]]:
    handlers = Handlers()
    server = listeners.client_server(
        max_streams_per_connection=10, max_concurrent_rpcs=10, max_connections=100, write_timeout_s=1.0
    )
    methods = {
        kind: getattr(grpc, f"{kind}_rpc_method_handler")(
            getattr(handlers, kind), types_pb2.TokenIds.FromString, types_pb2.TokenIds.SerializeToString
        )
        for kind in KINDS
    }
    server.add_registered_method_handlers("t.T", methods)
    address = listeners.bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield handlers, channel
    await server.stop(None)


async def call(channel: grpc.aio.Channel, kind: str, raw: bytes = GOOD) -> list[bytes]:
    method = getattr(channel, kind)(f"/t.T/{kind}")
    response = method(iter([raw]) if kind.startswith("stream") else raw, timeout=60)
    return [await response] if kind.endswith("unary") else [message async for message in response]


@pytest.mark.parametrize("kind", KINDS)
async def test_good_call_passes(served: tuple[Handlers, grpc.aio.Channel], kind: str) -> None:
    assert await call(served[1], kind) == [GOOD]


def every_error() -> list[errors.MotetError]:
    def subclasses(cls: type[errors.MotetError]) -> list[type[errors.MotetError]]:
        return [cls, *(found for sub in cls.__subclasses__() for found in subclasses(sub))]

    made: list[errors.MotetError] = []
    for cls in subclasses(errors.MotetError):
        if issubclass(cls, errors.InvalidRequest):
            made.append(cls(errors.FieldViolation("some.field", "7; at most 5")))
        elif issubclass(cls, errors.AdapterNotFound):
            made.append(cls("no adapter x", resource="adapters/x"))
        elif issubclass(cls, errors.QuotaExceeded):
            made.append(cls("no tokens left", tenant="a", quota="tokens_per_minute", limit=60, retry_after_s=2.0))
        elif cls is not errors.MotetError:
            made.append(cls("what is wrong and what to do"))
    return made


@pytest.mark.parametrize("kind", KINDS)
async def test_every_error_of_the_table_arrives_with_its_details(
    served: tuple[Handlers, grpc.aio.Channel], kind: str
) -> None:
    handlers, channel = served
    assert len(every_error()) >= 20
    for error in every_error():
        handlers.error = error
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind)
        assert caught.value.code() == errors.status_of(error)
        assert caught.value.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
        assert caught.value.details() == str(error)
        info, fields, others = details(caught.value)
        assert info.reason == error.reason
        assert fields == (["some.field"] if isinstance(error, errors.InvalidRequest) else [])
        has_retry = isinstance(error, (errors.Exhausted, errors.Unavailable))
        num_others = has_retry + isinstance(error, errors.AdapterNotFound) + isinstance(error, errors.QuotaExceeded)
        assert len(others) == num_others
        if isinstance(error, errors.QuotaExceeded):
            assert {name: info.metadata[name] for name in ("tenant", "quota", "limit")} == {
                "tenant": "a",
                "quota": "tokens_per_minute",
                "limit": "60",
            }
            assert others[0].violations[0].subject == "tenants/a"
            assert others[0].violations[0].description == "tokens_per_minute: limit 60; no tokens left"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "error", [ValueError("/root/secret"), errors.MotetError("/root/secret"), KeyError("x"), asyncio.CancelledError()]
)
async def test_anything_else_is_internal_without_a_word_of_it(
    served: tuple[Handlers, grpc.aio.Channel], kind: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """A CancelledError that is not a cancellation of the RPC would otherwise leave the client waiting for ever."""
    handlers, channel = served
    handlers.error = error
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, kind)
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    message = caught.value.details() or ""
    assert "secret" not in message and "Error" not in message
    correlation_id = details(caught.value)[0].metadata["correlation_id"]
    assert correlation_id in message and correlation_id in caplog.text


@pytest.mark.parametrize("kind", KINDS)
async def test_malformed_protobuf_is_invalid_argument(served: tuple[Handlers, grpc.aio.Channel], kind: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(served[1], kind, b"\x0a\xff\xff\xff\xff\x0f")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert details(caught.value)[1] == ["request"]


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_cancel_of_the_client_runs_the_handlers_finally(
    served: tuple[Handlers, grpc.aio.Channel], kind: str
) -> None:
    handlers, channel = served
    handlers.waits = True
    pending = getattr(channel, kind)(f"/t.T/{kind}")(GOOD)
    reader = asyncio.ensure_future(pending if kind == "unary_unary" else _read_all(pending))
    await handlers.entered.wait()
    pending.cancel()
    await asyncio.wait_for(handlers.closed.wait(), 60)
    with pytest.raises(asyncio.CancelledError):
        await reader


async def _read_all(pending: Any) -> None:
    async for _ in pending:
        pass


async def test_long_error_stays_within_the_trailers(served: tuple[Handlers, grpc.aio.Channel]) -> None:
    handlers, channel = served
    handlers.error = errors.InvalidRequest(*(errors.FieldViolation("é" * 500, "ü" * 500) for _ in range(50)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, "unary_unary")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert MAX_MESSAGE_BYTES - 3 <= len((caught.value.details() or "").encode()) <= MAX_MESSAGE_BYTES
    assert details(caught.value)[1]


async def test_unknown_method_is_unimplemented(served: tuple[Handlers, grpc.aio.Channel]) -> None:
    channel: Any = served[1]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/t.T/none")(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_client_that_does_not_read_holds_no_handler(served: tuple[Handlers, grpc.aio.Channel]) -> None:
    handlers, channel = served
    handlers.floods = True
    raw: Any = channel  # the stubs demand serializers
    stream = raw.unary_stream("/t.T/unary_stream")(GOOD)
    assert await stream.read() == GOOD
    assert handlers.task is not None
    await asyncio.wait([handlers.task], timeout=10)
    assert handlers.task.done()
    # What was sent can still be read, and then why it ended.
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await stream.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            pass
        raise AssertionError("the stream ended well")
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(caught.value)[0].reason == "SLOW_CONSUMER"
    assert await call(channel, "unary_unary") == [GOOD]


async def test_time_in_which_the_process_was_stopped_is_not_held_against_a_reader() -> None:
    """The interceptor's clock says that nothing but an absence passed, however long the client does not read."""
    clock = FakeClock()
    handlers = Handlers()
    handlers.floods = True
    looks = asyncio.Semaphore(0)

    def stopped_between_readings() -> float:
        clock.advance(60.0)
        looks.release()
        return clock()

    interceptor = RpcInterceptor(RpcLimits(10), write_timeout_s=0.02, clock=stopped_between_readings)
    server = rpc_server(interceptors=[interceptor])
    method = grpc.unary_stream_rpc_method_handler(
        handlers.unary_stream, types_pb2.TokenIds.FromString, types_pb2.TokenIds.SerializeToString
    )
    server.add_registered_method_handlers("t.T", {"unary_stream": method})
    address = listeners.bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        raw: Any = channel
        stream = raw.unary_stream("/t.T/unary_stream")(GOOD)
        for _ in range(250):  # of some 40 writes that pass, then of the one that does not
            await asyncio.wait_for(looks.acquire(), 60)
        for _ in range(200):  # more than lies in buffers
            await asyncio.wait_for(stream.read(), 60)
        stream.cancel()
    await server.stop(None)


class GoneContext:
    """Of an RPC whose connection is gone: gRPC notes the status, and cannot send it."""

    def __init__(self) -> None:
        self.is_ended = False

    def peer(self) -> str:
        return "ipv4:10.0.0.7:5001"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def done(self) -> bool:
        return self.is_ended

    async def abort(self, code: grpc.StatusCode, message: str, metadata: Any = ()) -> None:
        assert not self.is_ended, "grpc refuses a second status"
        self.is_ended = True
        raise grpc.aio.InternalError("Failed execute_batch")


@pytest.mark.parametrize("error", [None, errors.DeadlineExceeded("the request's deadline passed")])
async def test_a_status_that_cannot_be_sent_is_no_error_of_ours(
    error: errors.MotetError | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker or client whose connection breaks while its RPC ends."""

    async def handler(requests: Any, context: Any) -> None:
        if error is not None:
            raise error
        await context.abort(grpc.StatusCode.UNAVAILABLE, "its own words")

    async def continuation(_details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(handler)

    call_details: Any = SimpleNamespace(method="/t.T/stream_stream")
    bounded: Any = await RpcInterceptor(RpcLimits(10)).intercept_service(continuation, call_details)
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        await bounded.stream_stream(None, GoneContext())
    assert caplog.records == []
