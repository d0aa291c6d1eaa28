"""StatusService and health."""

from __future__ import annotations

from grpc_health.v1 import health, health_pb2
from motet.v1 import status_pb2, status_pb2_grpc

from control_plane.api import adapters, generation
from control_plane.api.status import HealthReporter
from control_plane.fleet.settings import WorkerSnapshot
from tests.control_plane.api.fakes import Api

Status = health_pb2.HealthCheckResponse


async def test_status_carries_every_number_of_every_part(api: Api) -> None:
    api.registry.add("a")
    answer = await api.stub(status_pb2_grpc.StatusServiceStub).GetStatus(status_pb2.GetStatusRequest())
    assert [worker.worker_id for worker in answer.workers] == ["w0", "w1"]
    worker = answer.workers[0]
    names = list(WorkerSnapshot.__dataclass_fields__)
    assert sorted(names) == sorted(field.name for field in worker.DESCRIPTOR.fields)
    for number, name in enumerate(names):
        if name not in ("worker_id", "device"):
            assert getattr(worker, name) == number, name
    assert (answer.queues.num_requests, answer.queues.num_accepted, answer.queues.num_rejected) == (3, 9, 1)
    assert answer.adapters == status_pb2.AdapterStatus(
        num_registered=1,
        num_stored=1,
        num_host_cached=1,
        host_cache_bytes=10,
        host_cache_budget_bytes=100,
        host_cache_available=True,
    )
    assert answer.model.name == "tiny" and answer.model.max_model_len == 64
    assert answer.limits.max_chunk_bytes == 1 << 20
    (tenant,) = answer.tenants
    assert answer.num_other_tenants == 7
    assert tenant == status_pb2.TenantStatus(
        tenant="a",
        weight=2.5,
        num_requests=3,
        num_queued_tokens=4,
        max_queued_tokens=90,
        num_tokens_left=50,
        tokens_per_minute=600,
        num_accepted=6,
        num_rejected=7,
        num_input_tokens=8,
        num_generated_tokens=9,
    )
    assert not tenant.HasField("max_running_requests")


class RecordingHealth:
    def __init__(self) -> None:
        self.status: dict[str, object] = {}

    async def set(self, service: str, status: object) -> None:
        self.status[service] = status

    async def enter_graceful_shutdown(self) -> None:
        self.status = dict.fromkeys(self.status, Status.NOT_SERVING)


async def test_generation_is_serving_while_a_worker_is_attached() -> None:
    import asyncio

    sink, is_serving = RecordingHealth(), False
    reporter = HealthReporter(sink, lambda: is_serving)
    await reporter.start()
    assert sink.status == {
        "": Status.SERVING,
        adapters.SERVICE_NAME: Status.SERVING,
        generation.SERVICE_NAME: Status.NOT_SERVING,
    }
    is_serving = True
    reporter.on_workers_changed()
    await asyncio.gather(*reporter._tasks)
    assert sink.status[generation.SERVICE_NAME] == Status.SERVING
    await reporter.stop()
    assert set(sink.status.values()) == {Status.NOT_SERVING}


async def test_reporter_drives_the_real_servicer() -> None:
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
    reporter = HealthReporter(servicer, lambda: True)
    await reporter.start()
    await reporter.stop()
    answer = await servicer.Check(health_pb2.HealthCheckRequest(service=""), None)
    assert answer.status == Status.NOT_SERVING
