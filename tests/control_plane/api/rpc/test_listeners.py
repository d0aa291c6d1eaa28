"""The client port refuses what is too large or too many, and goes on serving."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from motet.v1 import generation_pb2, generation_pb2_grpc, types_pb2

from control_plane.api.health import HealthService
from control_plane.api.rpc import listeners
from control_plane.scheduler.types import FinishReason
from tests.control_plane.api.fakes import Api, job_event

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
GOOD = generation_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[5]))


async def code_of(api: Api, request: generation_pb2.GenerateRequest, **call: Any) -> grpc.StatusCode:
    try:
        async for _ in api.stub(generation_pb2_grpc.GenerationServiceStub).Generate(request, timeout=10, **call):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_large_message_or_metadata_is_refused_and_the_next_call_works(api: Api) -> None:
    api.fleet.on_submit = lambda job, _request: job.script(job_event([5], FinishReason.LENGTH))
    large = generation_pb2.GenerateRequest(text="x" * (listeners.CLIENT_MESSAGE_BYTES + 1))
    assert await code_of(api, large) == EXHAUSTED
    assert await code_of(api, GOOD, metadata=(("x", "y" * 20_000),)) == EXHAUSTED
    assert not api.fleet.requests
    assert await code_of(api, GOOD) == grpc.StatusCode.OK


async def test_rpcs_beyond_the_limit_are_refused_at_once() -> None:
    """A limit of two: the third of three concurrent calls is answered, not queued."""
    release, entered = asyncio.Event(), asyncio.Semaphore(0)

    async def wait(request: Any, context: Any) -> types_pb2.TokenIds:
        entered.release()
        await release.wait()
        return types_pb2.TokenIds()

    server = listeners.client_server(
        max_streams_per_connection=10, max_concurrent_rpcs=2, max_connections=100, write_timeout_s=30.0
    )
    handler = grpc.unary_unary_rpc_method_handler(wait, None, types_pb2.TokenIds.SerializeToString)
    server.add_registered_method_handlers("t.T", {"Wait": handler})
    address = listeners.bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        untyped: Any = channel
        running = [asyncio.ensure_future(untyped.unary_unary("/t.T/Wait")(b"")) for _ in range(2)]
        await entered.acquire()
        await entered.acquire()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await untyped.unary_unary("/t.T/Wait")(b"")
        assert caught.value.code() == EXHAUSTED
        release.set()
        assert await asyncio.gather(*running) == [b"", b""]
    await server.stop(None)


async def test_port_in_use_is_reported_plainly_and_once(api: Api, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = listeners.worker_server(), listeners.worker_server()
    address = listeners.bind(first, "127.0.0.1:0")
    await first.start()
    with pytest.raises(OSError, match=rf"cannot listen on {address}: Address already in use; give another address"):
        listeners.bind(second, address)
    assert capfd.readouterr().err == "", "gRPC has nothing to say about it"
    await first.stop(None)
    await second.stop(None)


@pytest.mark.parametrize(
    ("address", "reason"),
    [("192.0.2.1:0", "Cannot assign requested address"), ("no-such-host.invalid:1", "not known|resolution|No address")],
)
async def test_address_of_another_machine_is_reported_plainly(address: str, reason: str) -> None:
    server = listeners.worker_server()
    with pytest.raises(OSError, match=rf"cannot listen on {address}: .*({reason}).*; give another address"):
        listeners.bind(server, address)
    await server.stop(None)


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0"])
async def test_a_name_and_any_address_are_listened_on(host: str) -> None:
    server = listeners.worker_server()
    assert listeners.bind(server, f"{host}:0").startswith(f"{host}:")
    await server.stop(None)


async def test_calls_do_not_wait_for_every_method_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of grpc.aio did: 4,000 bad calls at once held up a status of another key for more than a second."""
    num_waits = 0
    wait = asyncio.wait

    def counting(tasks: Any, **settings: Any) -> Any:
        nonlocal num_waits
        num_waits += 1
        return wait(tasks, **settings)

    monkeypatch.setattr(asyncio, "wait", counting)
    server = listeners.client_server(
        max_streams_per_connection=100, max_connections=100, max_concurrent_rpcs=100, write_timeout_s=30.0
    )
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(), server)
    address = listeners.bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for _ in range(10):
            with pytest.raises(grpc.aio.AioRpcError, match="service: 'none' is not known"):  # what the handler responds
                await stub.Check(health_pb2.HealthCheckRequest(service="none"), timeout=60)
    assert num_waits == 1, "the loop waits once, for the server's end"
    await server.stop(None)
