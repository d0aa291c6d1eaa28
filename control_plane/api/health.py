"""grpc.health.v1: whether the process, the adapter service and the generation service take work.

A servicer of our own: the library's holds a lock while it writes to a watcher, so that one watcher who does not read
stops every change of its service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.api.admin import adapters
from control_plane.api.generation import service as generation

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_Status = health_pb2.HealthCheckResponse
Context = grpc.aio.ServicerContext[Any, Any]


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the stub is untyped
    """Knows the status of each service and sends every change to those that watch it."""

    def __init__(self) -> None:
        self._status: dict[str, int] = {}  # by service, a ServingStatus
        self._is_closed = False
        self._changed = asyncio.Event()  # set at the next change, and replaced by another one then

    # The stubs name the methods.
    # ruff: noqa: N802

    def set(self, service: str, *, is_serving: bool) -> None:
        """Set the status of `service`. Changes nothing after `close`."""
        if not self._is_closed:
            self._status[service] = _Status.SERVING if is_serving else _Status.NOT_SERVING
            self._notify()

    def close(self) -> None:
        """NOT_SERVING everywhere, for good."""
        self._is_closed = True
        self._status = dict.fromkeys(self._status, _Status.NOT_SERVING)
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """The status at present."""
        status = self._status.get(request.service)
        if status is None:
            await _abort_unknown(request.service, context)
        return _Status(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, _context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status at present, then each change that is still true when the watcher has read the one before."""
        sent = None
        while True:
            changed = self._changed  # taken before the status is read, so that no change is missed
            status = self._status.get(request.service, _Status.SERVICE_UNKNOWN)
            if status != sent:
                yield _Status(status=status)
                sent = status
            await changed.wait()

    async def List(self, _request: health_pb2.HealthListRequest, _context: Context) -> health_pb2.HealthListResponse:
        """The status of every service at present."""
        return health_pb2.HealthListResponse(
            statuses={service: _Status(status=status) for service, status in self._status.items()}
        )


async def _abort_unknown(service: str, context: Context) -> NoReturn:
    names = ", ".join((adapters.SERVICE_NAME, generation.SERVICE_NAME))
    await context.abort(
        grpc.StatusCode.NOT_FOUND, f"service: {service[:80]!r} is not known; use {names}, or leave it empty"
    )
    raise AssertionError("abort raises")


class HealthReporter:
    """Keeps the health service in step: "" is the process, GenerationService needs workers that get on."""

    def __init__(self, service: HealthService, is_serving: Callable[[], bool]) -> None:
        self._service = service
        self._is_serving = is_serving

    def start(self) -> None:
        """Set every service for the first time."""
        self._service.set("", is_serving=True)
        self._service.set(adapters.SERVICE_NAME, is_serving=True)
        self.on_workers_changed()

    def on_workers_changed(self) -> None:
        """Report the health anew; give it to Fleet.on_workers_changed."""
        self._service.set(generation.SERVICE_NAME, is_serving=self._is_serving())

    def stop(self) -> None:
        """NOT_SERVING everywhere, for good."""
        self._service.close()
