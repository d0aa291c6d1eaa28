"""AdapterResidencyService: translates loads and unloads of adapters. Decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from google.protobuf import duration_pb2
from motet.v1 import adapters_pb2, residency_pb2, residency_pb2_grpc

from contract.ids import WORKER_ID_FORM, is_worker_id
from control_plane.adapters.residency import AdapterResidency, MemoryTier
from control_plane.adapters.watch.tokens import is_token
from control_plane.adapters.watch.watch import AdapterWatches
from control_plane.api.admin.watch_messages import watch_message
from control_plane.api.gate import ShutdownGate
from control_plane.audit.audit_log import AuditLog
from control_plane.checks import Violations, check_adapter_id, check_digest, quoted
from control_plane.fleet.adapters.residency import Outcome, PlaceResult
from control_plane.fleet.fleet import Fleet
from control_plane.host_cache.weights import AdapterWeights
from control_plane.registry.registry import Registry
from control_plane.registry.versions.version_names import VersionName, version_name_of

SERVICE_NAME = residency_pb2.DESCRIPTOR.services_by_name["AdapterResidencyService"].full_name
DEFAULT_WAIT_S = 30.0
MAX_WAIT_S = 300.0
MAX_WORKER_IDS = 256
_PREFIX = "adapters/"
_TIERS = {
    adapters_pb2.ADAPTER_TIER_HOST_CACHE: MemoryTier.HOST_CACHE,
    adapters_pb2.ADAPTER_TIER_ARENA: MemoryTier.ARENA,
}
_OUTCOMES = {outcome: getattr(residency_pb2, f"RESIDENCY_OUTCOME_{outcome.name}") for outcome in Outcome}
Context = grpc.aio.ServicerContext[Any, Any]


class ResidencyService(residency_pb2_grpc.AdapterResidencyServiceServicer):
    """See protos/motet/v1/residency.proto."""

    def __init__(self, residency: AdapterResidency, watches: AdapterWatches, gate: ShutdownGate) -> None:
        self._residency = residency
        self._watches = watches
        self._gate = gate

    # ruff: noqa: N802 - the stubs name the methods

    async def LoadAdapter(
        self, request: residency_pb2.LoadAdapterRequest, _context: Context
    ) -> residency_pb2.LoadAdapterResponse:
        """Bring a version into memory, and wait for that."""
        self._gate.check()
        name, tier, wait_s = _checked(request)
        digest, results = await self._residency.load(name, request.digest, tier, list(request.worker_ids), wait_s)
        return residency_pb2.LoadAdapterResponse(digest=digest, results=_messages(request.tier, results))

    async def UnloadAdapter(
        self, request: residency_pb2.UnloadAdapterRequest, _context: Context
    ) -> residency_pb2.UnloadAdapterResponse:
        """Take a version out of memory, and wait for the requests that use it."""
        self._gate.check()
        name, tier, wait_s = _checked(request)
        digest, results = await self._residency.unload(name, request.digest, tier, list(request.worker_ids), wait_s)
        return residency_pb2.UnloadAdapterResponse(digest=digest, results=_messages(request.tier, results))

    async def WatchAdapters(
        self, request: residency_pb2.WatchAdaptersRequest, _context: Context
    ) -> AsyncIterator[residency_pb2.WatchAdaptersResponse]:
        """A snapshot, then events."""
        self._gate.check()
        violations = Violations()
        adapter_id = request.name.removeprefix(_PREFIX)
        if request.name and not request.name.startswith(_PREFIX):
            violations.add("name", f"{quoted(request.name)} is not the name of an adapter; send adapters/ID or nothing")
        elif request.name:
            check_adapter_id(adapter_id, "name", violations)
        if request.resume_token and not is_token(request.resume_token):
            violations.add("resume_token", "is not a token of a watch; send the last one that came, or none")
        violations.raise_if_any()
        events = self._watches.watch(adapter_id, request.resume_token, with_residency=request.with_residency)
        async with contextlib.aclosing(events):
            async for token, event in events:
                self._gate.check()
                yield watch_message(token, event)


def part(
    registry: Registry, weights: AdapterWeights, fleet: Fleet, gate: ShutdownGate, audit: AuditLog
) -> tuple[Any, ResidencyService]:
    """The service and what adds it to a server."""
    watches = AdapterWatches(registry, lambda: weights.cached_digests, fleet.residency.workers_by_digest)
    service = ResidencyService(AdapterResidency(registry, weights, fleet, audit), watches, gate)
    return residency_pb2_grpc.add_AdapterResidencyServiceServicer_to_server, service


def _checked(
    request: residency_pb2.LoadAdapterRequest | residency_pb2.UnloadAdapterRequest,
) -> tuple[VersionName, MemoryTier, float]:
    violations = Violations()
    name = VersionName("")
    if request.name.startswith(_PREFIX):
        name = version_name_of(request.name, request.digest, "name", violations)
    else:
        violations.add("name", f"{quoted(request.name)} is not the name of an adapter; send adapters/ID")
    if request.digest:
        check_digest(request.digest, "digest", violations)
    tier = _TIERS.get(request.tier)
    if tier is None:
        violations.add("tier", f"is {request.tier}; use ADAPTER_TIER_HOST_CACHE or ADAPTER_TIER_ARENA")
    if request.worker_ids and tier is MemoryTier.HOST_CACHE:
        violations.add("worker_ids", "is set, and the host cache is that of all workers; leave it empty")
    if len(request.worker_ids) > MAX_WORKER_IDS or len(set(request.worker_ids)) < len(request.worker_ids):
        violations.add("worker_ids", f"has {len(request.worker_ids)} ids; use at most {MAX_WORKER_IDS}, each once")
    for index, worker_id in enumerate(request.worker_ids[:MAX_WORKER_IDS]):
        if not is_worker_id(worker_id):
            violations.add(f"worker_ids[{index}]", f"{quoted(worker_id)} is not a worker's id: {WORKER_ID_FORM}")
    wait_s = _wait_s(request.wait, violations) if request.HasField("wait") else DEFAULT_WAIT_S
    violations.raise_if_any()
    assert tier is not None, "a tier that is not known is refused"
    return name, tier, wait_s


def _wait_s(message: duration_pb2.Duration, violations: Violations) -> float:
    wait_s = message.seconds + message.nanos / 1e9
    if not (0 <= wait_s <= MAX_WAIT_S and 0 <= message.nanos < 10**9):
        violations.add("wait", f"is {wait_s:g} s; give 0 to {MAX_WAIT_S:g} s")
    return wait_s


def _messages(tier: adapters_pb2.AdapterTier, results: list[PlaceResult]) -> list[residency_pb2.ResidencyResult]:
    return [
        residency_pb2.ResidencyResult(
            tier=tier,
            worker_id=result.worker_id,
            outcome=_OUTCOMES[result.outcome],
            missing_bytes=result.missing_bytes,
            reason=result.reason,
        )
        for result in results
    ]
