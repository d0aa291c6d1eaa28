"""StatusService."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import motet
from motet.v1 import status_pb2, status_pb2_grpc
from motet.v1.status import WorkerStatus

from control_plane.access.principal import Principal, Role, of_roles
from control_plane.api.text.codec import TextCodec
from control_plane.caller import Caller, acting_as
from control_plane.registry.model.served_modules import WorkerReport
from tests.control_plane.api.fake_adapters import DIGEST
from tests.control_plane.api.fakes import Api

NO_CONTEXT: Any = None  # the service uses none


async def test_status_carries_every_number_of_every_part(api: Api) -> None:
    api.registry.add("a")
    response = await api.stub(status_pb2_grpc.StatusServiceStub).GetStatus(status_pb2.GetStatusRequest())
    assert [worker.worker_id for worker in response.workers] == ["w0", "w1"]
    worker = response.workers[0]
    names = list(WorkerStatus.__dataclass_fields__)
    assert sorted(names) == sorted(field.name for field in worker.DESCRIPTOR.fields)
    for number, name in enumerate(names):
        if name not in ("worker_id", "device"):
            assert getattr(worker, name) == number, name
    assert (response.queues.num_requests, response.queues.num_accepted, response.queues.num_rejected) == (3, 9, 1)
    assert response.adapters == status_pb2.AdapterStatus(
        num_registered=1,
        num_stored=1,
        num_host_cached=1,
        host_cache_bytes=10,
        host_cache_budget_bytes=100,
        host_cache_available=True,
    )
    assert response.server_version == motet.__version__
    assert response.drained_worker_ids == ["w1", "w7"]
    assert list(response.active_adapters) == [
        status_pb2.ActiveAdapterStatus(num_running=3, num_waiting=1),
        status_pb2.ActiveAdapterStatus(adapter="a", digest=DIGEST, num_running=1),
    ]
    assert response.num_other_active_adapters == 5
    api.weights.error = "Redis refuses: no"
    response = await api.stub(status_pb2_grpc.StatusServiceStub).GetStatus(status_pb2.GetStatusRequest())
    assert (response.adapters.host_cache_available, response.adapters.host_cache_error) == (False, "Redis refuses: no")
    assert response.model.name == "tiny" and response.model.max_model_len == 64
    assert response.limits.max_chunk_bytes == 1 << 20
    (tenant,) = response.tenants
    assert response.num_other_tenants == 7
    assert tenant == status_pb2.TenantStatus(
        tenant="a",
        weight=2.5,
        num_requests=3,
        num_queued_tokens=4,
        max_queued_tokens=90,
        num_tokens_left=50,
        tokens_per_minute=600,
        num_requests_left=10,
        requests_per_minute=30,
        num_accepted=6,
        num_rejected=7,
        num_input_tokens=8,
        num_generated_tokens=9,
    )
    assert not tenant.HasField("max_running_requests")


async def test_status_has_the_context_that_workers_compute(api: Api) -> None:
    api.served.update([WorkerReport(max_model_len=40)])
    assert await max_model_len(api) == 40


async def test_status_has_no_context_before_anybody_named_one(tmp_path: Path) -> None:
    async with Api(tmp_path, TextCodec(None, None, reason="not needed"), max_model_len=None).running() as api:
        assert await max_model_len(api) == 0


async def max_model_len(api: Api) -> int:
    status = await api.stub(status_pb2_grpc.StatusServiceStub).GetStatus(status_pb2.GetStatusRequest())
    return status.model.max_model_len


async def test_a_caller_without_admin_gets_its_own_tenant_and_nothing_else(api: Api) -> None:
    """Of a server with two workers, other tenants and a filled host cache."""
    api.registry.add("one")
    api.weights.error = "Redis refuses: no"
    with acting_as(Caller("acme", Principal("key:k", frozenset({Role.INFER}), ("acme",)), "ipv4:10.0.0.7:5")):
        response = await api.status.GetStatus(status_pb2.GetStatusRequest(), NO_CONTEXT)
    whole = await api.stub(status_pb2_grpc.StatusServiceStub).GetStatus(status_pb2.GetStatusRequest())
    assert response.own_tenant_only and not whole.own_tenant_only
    assert [tenant.tenant for tenant in response.tenants] == ["acme"]
    assert (response.server_version, response.model, response.limits) == (
        motet.__version__,
        whole.model,
        whole.limits,
    )
    present = {field.name for field, _ in response.ListFields()}
    assert present == {"server_version", "model", "adapters", "limits", "tenants", "own_tenant_only"}
    assert response.adapters == status_pb2.AdapterStatus(num_registered=1)


async def test_an_admin_gets_everything(api: Api) -> None:
    with acting_as(Caller("acme", Principal("key:k", of_roles([Role.ADMIN]), ("acme",)), "ipv4:10.0.0.7:5")):
        response = await api.status.GetStatus(status_pb2.GetStatusRequest(), NO_CONTEXT)
    assert not response.own_tenant_only and len(response.workers) == 2 and response.num_other_tenants == 7
