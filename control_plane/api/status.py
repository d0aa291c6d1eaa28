"""StatusService: the model, the workers, the queues and the adapters at one moment.

A caller without the role `admin` gets its own tenant's part and nothing of anybody else.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import grpc.aio
from motet import __version__
from motet.v1 import status_pb2, status_pb2_grpc
from motet.v1.status import LimitStatus

from control_plane.audit.audit_log import AuditLog
from control_plane.caller import Caller, current_caller
from control_plane.fleet.fleet import Fleet
from control_plane.fleet.requests.quotas import TenantUse
from control_plane.host_cache.weights import AdapterWeights
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.registry import Registry, count_visible

SERVICE_NAME = status_pb2.DESCRIPTOR.services_by_name["StatusService"].full_name
MAX_ACTIVE_ADAPTERS = 64  # in a status
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The base model, for people and for workers' operators."""

    name: str
    fingerprint: str
    vocab_size: int
    dtype: str


class StatusService(status_pb2_grpc.StatusServiceServicer):
    """See protos/motet/v1/status.proto."""

    def __init__(
        self,
        *,
        model: ModelIdentity,
        served: WorkerReports,
        limits: LimitStatus,
        fleet: Fleet,
        registry: Registry,
        weights: AdapterWeights,
        audit: AuditLog | None = None,
    ) -> None:
        self._audit = audit or AuditLog()
        self._model = model
        self._served = served
        self._limits = limits
        self._fleet = fleet
        self._registry = registry
        self._weights = weights

    async def GetStatus(  # noqa: N802 - the stub's name
        self, _request: status_pb2.GetStatusRequest, _context: Context
    ) -> status_pb2.GetStatusResponse:
        """Everything that the caller may see, at one moment: no await between the reads."""
        caller = current_caller()
        if caller.principal.is_admin:
            return self.whole()
        # The count takes turns of the event loop where the credential lists adapters.
        return self._own_part(caller, await count_visible(self._registry))

    def _own_part(self, caller: Caller, num_visible: int) -> status_pb2.GetStatusResponse:
        account = self._fleet.account_of(caller.tenant, caller.host, is_authenticated=caller.principal.is_authenticated)
        return status_pb2.GetStatusResponse(
            server_version=__version__,
            model=self._model_message(),
            adapters=status_pb2.AdapterStatus(num_registered=num_visible),
            limits=self._limits_message(),
            tenants=map(_tenant_message, self._fleet.tenant_use(only=account)),
            own_tenant_only=True,
        )

    def whole(self) -> status_pb2.GetStatusResponse:
        """Everything, as an admin sees it."""
        registry, cache = self._registry.stats(), self._weights.stats()
        tenants = self._fleet.tenant_use()
        active, num_others = self._fleet.active_adapters.busiest(MAX_ACTIVE_ADAPTERS)
        workers = sorted(self._fleet.worker_snapshots(), key=lambda worker: worker.worker_id)
        return status_pb2.GetStatusResponse(
            server_version=__version__,
            model=self._model_message(),
            workers=[status_pb2.WorkerStatus(**dataclasses.asdict(worker)) for worker in workers],
            queues=status_pb2.QueueStatus(**dataclasses.asdict(self._fleet.queue_snapshot())),
            adapters=status_pb2.AdapterStatus(
                num_registered=registry.num_registered,
                num_stored=registry.num_stored,
                num_host_cached=cache.num_adapters,
                host_cache_bytes=cache.used_bytes,
                host_cache_budget_bytes=cache.budget_bytes,
                host_cache_available=cache.is_available,
                host_cache_error=cache.error,
            ),
            limits=self._limits_message(),
            tenants=map(_tenant_message, tenants),
            num_other_tenants=self._fleet.num_tenants - len(tenants),
            drained_worker_ids=self._fleet.drains.worker_ids,
            active_adapters=[
                status_pb2.ActiveAdapterStatus(
                    adapter=min(self._registry.names_of(load.digest), default="") if load.digest else "",
                    digest=load.digest,
                    num_running=load.num_running,
                    num_waiting=load.num_waiting,
                )
                for load in active
            ],
            num_other_active_adapters=num_others,
            audit=self._audit_message(),
        )

    def _model_message(self) -> status_pb2.ModelStatus:
        return status_pb2.ModelStatus(**dataclasses.asdict(self._model), max_model_len=self._served.max_model_len or 0)

    def _limits_message(self) -> status_pb2.LimitStatus:
        return status_pb2.LimitStatus(**dataclasses.asdict(self._limits))

    def _audit_message(self) -> status_pb2.AuditStatus:
        stats = self._audit.stats()
        if stats is None:
            return status_pb2.AuditStatus()
        return status_pb2.AuditStatus(
            is_on=True, num_lines=stats.num_lines, num_lost=stats.num_lost, error=stats.problem
        )


def _tenant_message(use: TenantUse) -> status_pb2.TenantStatus:
    limits = use.limits
    return status_pb2.TenantStatus(
        tenant=use.tenant,
        weight=limits.weight,
        num_requests=use.num_requests,
        max_running_requests=limits.max_running_requests,
        num_queued_tokens=use.num_queued_tokens,
        max_queued_tokens=limits.max_queued_tokens,
        num_tokens_left=use.tokens_left,
        tokens_per_minute=limits.tokens_per_minute,
        num_requests_left=use.requests_left,
        requests_per_minute=limits.requests_per_minute,
        num_accepted=use.num_accepted,
        num_rejected=use.num_rejected,
        num_input_tokens=use.num_input_tokens,
        num_generated_tokens=use.num_generated_tokens,
    )
