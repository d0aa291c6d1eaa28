"""FleetService: translates what operators do with workers. Decides nothing."""

from __future__ import annotations

from typing import Any

import grpc.aio
from motet.v1 import fleet_pb2, fleet_pb2_grpc

from contract.ids import WORKER_ID_FORM, is_worker_id
from control_plane.audit import actions
from control_plane.audit.audit_log import AuditLog
from control_plane.checks import quoted, refuse
from control_plane.fleet.drains import WorkerDrains

SERVICE_NAME = fleet_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name
Context = grpc.aio.ServicerContext[Any, Any]


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    """See protos/motet/v1/fleet.proto."""

    def __init__(self, drains: WorkerDrains, audit: AuditLog) -> None:
        self._drains = drains
        self._audit = audit

    # ruff: noqa: N802 - the stubs name the methods

    async def DrainWorker(
        self, request: fleet_pb2.DrainWorkerRequest, _context: Context
    ) -> fleet_pb2.DrainWorkerResponse:
        """Move a worker's requests to others, and give it no more."""
        async with self._audit.change(actions.DRAIN, _resource(request.worker_id)):
            num_moved = self._drains.drain(request.worker_id, is_forced=request.force)
        return fleet_pb2.DrainWorkerResponse(num_moved=num_moved)

    async def UndrainWorker(
        self, request: fleet_pb2.UndrainWorkerRequest, _context: Context
    ) -> fleet_pb2.UndrainWorkerResponse:
        """Give a worker requests again."""
        async with self._audit.change(actions.UNDRAIN, _resource(request.worker_id)):
            self._drains.undrain(request.worker_id)
        return fleet_pb2.UndrainWorkerResponse()


def part(drains: WorkerDrains, audit: AuditLog) -> tuple[Any, FleetService]:
    """The service and what adds it to a server."""
    return fleet_pb2_grpc.add_FleetServiceServicer_to_server, FleetService(drains, audit)


def _resource(worker_id: str) -> str:
    if not is_worker_id(worker_id):
        raise refuse("worker_id", f"{quoted(worker_id)} is not a worker's id: {WORKER_ID_FORM}")
    return f"workers/{worker_id}"
