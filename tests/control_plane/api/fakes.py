"""Small typed fakes of the registry, the host cache and the fleet, and a real gRPC server over them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
from google.longrunning import operations_pb2_grpc
from google.rpc import error_details_pb2, status_pb2
from motet.v1 import adapters_pb2_grpc, generation_pb2_grpc, status_pb2_grpc
from motet.v1.status import LimitStatus, QueueStatus, WorkerStatus

from control_plane.adapters.life_cycle import AdapterLifeCycle
from control_plane.adapters.operations import OperationStore
from control_plane.adapters.roots import AdapterRoots
from control_plane.api import status
from control_plane.api.admin import adapters, operations
from control_plane.api.admin.idempotency_cache import IdempotencyCache
from control_plane.api.admin.upload import UploadReceiver
from control_plane.api.gate import ShutdownGate
from control_plane.api.generation import service as generation
from control_plane.api.rpc import listeners
from control_plane.api.rpc.interceptor import Identify
from control_plane.api.text.codec import TextCodec
from control_plane.audit.audit_log import AuditLog
from control_plane.fleet.fleet import Fleet
from control_plane.fleet.requests.active_adapters import AdapterLoad
from control_plane.fleet.requests.quotas import TenantUse
from control_plane.fleet.requests.streams import JobEvent, JobStream, RunFacts
from control_plane.fleet.tenants import TenantLimits
from control_plane.observers.ended_request import Observer, Observers
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.registry import Registry
from control_plane.scheduler.types import AdapterRef, FinishReason, Request, RequestId
from tests.control_plane.api.fake_adapters import DIGEST, FakeRegistry, FakeWeights


def job_event(token_ids: list[int], finish_reason: FinishReason | None = None, **fields: Any) -> JobEvent:
    return JobEvent(token_ids, finish_reason, num_cached_tokens=2, queue_time_s=0.25, **fields)


class ScriptedJob(JobStream):
    """Yields what the test put into `events`; an exception in the script is raised."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[JobEvent | Exception] = asyncio.Queue()
        self.is_cancelled = asyncio.Event()
        self.given_up: list[int] = []  # indices
        self.facts = RunFacts()

    def script(self, *events: JobEvent | Exception) -> None:
        for event in events:
            self.events.put_nowait(event)

    async def __anext__(self) -> JobEvent:
        event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def cancel(self) -> None:
        self.is_cancelled.set()

    def cancel_index(self, index: int) -> None:
        self.given_up.append(index)


class FakeFleet(Fleet):
    """Hands out scripted jobs: `on_submit` gets each job with its request."""

    def __init__(self, calls: list[tuple[object, ...]]) -> None:
        self.calls = calls
        self.requests: list[Request] = []
        self.jobs: list[ScriptedJob] = []
        self.on_submit: Callable[[ScriptedJob, Request], None] = lambda job, request: None
        self.submitted = asyncio.Event()
        self.refusal: Exception | None = None  # of check_room
        self.unload_gate: asyncio.Event | None = None  # unload waits for it
        self.unload_begun = asyncio.Event()
        self.pinned: set[str] = set()
        self.active_adapters: Any = SimpleNamespace(
            busiest=lambda _most: ([AdapterLoad("", 3, 1), AdapterLoad(DIGEST, 1, 0)], 5)
        )
        self.drains: Any = SimpleNamespace(worker_ids=["w1", "w7"])
        self._ids = itertools.count(1)

    def next_request_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def account_of(self, tenant: str, host: str, *, is_authenticated: bool = False) -> str:
        return tenant if is_authenticated else f"{tenant} at {host}"

    def check_room(self, account: str, num_reserved_tokens: int) -> None:
        self.calls.append(("check_room", account, num_reserved_tokens))
        if self.refusal is not None:
            raise self.refusal

    def submit(self, request: Request) -> ScriptedJob:
        job = ScriptedJob()
        self.on_submit(job, request)
        self.requests.append(request)
        self.jobs.append(job)
        self.submitted.set()
        return job

    def placements(self, digest: str) -> list[str]:
        return ["w0"] if digest == DIGEST else []

    def pin(self, ref: AdapterRef, account: str = "") -> None:
        self.pinned.add(ref.digest)

    def unpin(self, digest: str) -> None:
        self.pinned.remove(digest)

    async def unload(self, digest: str) -> None:
        self.unload_begun.set()
        if self.unload_gate is not None:
            await self.unload_gate.wait()
        self.calls.append(("unload", digest))

    def cancel_unload(self, digest: str) -> None:
        if self.unload_gate is not None:
            self.unload_gate.set()

    def worker_snapshots(self) -> list[WorkerStatus]:
        names = [f.name for f in WorkerStatus.__dataclass_fields__.values()]
        numbers: dict[str, Any] = {name: index for index, name in enumerate(names)}
        return [WorkerStatus(**{**numbers, "worker_id": name, "device": "cpu"}) for name in ("w1", "w0")]

    def queue_snapshot(self) -> QueueStatus:
        return QueueStatus(
            num_requests=3, num_waiting=1, num_running=2, num_accepted=9, num_finished=5, num_rejected=1, num_migrated=0
        )

    @property
    def num_tenants(self) -> int:
        return 8

    def tenant_use(self, *, only: str | None = None) -> list[TenantUse]:
        limits = TenantLimits(weight=2.5, max_queued_tokens=90, tokens_per_minute=600, requests_per_minute=30)
        return [
            TenantUse(
                tenant=only or "a",
                limits=limits,
                num_requests=3,
                num_queued_tokens=4,
                tokens_left=50,
                requests_left=10,
                num_accepted=6,
                num_rejected=7,
                num_input_tokens=8,
                num_generated_tokens=9,
            )
        ]


class Api:
    """Every client-facing service over fakes, behind the real interceptor and a real channel."""

    def __init__(
        self,
        directory: Path,
        codec: TextCodec,
        *,
        vocab_size: int = 300,
        max_model_len: int | None = 64,
        registry: Registry | None = None,
        audit: AuditLog | None = None,
        observers: Observer | None = None,
    ) -> None:
        """`registry` serves instead of the fake one."""
        self.audit = audit or AuditLog()
        self.directory = directory
        self.registry = FakeRegistry()
        served_registry = registry or self.registry
        self.calls = self.registry.calls
        self.weights = FakeWeights(self.calls)
        self.fleet = FakeFleet(self.calls)
        self.served = WorkerReports(limit=max_model_len)
        self.gate = ShutdownGate()
        self.operations = OperationStore(wall_clock=lambda: 7.0)
        self.life_cycle = AdapterLifeCycle(
            registry=served_registry,
            weights=self.weights,
            fleet=self.fleet,
            operations=self.operations,
            audit=self.audit,
        )
        self.now_s = 100.0
        self.wall_s = 1e9  # September 2001
        self.uploads_dir = directory / "uploads"
        self.root = directory / "root"
        self.root.mkdir()
        self.uploads = UploadReceiver(self.uploads_dir, max_adapter_bytes=4 << 20, max_open=2, idle_timeout_s=5.0)
        self.generation = generation.GenerationService(
            model=generation.ModelFacts(vocab_size, (1,), "f" * 64),
            served=self.served,
            codec=codec,
            registry=served_registry,
            fleet=self.fleet,
            gate=self.gate,
            clock=lambda: self.now_s,
            wall_clock=lambda: self.wall_s,
            draw_seed=lambda: 1234,
            audit=self.audit,
            observers=observers or Observers(),
        )
        self.adapters = adapters.AdapterService(
            registry=served_registry,
            life_cycle=self.life_cycle,
            operations=self.operations,
            gate=self.gate,
            uploads=self.uploads,
            roots=AdapterRoots({"team": self.root}),
            idempotency=IdempotencyCache(clock=lambda: self.now_s),
            audit=self.audit,
        )
        self.status = status.StatusService(
            model=status.ModelIdentity("tiny", "f" * 64, vocab_size, "float32"),
            served=self.served,
            limits=LimitStatus(max_waiting_requests=8, max_adapter_bytes=4 << 20, max_chunk_bytes=1 << 20),
            fleet=self.fleet,
            registry=served_registry,
            weights=self.weights,
        )
        self.address = ""
        self.channel: grpc.aio.Channel
        self.port = 0  # while it runs

    @contextlib.asynccontextmanager
    async def running(self, identify: Identify | None = None) -> AsyncIterator[Api]:
        server = listeners.client_server(
            max_streams_per_connection=100,
            max_concurrent_rpcs=100,
            max_connections=100,
            write_timeout_s=30.0,
            identify=identify,
            on_refused=self.audit.refused,
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self.generation, server)
        adapters_pb2_grpc.add_AdapterServiceServicer_to_server(self.adapters, server)
        status_pb2_grpc.add_StatusServiceServicer_to_server(self.status, server)
        operations_pb2_grpc.add_OperationsServicer_to_server(
            operations.OperationsService(self.operations, self.audit), server
        )
        self.address = listeners.bind(server, "127.0.0.1:0")
        await server.start()
        try:
            self.port = int(self.address.rpartition(":")[2])
            async with grpc.aio.insecure_channel(self.address) as self.channel:
                yield self
        finally:
            await server.stop(None)
            await self.operations.close(timeout_s=0)

    def stub(self, kind: Any) -> Any:
        return kind(self.channel)


def details(error: grpc.aio.AioRpcError) -> tuple[Any, list[str], list[Any]]:
    """ErrorInfo, fields of BadRequest, the other details."""
    trailing: Any = error.trailing_metadata()
    metadata = dict(trailing or ())
    packed_status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    assert packed_status.message == error.details()
    assert packed_status.code == error.code().value[0]
    info, fields, others = error_details_pb2.ErrorInfo(), [], []
    for packed in packed_status.details:
        bad, resource, retry, quota = (
            error_details_pb2.BadRequest(),
            error_details_pb2.ResourceInfo(),
            error_details_pb2.RetryInfo(),
            error_details_pb2.QuotaFailure(),
        )
        if packed.Unpack(bad):
            fields = [violation.field for violation in bad.field_violations]
        elif packed.Unpack(resource):
            others.append(resource)
        elif packed.Unpack(retry):
            others.append(retry)
        elif packed.Unpack(quota):
            others.append(quota)
        else:
            assert packed.Unpack(info)
    assert info.domain == "motet"
    return info, fields, others
