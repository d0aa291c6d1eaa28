"""The google.longrunning.Operations service, and operations as its messages."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

# googleapis-common-protos ships no py.typed marker.
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2
from motet.v1 import adapters_pb2

from contract.process_log import printable
from control_plane.adapters.operations import Operation, OperationStore
from control_plane.api.admin.resource_names import operation_id_in
from control_plane.api.rpc.error_status import internal_status, status_proto
from control_plane.api.wire import MAX_PAGE_BYTES, registered_message, timestamp
from control_plane.audit import actions
from control_plane.audit.audit_log import AuditLog
from control_plane.checks import page_size_of, refuse

SERVICE_NAME = operations_pb2.DESCRIPTOR.services_by_name["Operations"].full_name
MAX_WAIT_S = 300.0
OPERATIONS_AT_ONCE = 32  # of a page, before other tasks get a turn of the event loop
Context = grpc.aio.ServicerContext[Any, Any]


class OperationsService(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]  # the stub is untyped
    """google.longrunning.Operations over one store."""

    def __init__(self, store: OperationStore, audit: AuditLog | None = None) -> None:
        self._store = store
        self._audit = audit or AuditLog()

    async def GetOperation(self, request: Any, _context: Context) -> Any:  # noqa: N802
        return operation_message(self._store.get(operation_id_in(request.name)))

    async def ListOperations(self, request: Any, _context: Context) -> Any:  # noqa: N802
        """A page of operations, which ends before it is too large for a client."""
        if request.filter:
            raise refuse("filter", "filters are not supported; leave it empty")
        page_size = page_size_of(request.page_size, request.page_token)
        operations, next_token = self._store.page(page_size, request.page_token)
        response = operations_pb2.ListOperationsResponse(next_page_token=next_token)
        num_bytes = 0
        for place, operation in enumerate(operations):
            if num_bytes >= MAX_PAGE_BYTES:
                response.next_page_token = operation.operation_id
                return response
            message = operation_message(operation)
            num_bytes += message.ByteSize()
            response.operations.append(message)
            if place % OPERATIONS_AT_ONCE == OPERATIONS_AT_ONCE - 1:
                await asyncio.sleep(0)
        return response

    async def WaitOperation(self, request: Any, _context: Context) -> Any:  # noqa: N802
        """The operation when it is done, or as it is after the timeout."""
        operation = self._store.get(operation_id_in(request.name))
        timeout_s = MAX_WAIT_S
        if request.HasField("timeout"):
            timeout_s = min(request.timeout.ToNanoseconds() / 1e9, MAX_WAIT_S)
            if timeout_s < 0:
                raise refuse("timeout", f"is {timeout_s:g} s; use at least 0 s")
        await operation.wait(timeout_s)
        return operation_message(operation)

    async def CancelOperation(self, request: Any, _context: Context) -> empty_pb2.Empty:  # noqa: N802
        """Best effort: a deletion goes on."""
        async with self._audit.change(actions.CANCEL_OPERATION, printable(request.name, 100)):
            self._store.get(operation_id_in(request.name)).cancel()
        return empty_pb2.Empty()

    async def DeleteOperation(self, request: Any, _context: Context) -> empty_pb2.Empty:  # noqa: N802
        async with self._audit.change(actions.DELETE_OPERATION, printable(request.name, 100)):
            self._store.forget(operation_id_in(request.name))
        return empty_pb2.Empty()


def operation_message(operation: Operation) -> Any:
    """The google.longrunning.Operation, with the result once the operation is done."""
    message = operations_pb2.Operation(name=f"operations/{operation.operation_id}", done=operation.is_done)
    metadata = adapters_pb2.AdapterOperationMetadata(
        adapter=f"adapters/{operation.adapter_id}",
        verb=operation.verb,
        create_time=timestamp(operation.create_time_s),
        digest=operation.digest,
        phase=operation.progress.phase,
        bytes_done=operation.progress.bytes_done,
        bytes_total=operation.progress.bytes_total,
    )
    message.metadata.Pack(metadata)
    if not operation.is_done:
        return message
    if operation.error is not None:
        message.error.CopyFrom(status_proto(operation.error))
    elif operation.correlation_id:
        message.error.CopyFrom(internal_status(operation.correlation_id))
    elif operation.is_cancelled:
        message.error.code = grpc.StatusCode.CANCELLED.value[0]
        message.error.message = "cancelled before it was done"
    elif operation.registered is not None:
        message.response.Pack(registered_message(operation.registered))
    else:
        message.response.Pack(empty_pb2.Empty())
    return message
