"""Draining of workers, as calls."""

from __future__ import annotations

from typing import Any

from motet.calls import UnaryCall
from motet.inputs.scalars import text_of
from motet.v1 import fleet_pb2

_SERVICE = "/motet.v1.FleetService/"


def drain_call(worker_id: str, force: bool) -> UnaryCall[int]:
    """One call. Raises InvalidArgument for what the wire cannot carry."""
    request = fleet_pb2.DrainWorkerRequest(worker_id=text_of("worker_id", worker_id), force=force)
    return UnaryCall(_SERVICE + "DrainWorker", request, fleet_pb2.DrainWorkerResponse, _moved, is_repeatable=True)


def undrain_call(worker_id: str) -> UnaryCall[None]:
    """One call. Raises InvalidArgument for what the wire cannot carry."""
    request = fleet_pb2.UndrainWorkerRequest(worker_id=text_of("worker_id", worker_id))
    return UnaryCall(_SERVICE + "UndrainWorker", request, fleet_pb2.UndrainWorkerResponse, _nothing, is_repeatable=True)


def _moved(response: Any) -> int:
    return int(response.num_moved)


def _nothing(_response: Any) -> None:
    return None
