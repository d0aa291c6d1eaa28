"""grpc.health.v1: what it reports, and that no watcher holds up a change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.api.admin import adapters
from control_plane.api.generation import service as generation
from control_plane.api.health import HealthReporter, HealthService
from control_plane.api.rpc import listeners

Status = health_pb2.HealthCheckResponse
Request = health_pb2.HealthCheckRequest


async def test_generation_is_serving_while_a_worker_is_attached() -> None:
    service, is_serving = HealthService(), False
    reporter = HealthReporter(service, lambda: is_serving)
    reporter.start()

    async def status_by_service() -> dict[str, int]:
        listed = await service.List(health_pb2.HealthListRequest(), None)  # type: ignore[arg-type]
        assert {name: status.status for name, status in listed.statuses.items()} == await checked()
        return await checked()

    async def checked() -> dict[str, int]:
        names = ("", adapters.SERVICE_NAME, generation.SERVICE_NAME)
        return {name: (await service.Check(Request(service=name), None)).status for name in names}  # type: ignore[arg-type]

    assert list((await status_by_service()).values()) == [Status.SERVING, Status.SERVING, Status.NOT_SERVING]
    is_serving = True
    reporter.on_workers_changed()
    assert set((await status_by_service()).values()) == {Status.SERVING}
    reporter.stop()
    reporter.on_workers_changed()
    assert set((await status_by_service()).values()) == {Status.NOT_SERVING}


@pytest.fixture
async def served() -> AsyncIterator[tuple[HealthService, grpc.aio.Channel]]:
    service = HealthService()
    service.set("a", is_serving=True)
    server = listeners.worker_server()
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    address = listeners.bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield service, channel
    await server.stop(None)


async def test_watcher_gets_every_change_and_an_unknown_service_is_not_found(
    served: tuple[HealthService, grpc.aio.Channel],
) -> None:
    service, channel = served
    stub: Any = health_pb2_grpc.HealthStub(channel)
    changes = aiter(stub.Watch(Request(service="a"), timeout=30))
    assert (await anext(changes)).status == Status.SERVING
    service.set("a", is_serving=True)  # no change
    service.set("a", is_serving=False)
    assert (await anext(changes)).status == Status.NOT_SERVING
    later = aiter(stub.Watch(Request(service="b"), timeout=30))
    assert (await anext(later)).status == Status.SERVICE_UNKNOWN
    service.set("b", is_serving=True)
    assert (await anext(later)).status == Status.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(Request(service="c"), timeout=30)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert "service: 'c' is not known; use motet.v1.AdapterService" in str(caught.value.details())


async def test_watcher_that_does_not_read_holds_up_nobody() -> None:
    """A generator whose next value nobody takes stands for a response that the client leaves unread."""
    service = HealthService()
    service.set("a", is_serving=True)
    slow = service.Watch(Request(service="a"), None)  # type: ignore[arg-type]
    quick = service.Watch(Request(service="a"), None)  # type: ignore[arg-type]
    assert (await anext(slow)).status == (await anext(quick)).status == Status.SERVING
    for is_serving in (False, True, False):
        service.set("a", is_serving=is_serving)
        async with asyncio.timeout(30):
            assert (await anext(quick)).status == (Status.SERVING if is_serving else Status.NOT_SERVING)
    async with asyncio.timeout(30):
        assert (await anext(slow)).status == Status.NOT_SERVING, "only what is still true"
    await slow.aclose()  # type: ignore[attr-defined]  # a generator
    await quick.aclose()  # type: ignore[attr-defined]
