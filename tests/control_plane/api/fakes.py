"""Small typed fakes of the registry, the host cache and the fleet, and a real gRPC server over them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.longrunning import operations_pb2_grpc
from google.rpc import error_details_pb2, status_pb2
from motet.v1 import adapters_pb2_grpc, generation_pb2_grpc, status_pb2_grpc
from motet.v1.status import LimitStatus, QueueStatus, WorkerStatus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from control_plane.adapters.life_cycle import AdapterLifeCycle
from control_plane.adapters.operations import OperationStore
from control_plane.adapters.roots import AdapterRoots
from control_plane.api import status
from control_plane.api.admin import adapters, operations
from control_plane.api.admin.idempotency_cache import IdempotencyCache
from control_plane.api.admin.upload import UploadReceiver
from control_plane.api.gate import DrainGate
from control_plane.api.generation import service as generation
from control_plane.api.rpc import listeners
from control_plane.api.text.codec import TextCodec
from control_plane.errors import AdapterNotFound, AdapterVersionActive, PinBudgetExceeded
from control_plane.fleet.fleet import Fleet
from control_plane.fleet.requests.quotas import TenantUse
from control_plane.fleet.requests.streams import JobEvent, JobStream
from control_plane.fleet.tenants import TenantLimits
from control_plane.host_cache.base import HostCacheStats
from control_plane.host_cache.weights import AdapterWeights
from control_plane.registry.catalog import RegistryStats
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.records import AdapterRecord, AdapterState, AdapterVersion, Registered, ResolvedAdapter
from control_plane.registry.registry import Registry
from control_plane.scheduler.types import AdapterRef, FinishReason, Request, RequestId

DIGEST = "a" * 64
OTHER_DIGEST = "b" * 64


def adapter_version(digest: str, *, number: int = 1) -> AdapterVersion:
    return AdapterVersion(
        digest=digest,
        kind="lora",
        max_rank=8,
        dtype="float32",
        size_bytes=1000,
        arena_bytes=4096,
        target_modules=("model.layers.0.self_attn.q_proj",),
        create_time_s=1.5,
        number=number,
    )


def adapter_record(
    adapter_id: str, versions: Sequence[AdapterVersion], active_digest: str, **fields: Any
) -> AdapterRecord:
    """A record with the etag "u1-1"."""
    record = AdapterRecord(
        adapter_id=adapter_id,
        uid="u1",
        display_name="",
        labels={},
        state=AdapterState.ACTIVE,
        state_reason="",
        versions=tuple(versions),
        active_digest=active_digest,
        is_pinned=False,
        create_time_s=1.5,
        update_time_s=2.5,
    )
    return replace(record, **fields)


class FakeRegistry(Registry):
    """Records in a dict; `calls` lists the calls, `files` what was registered."""

    def __init__(self) -> None:
        self.records: dict[str, AdapterRecord] = {}
        self.calls: list[tuple[object, ...]] = []
        self.files: dict[str, dict[str, bytes]] = {}
        self.gate: asyncio.Event | None = None  # register waits for it
        self.delete_gate: asyncio.Event | None = None  # begin_delete waits for it
        self.response_gate: asyncio.Event | None = None  # what is pinned or unpinned already waits for it
        self.response_due = asyncio.Event()
        self.delete_begun, self.delete_finished = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None
        self.entered, self.entered_twice, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def add(self, adapter_id: str, *digests: str) -> AdapterRecord:
        versions = [adapter_version(digest) for digest in digests or (DIGEST,)]
        self.records[adapter_id] = adapter_record(adapter_id, versions, versions[0].digest)
        return self.records[adapter_id]

    def get(self, adapter_id: str) -> AdapterRecord:
        if adapter_id not in self.records:
            near = ", ".join(sorted(self.records)[:3])
            raise AdapterNotFound(f"no adapter {adapter_id}; nearest: {near}", resource=f"adapters/{adapter_id}")
        return self.records[adapter_id]

    def resolve(self, adapter_id: str, digest: str = "") -> ResolvedAdapter:
        record = self.get(adapter_id)
        version = record.version(digest or record.active_digest)
        if version is None:
            raise AdapterNotFound(f"adapter {adapter_id} has no version {digest}", resource=f"adapters/{adapter_id}")
        return ResolvedAdapter(adapter_id, version, AdapterRef(version.digest, version.arena_bytes))

    def list_page(self, page_size: int = 0, page_token: str = "") -> tuple[list[AdapterRecord], str]:
        names = [name for name in sorted(self.records) if name > page_token]
        more = names[page_size - 1] if len(names) > page_size else ""
        return [self.records[name] for name in names[:page_size]], more

    def versions_page(
        self, adapter_id: str, page_size: int = 0, page_token: str = ""
    ) -> tuple[list[AdapterVersion], str]:
        return list(self.get(adapter_id).versions[:page_size]), ""

    async def register(
        self,
        adapter_id: str,
        files: Mapping[str, Path],
        *,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        validate_only: bool = False,
    ) -> Registered:
        self.calls.append(("register", adapter_id, validate_only))
        (self.entered_twice if self.entered.is_set() else self.entered).set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.left.set()
        if self.error is not None:
            raise self.error
        self.files[adapter_id] = {name: path.read_bytes() for name, path in files.items()}
        before = self.records.get(adapter_id)
        is_pinned = before is not None and before.is_pinned
        record = adapter_record(
            adapter_id,
            [adapter_version(DIGEST)],
            DIGEST,
            display_name=display_name,
            labels=dict(labels or {}),
            is_pinned=is_pinned,
        )
        if not validate_only:
            self.records[adapter_id] = record
        return Registered(record, before)

    def is_named(self, digest: str) -> bool:
        return any(version.digest == digest for record in self.records.values() for version in record.versions)

    async def update(
        self,
        adapter_id: str,
        *,
        display_name: str | None = None,
        labels: Mapping[str, str] | None = None,
        etag: str = "",
    ) -> AdapterRecord:
        self.calls.append(("update", adapter_id, display_name, labels, etag))
        record = self.get(adapter_id)
        if display_name is not None:
            record = replace(record, display_name=display_name)
        if labels is not None:
            record = replace(record, labels=dict(labels))
        self.records[adapter_id] = record
        return record

    async def activate(self, adapter_id: str, digest: str, etag: str = "") -> AdapterRecord:
        self.records[adapter_id] = replace(self.get(adapter_id), active_digest=digest)
        return self.records[adapter_id]

    async def set_pinned(self, adapter_id: str) -> AdapterRecord:
        if self.error is not None:
            raise self.error
        self.records[adapter_id] = replace(self.get(adapter_id), is_pinned=True)
        await self._respond()
        return self.records[adapter_id]

    async def clear_pinned(self, adapter_id: str) -> AdapterRecord:
        self.records[adapter_id] = replace(self.get(adapter_id), is_pinned=False)
        await self._respond()
        return self.records[adapter_id]

    async def _respond(self) -> None:
        self.response_due.set()
        if self.response_gate is not None:
            await self.response_gate.wait()

    async def begin_delete(self, adapter_id: str, etag: str = "") -> list[str]:
        record = self.get(adapter_id)
        self.calls.append(("begin_delete", adapter_id, etag))
        self.delete_begun.set()
        if self.delete_gate is not None:
            await self.delete_gate.wait()
        del self.records[adapter_id]
        return [version.digest for version in record.versions]

    async def finish_delete(self, adapter_id: str) -> None:
        self.calls.append(("finish_delete", adapter_id))
        self.delete_finished.set()

    async def begin_delete_version(self, adapter_id: str, digest: str, etag: str = "") -> None:
        record = self.get(adapter_id)
        self.calls.append(("begin_delete_version", adapter_id, digest, etag))
        if digest == record.active_digest:
            raise AdapterVersionActive(f"version {digest} is the active one")
        if self.delete_gate is not None:
            await self.delete_gate.wait()
        versions = tuple(version for version in record.versions if version.digest != digest)
        self.records[adapter_id] = replace(record, versions=versions)

    async def finish_delete_version(self, digest: str) -> None:
        self.calls.append(("finish_delete_version", digest))
        self.delete_finished.set()

    def stats(self) -> RegistryStats:
        return RegistryStats(len(self.records), len(self.records))


class FakeWeights(AdapterWeights):
    """Counts pins; `calls` lists the calls in order."""

    def __init__(self, calls: list[tuple[object, ...]]) -> None:
        self.calls = calls
        self.pinned: list[str] = []
        self.stored: list[str] = []  # digests that were registered
        self.error = ""
        self.max_pinned = 10
        self.pin_gate: asyncio.Event | None = None  # pin waits for it
        self.pin_begun = asyncio.Event()

    async def drop(self, digest: str) -> None:
        self.calls.append(("drop", digest))

    async def pin(self, digest: str) -> None:
        if len(self.pinned) >= self.max_pinned:
            raise PinBudgetExceeded("pins would exceed the budget of 100 bytes; unpin another adapter")
        assert digest not in self.pinned
        self.pin_begun.set()
        if self.pin_gate is not None:
            await self.pin_gate.wait()
        self.pinned.append(digest)

    async def unpin(self, digest: str) -> None:
        if digest in self.pinned:
            self.pinned.remove(digest)

    def is_cached(self, digest: str) -> bool:
        return digest == DIGEST

    def stored_anew(self, digest: str) -> None:
        self.stored.append(digest)

    def stats(self) -> HostCacheStats:
        return HostCacheStats(
            num_adapters=1,
            used_bytes=10,
            budget_bytes=100,
            is_available=not self.error,
            error=self.error,
            num_hits=3,
            num_misses=2,
            num_corrupt=1,
        )


def job_event(token_ids: list[int], finish_reason: FinishReason | None = None, **fields: Any) -> JobEvent:
    return JobEvent(token_ids, finish_reason, num_cached_tokens=2, queue_time_s=0.25, **fields)


class ScriptedJob(JobStream):
    """Yields what the test put into `events`; an exception in the script is raised."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[JobEvent | Exception] = asyncio.Queue()
        self.is_cancelled = asyncio.Event()
        self.given_up: list[int] = []  # indices

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
        self._ids = itertools.count(1)

    def next_request_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def account_of(self, tenant: str, host: str) -> str:
        return f"{tenant} at {host}"

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

    def pin(self, digest: str) -> None:
        self.pinned.add(digest)

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

    def tenant_use(self) -> list[TenantUse]:
        limits = TenantLimits(weight=2.5, max_queued_tokens=90, tokens_per_minute=600)
        return [
            TenantUse(
                tenant="a",
                limits=limits,
                num_requests=3,
                num_queued_tokens=4,
                tokens_left=50,
                num_accepted=6,
                num_rejected=7,
                num_input_tokens=8,
                num_generated_tokens=9,
            )
        ]


def byte_level_tokenizer() -> Tokenizer:
    """All 256 bytes, a few merges that split code points badly, one special and two added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    for token in ("Ġa", "ðŁ", "ðŁĺ", "Ģð", "he", "ll"):
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l"), ("Ġ", "a"), ("ð", "Ł")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["ñ ñ", "é"])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Words that begin with a metaspace; the decoder strips the first one."""
    words = ["▁", "▁▁", "▁he", "llo", "▁wor", "ld", "😀", "é", "�", "<unk>", "a", "▁a"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2: metaspace words and byte tokens."""
    words = [f"<0x{value:02X}>" for value in range(256)] + ["▁", "▁▁", "▁he", "llo", "😀", "é", "a"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


class Api:
    """Every client-facing service over fakes, behind the real interceptor and a real channel."""

    def __init__(
        self, directory: Path, codec: TextCodec, *, vocab_size: int = 300, max_model_len: int | None = 64
    ) -> None:
        self.directory = directory
        self.registry = FakeRegistry()
        self.calls = self.registry.calls
        self.weights = FakeWeights(self.calls)
        self.fleet = FakeFleet(self.calls)
        self.served = WorkerReports(limit=max_model_len)
        self.gate = DrainGate()
        self.operations = OperationStore(wall_clock=lambda: 7.0)
        self.life_cycle = AdapterLifeCycle(
            registry=self.registry, weights=self.weights, fleet=self.fleet, operations=self.operations
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
            registry=self.registry,
            fleet=self.fleet,
            gate=self.gate,
            clock=lambda: self.now_s,
            wall_clock=lambda: self.wall_s,
            draw_seed=lambda: 1234,
        )
        self.adapters = adapters.AdapterService(
            registry=self.registry,
            life_cycle=self.life_cycle,
            operations=self.operations,
            gate=self.gate,
            uploads=self.uploads,
            roots=AdapterRoots({"team": self.root}),
            idempotency=IdempotencyCache(clock=lambda: self.now_s),
        )
        self.status = status.StatusService(
            model=status.ModelIdentity("tiny", "f" * 64, vocab_size, "float32"),
            served=self.served,
            limits=LimitStatus(max_waiting_requests=8, max_adapter_bytes=4 << 20, max_chunk_bytes=1 << 20),
            fleet=self.fleet,
            registry=self.registry,
            weights=self.weights,
        )
        self.address = ""
        self.channel: grpc.aio.Channel
        self.port = 0  # while it runs

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Api]:
        server = listeners.client_server(
            max_streams_per_connection=100, max_concurrent_rpcs=100, max_connections=100, write_timeout_s=30.0
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self.generation, server)
        adapters_pb2_grpc.add_AdapterServiceServicer_to_server(self.adapters, server)
        status_pb2_grpc.add_StatusServiceServicer_to_server(self.status, server)
        operations_pb2_grpc.add_OperationsServicer_to_server(operations.OperationsService(self.operations), server)
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
