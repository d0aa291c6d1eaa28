"""Clients that hold every place of the client port, and what the others still get."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from motet.v1 import status_pb2, status_pb2_grpc, types_pb2

from control_plane.access.authenticator import Authenticator, Presented
from control_plane.access.methods import REQUIREMENTS, Anyone, is_open
from control_plane.access.principal import ANYBODY, STRANGER, Principal, Role
from control_plane.api.health import HealthService
from control_plane.api.rpc import listeners
from control_plane.api.rpc.callers import Callers
from control_plane.api.rpc.interceptor import TIMEOUT_SPREAD, Identify
from control_plane.api.rpc.rpc_limits import MAX_ARRIVING, MAX_HEALTH_WATCHES, MAX_STRANGERS_WATCHES, RpcLimits
from control_plane.api.rpc.shared_limit import RETRY_SPREAD, SharedLimit
from control_plane.caller import Caller
from control_plane.errors import Exhausted
from tests.control_plane.api.fakes import details

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
Open = Callable[[], grpc.aio.Channel]


class Arrivals:
    """Identifies callers, and counts calls that were taken up."""

    def __init__(self, identify: Identify) -> None:
        self.arrived = asyncio.Semaphore(0)
        self._identify = identify

    def __call__(self, method: str, context: Any) -> Caller:
        self.arrived.release()
        return self._identify(method, context)


class Port:
    """A client port with a method that waits, status and health. `open` makes a connection of its own."""

    def __init__(self, **settings: Any) -> None:
        self.entered = asyncio.Semaphore(0)
        self.release = asyncio.Event()
        settings = {"max_concurrent_rpcs": 10, "max_connections": 100, "write_timeout_s": 30.0, **settings}
        self.arrivals = Arrivals(settings.pop("identify", None) or Callers())
        self.server = listeners.client_server(max_streams_per_connection=5000, identify=self.arrivals, **settings)
        self.health = HealthService()
        self.health.set("", is_serving=True)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        wait = grpc.unary_unary_rpc_method_handler(self._wait, types_pb2.TokenIds.FromString)
        status = grpc.unary_unary_rpc_method_handler(self._status, None, status_pb2.GetStatusResponse.SerializeToString)
        self.server.add_registered_method_handlers("t.T", {"Wait": wait})
        self.server.add_registered_method_handlers("motet.v1.StatusService", {"GetStatus": status})
        self.address = listeners.bind(self.server, "127.0.0.1:0")
        self.stack = contextlib.AsyncExitStack()

    async def _wait(self, _request: Any, _context: Any) -> bytes:
        self.entered.release()
        await self.release.wait()
        return b"done"

    async def _status(self, _request: Any, _context: Any) -> status_pb2.GetStatusResponse:
        return status_pb2.GetStatusResponse(server_version="1")

    async def open(self) -> Any:
        options = [("grpc.use_local_subchannel_pool", 1)]
        return await self.stack.enter_async_context(grpc.aio.insecure_channel(self.address, options=options))

    async def __aenter__(self) -> Port:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()
        await self.server.stop(None)


async def silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def idle_call(channel: Any, method: str = "/t.T/Wait") -> Any:
    """An RPC whose headers arrive, and whose message never does."""
    return channel.stream_unary(method)(silence())


async def ended(call: Any) -> grpc.aio.AioRpcError:
    """How a call ended that the server ended."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def status_of(channel: Any, metadata: list[tuple[str, str]] | None = None) -> str:
    stub: Any = status_pb2_grpc.StatusServiceStub(channel)
    response = await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=30, metadata=metadata)
    return str(response.server_version)


async def test_call_without_a_message_ends_after_a_while_and_gives_its_place_back() -> None:
    async with Port(max_concurrent_rpcs=1, request_timeout_s=0.5) as port:
        channel = await port.open()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(idle_call(channel), 30)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not arrive within 0.5 s" in str(caught.value.details())
        port.release.set()
        assert await channel.unary_unary("/t.T/Wait")(b"", timeout=30) == b"done"


async def test_idle_calls_that_began_together_do_not_end_together() -> None:
    class Drawn(random.Random):
        def uniform(self, a: float, b: float) -> float:
            assert (a, b) == (1, TIMEOUT_SPREAD)
            return next(factors)

    factors = iter((1e9, 1e-9, 1e9))
    async with Port(max_concurrent_rpcs=9, request_timeout_s=1.0, rng=Drawn()) as port:
        channel = await port.open()
        calls = [idle_call(channel) for _ in range(3)]
        done, waiting = await asyncio.wait(
            [asyncio.ensure_future(ended(call)) for call in calls], timeout=30, return_when=asyncio.FIRST_COMPLETED
        )
        assert len(done) == 1 and len(waiting) == 2
        for call in calls:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def test_callers_who_are_refused_together_are_given_times_of_their_own() -> None:
    limit = SharedLimit(1, "things", retry_after_s=10.0)
    times_s = []
    with limit.place(("a",)):
        for _ in range(100):
            with pytest.raises(Exhausted) as caught, limit.place(("a",)):
                pass
            times_s.append(caught.value.retry_after_s)
    assert len(set(times_s)) == 100
    assert 10.0 <= min(times_s) < 10.5 and 14.5 < max(times_s) <= 10.0 * RETRY_SPREAD


async def test_call_that_ends_without_a_message_is_refused() -> None:
    async with Port() as port:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (await port.open()).stream_unary("/t.T/Wait")(iter(()), timeout=30)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert details(caught.value)[1] == ["request"]


async def test_full_port_refuses_its_hog_with_a_time_and_serves_everybody_else() -> None:
    async with Port(max_concurrent_rpcs=10) as port:
        hog, other = await port.open(), await port.open()
        held = [idle_call(hog) for _ in range(8)] + [hog.unary_unary("/t.T/Wait")(b"") for _ in range(2)]
        async with asyncio.timeout(30):
            for _ in range(2):
                await port.entered.acquire()
            for _ in held:  # calls of one connection may arrive in another order
                await port.arrivals.arrived.acquire()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hog.unary_unary("/t.T/Wait")(b"", timeout=30)
        assert caught.value.code() == EXHAUSTED
        assert "at most 10 requests at once" in str(caught.value.details())
        [retry] = details(caught.value)[2]
        assert retry.retry_delay.seconds == 1, "1 to 1.5 s"
        assert await status_of(hog) == await status_of(other) == "1"
        health: Any = health_pb2_grpc.HealthStub(hog)
        response = await health.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        mine = other.unary_unary("/t.T/Wait")(b"")
        async with asyncio.timeout(30):
            await port.entered.acquire()
        port.release.set()
        assert await mine == b"done"
        for call in held:
            call.cancel()


class Keys:
    """A method of authentication: a token is the name of its tenant."""

    def principal(self, presented: Presented) -> Principal | None:
        if not presented.token:
            return None
        return Principal(f"key:{presented.token}", frozenset(Role), (presented.token,))


def as_tenant(name: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {name}")]


# The test's own method needs no role.
@pytest.fixture
def identify(monkeypatch: pytest.MonkeyPatch) -> Callers:
    monkeypatch.setitem(dict_of(REQUIREMENTS), "/t.T/Wait", Anyone.KNOWN)
    return Callers(Authenticator([Keys()]))


def dict_of(mapping: Any) -> dict[str, Any]:
    assert isinstance(mapping, dict)
    return mapping


async def test_idle_tenant_holds_every_place_and_the_other_one_gets_its_part(identify: Callers) -> None:
    """Both from one host: 41 connections of one tenant count no more than the one of the other."""
    async with Port(max_concurrent_rpcs=400, identify=identify) as port:
        channels = [await port.open() for _ in range(41)]
        calls = [
            channel.stream_unary("/t.T/Wait")(silence(), metadata=as_tenant("hog"))
            for channel in channels
            for _ in range(10)
        ]
        held = [asyncio.create_task(ended(call)) for call in calls]
        refused, _ = await asyncio.wait(held, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert refused
        for task in refused:
            assert task.result().code() == EXHAUSTED
            assert details(task.result())[2][0].retry_delay.seconds == 1
        quiet = await port.open()
        mine = [quiet.unary_unary("/t.T/Wait")(b"", metadata=as_tenant("quiet")) for _ in range(200)]
        async with asyncio.timeout(30):
            for _ in mine:
                await port.entered.acquire()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await quiet.unary_unary("/t.T/Wait")(b"", timeout=30, metadata=as_tenant("quiet"))
        assert caught.value.code() == EXHAUSTED, "half of the limit is its part"
        assert await status_of(quiet, as_tenant("quiet")) == "1"
        port.release.set()
        assert await asyncio.gather(*mine) == [b"done"] * 200
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_slow_requests_of_one_tenant_take_turns_and_hold_up_nobody_else(identify: Callers) -> None:
    async with Port(max_concurrent_rpcs=4096, max_connections=100, identify=identify) as port:
        slow, quick = await port.open(), await port.open()
        port.release.set()
        idle = [slow.stream_unary("/t.T/Wait")(silence(), metadata=as_tenant("slow")) for _ in range(MAX_ARRIVING + 10)]
        assert await status_of(slow, as_tenant("slow")) == "1", "behind them, on their connection"
        burst = [quick.unary_unary("/t.T/Wait")(b"", timeout=30, metadata=as_tenant("quick")) for _ in range(300)]
        assert await asyncio.gather(*burst) == [b"done"] * 300
        mine = slow.unary_unary("/t.T/Wait")(b"", metadata=as_tenant("slow"))
        assert await status_of(slow, as_tenant("slow")) == "1"
        assert not mine.done()
        for call in idle[:11]:
            call.cancel()
        assert await asyncio.wait_for(mine, 30) == b"done"
        for call in idle:
            call.cancel()


async def test_large_requests_are_bounded_by_their_bytes(identify: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.api.rpc.rpc_limits.MAX_REQUESTS_BYTES", 4 * 2**16)
    large = types_pb2.TokenIds(ids=range(2**14)).SerializeToString()
    assert 2**14 < len(large) <= 2**16
    async with Port(max_concurrent_rpcs=100, identify=identify) as port:
        hog, other = await port.open(), await port.open()
        held = [hog.unary_unary("/t.T/Wait")(large, metadata=as_tenant("hog")) for _ in range(4 * 2**16 // len(large))]
        async with asyncio.timeout(30):
            for _ in held:
                await port.entered.acquire()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hog.unary_unary("/t.T/Wait")(large, timeout=30, metadata=as_tenant("hog"))
        assert caught.value.code() == EXHAUSTED and details(caught.value)[2]
        assert "at most 262144 bytes of requests at once" in str(caught.value.details())
        small = hog.unary_unary("/t.T/Wait")(b"", metadata=as_tenant("hog"))
        theirs = other.unary_unary("/t.T/Wait")(large, metadata=as_tenant("other"))
        async with asyncio.timeout(30):
            for _ in range(2):
                await port.entered.acquire()
        port.release.set()
        assert await asyncio.gather(small, theirs, *held) == [b"done"] * (2 + len(held))


async def test_call_without_a_credential_is_refused_before_its_message_and_holds_nothing(identify: Callers) -> None:
    async with Port(max_concurrent_rpcs=1, request_timeout_s=3600.0, identify=identify) as port:
        channel = await port.open()
        for _ in range(50):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(idle_call(channel), 30)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        port.release.set()
        assert await channel.unary_unary("/t.T/Wait")(b"", timeout=30, metadata=as_tenant("quiet")) == b"done"


async def test_watches_of_strangers_shut_out_neither_their_probes_nor_watches_of_tenants(identify: Callers) -> None:
    async with Port(identify=identify) as port:
        strangers, tenant = await port.open(), await port.open()
        health: Any = health_pb2_grpc.HealthStub(strangers)
        watches = [aiter(health.Watch(health_pb2.HealthCheckRequest())) for _ in range(MAX_STRANGERS_WATCHES)]
        for watch in watches:
            await asyncio.wait_for(anext(watch), 30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(health.Watch(health_pb2.HealthCheckRequest(), timeout=30)))
        assert caught.value.code() == EXHAUSTED and details(caught.value)[2][0].retry_delay.seconds in range(10, 15)
        response = await health.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        known: Any = health_pb2_grpc.HealthStub(tenant)
        watch = aiter(known.Watch(health_pb2.HealthCheckRequest(), metadata=as_tenant("quiet")))
        assert (await asyncio.wait_for(anext(watch), 30)).status == health_pb2.HealthCheckResponse.SERVING


async def test_watches_take_no_place_from_requests_and_are_limited_themselves() -> None:
    async with Port(max_concurrent_rpcs=1) as port:
        channel = await port.open()
        health: Any = health_pb2_grpc.HealthStub(channel)
        watches = [aiter(health.Watch(health_pb2.HealthCheckRequest())) for _ in range(MAX_HEALTH_WATCHES)]
        for watch in watches:
            assert (await asyncio.wait_for(anext(watch), 30)).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(health.Watch(health_pb2.HealthCheckRequest(), timeout=30)))
        assert caught.value.code() == EXHAUSTED
        [retry] = details(caught.value)[2]
        assert retry.retry_delay.seconds in range(10, 15)
        port.release.set()
        assert await channel.unary_unary("/t.T/Wait")(b"", timeout=30) == b"done"
        assert await status_of(channel) == "1"


async def test_no_rpc_of_a_burst_is_cancelled() -> None:
    async with Port() as port:
        channel = await port.open()
        health: Any = health_pb2_grpc.HealthStub(channel)
        checks = [health.Check(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(4000)]
        codes = await asyncio.gather(*(check.code() for check in checks))
        assert grpc.StatusCode.OK in codes and set(codes) <= {grpc.StatusCode.OK, EXHAUSTED}


def test_what_lasts_as_long_as_the_client_likes_has_a_limit_of_its_own() -> None:
    limits = RpcLimits(10)
    work = limits.of("/motet.v1.GenerationService/Generate", ANYBODY)
    own = [
        limits.of(method, ANYBODY)
        for method in (
            "/grpc.health.v1.Health/Watch",
            "/google.longrunning.Operations/WaitOperation",
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            "/motet.v1.StatusService/GetStatus",
        )
    ]
    assert len({id(limit) for limit in [work, *own]}) == 5
    status = limits.of("/motet.v1.StatusService/GetStatus", ANYBODY)
    assert all(limits.of(f"/grpc.health.v1.Health/{probe}", ANYBODY) is status for probe in ("Check", "List"))
    assert limits.of("/motet.v1.AdapterService/UploadAdapter", ANYBODY) is work


@pytest.mark.parametrize("method", [method for method in REQUIREMENTS if is_open(method)])
def test_strangers_take_no_place_from_callers_that_the_server_knows(method: str) -> None:
    """Whatever a stranger may call counts against limits that no authenticated call counts against."""
    limits, known = RpcLimits(10), Principal("key:k", frozenset({Role.INFER}), ("a",))
    of_strangers = limits.of(method, STRANGER)
    assert all(limits.of(other, known) is not of_strangers for other in REQUIREMENTS)
    with contextlib.ExitStack() as held:
        for number in range(2000):  # from as many hosts as they like
            with contextlib.suppress(Exhausted):
                held.enter_context(of_strangers.place((f"ipv6:2001:db8:{number:x}::/64", str(number))))
        assert of_strangers.num_held <= 128
        held.enter_context(limits.of(method, known).place(("a", "key:k", "ipv4:10.0.0.1:1")))


async def open_connection(address: str) -> socket.socket:
    """A connection that speaks HTTP/2 and sends nothing further, once the server has answered it."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    connection = socket.socket()
    connection.setblocking(False)
    await loop.sock_connect(connection, (host, int(port)))
    await loop.sock_sendall(connection, HTTP2_PREFACE)
    assert await asyncio.wait_for(loop.sock_recv(connection, 4096), 30)
    return connection


async def test_connections_beyond_the_limit_are_closed_and_the_others_go_on() -> None:
    async with Port(max_connections=3) as port:
        port.release.set()
        first = await port.open()
        assert await first.unary_unary("/t.T/Wait")(b"", timeout=30) == b"done"
        with contextlib.ExitStack() as held:
            for _ in range(2):
                held.callback((await open_connection(port.address)).close)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (await port.open()).unary_unary("/t.T/Wait")(b"", timeout=5)
            assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            assert await first.unary_unary("/t.T/Wait")(b"", timeout=30) == b"done"
        later = await port.open()
        assert await later.unary_unary("/t.T/Wait")(b"", timeout=30, wait_for_ready=True) == b"done"


async def silent_connection(address: str) -> socket.socket:
    """A connection that sends nothing at all."""
    host, _, port = address.rpartition(":")
    connection = socket.socket()
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    return connection


async def closed(connection: socket.socket) -> None:
    """Returns once the server has closed it."""
    with contextlib.closing(connection), contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(30):
            while await asyncio.get_running_loop().sock_recv(connection, 4096):
                pass


async def test_silent_connections_count_as_connections_until_the_handshake_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever holds them all keeps new clients out for that long; docs/security.md says so."""
    monkeypatch.setattr(listeners, "HANDSHAKE_TIMEOUT_MS", 2000)
    async with Port(max_connections=3) as port:
        port.release.set()
        silent = [await silent_connection(port.address) for _ in range(3)]
        await asyncio.gather(*map(closed, silent))
        later = await port.open()
        assert await later.unary_unary("/t.T/Wait")(b"", timeout=30, wait_for_ready=True) == b"done"


async def test_connection_without_calls_is_closed_and_one_with_a_long_stream_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listeners, "CONNECTION_IDLE_MS", 200)
    async with Port() as port:
        busy = await port.open()
        running = busy.unary_unary("/t.T/Wait")(b"")
        async with asyncio.timeout(30):
            await port.entered.acquire()
        idle = await open_connection(port.address)
        with contextlib.closing(idle), contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(30):
                while await asyncio.get_running_loop().sock_recv(idle, 4096):
                    pass
        port.release.set()
        assert await running == b"done"
