"""AdapterService: translates between the messages of operators and the life cycle of adapters. Decides nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

# googleapis-common-protos ships no py.typed marker.
from google.longrunning import operations_pb2
from motet.v1 import adapters_pb2, adapters_pb2_grpc

from control_plane.adapters.life_cycle import AdapterLifeCycle, Registration
from control_plane.adapters.operations import OperationStore
from control_plane.adapters.roots import AdapterRoots
from control_plane.api import wire
from control_plane.api.admin.idempotency_cache import IdempotencyCache
from control_plane.api.admin.operations import operation_message
from control_plane.api.admin.ownership import FIELDS, change_of, change_of_fields, check_ownership
from control_plane.api.admin.resource_names import adapter_id_in, operation_id_in
from control_plane.api.admin.upload import UploadReceiver
from control_plane.api.gate import ShutdownGate
from control_plane.api.rollout_fields import FIELDS as ROLLOUT_FIELDS, checked_rollout_change, checked_version_rollout
from control_plane.audit import actions
from control_plane.audit.audit_log import AuditLog
from control_plane.caller import current_caller
from control_plane.checks import (
    Violations,
    check_adapter_id,
    check_digest,
    check_display_name,
    check_labels,
    check_request_id,
    page_size_of,
    refuse,
    require,
)
from control_plane.errors import BaseModelMismatch, InvalidRequest, SignatureInvalid, Unavailable
from control_plane.registry.catalog import versions_page
from control_plane.registry.registry import Registry

SERVICE_NAME = adapters_pb2.DESCRIPTOR.services_by_name["AdapterService"].full_name
ADAPTERS_AT_ONCE = 32  # of a page, before other tasks get a turn of the event loop
CHANGEABLE = ("labels", "display_name", *FIELDS, *ROLLOUT_FIELDS)  # what an update mask may name
MAX_MASK_PATHS = 16  # more than there are fields that can be changed
Context = grpc.aio.ServicerContext[Any, Any]


class AdapterService(adapters_pb2_grpc.AdapterServiceServicer):
    """See protos/motet/v1/adapters.proto."""

    def __init__(
        self,
        *,
        registry: Registry,
        life_cycle: AdapterLifeCycle,
        operations: OperationStore,
        gate: ShutdownGate,
        uploads: UploadReceiver,
        roots: AdapterRoots,
        idempotency: IdempotencyCache,
        audit: AuditLog | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._audit = audit or AuditLog()
        self._wall_clock = wall_clock  # seconds since 1970
        self._registry = registry
        self._life_cycle = life_cycle
        self._operations = operations
        self._gate = gate
        self._uploads = uploads
        self._roots = roots
        self._idempotency = idempotency

    # The stubs name the methods.
    # ruff: noqa: N802

    async def UploadAdapter(
        self, request_iterator: AsyncIterator[adapters_pb2.UploadAdapterRequest], context: Context
    ) -> adapters_pb2.UploadAdapterResponse:
        """Receive, check, register."""
        self._gate.check()
        holder = current_caller().holder
        async with self._audit.change(actions.UPLOAD) as change, self._uploads.open(request_iterator, holder) as upload:
            header = upload.header
            change.resource, change.request_id = f"adapters/{header.adapter_id}", header.request_id

            async def register() -> adapters_pb2.UploadAdapterResponse:
                registration = _registration(header)
                self._life_cycle.check_registrable(registration)  # before gigabytes are received
                files = await upload.receive()
                await check_whole(context)
                try:
                    registered = await self._life_cycle.register(registration, files)
                except (InvalidRequest, SignatureInvalid, BaseModelMismatch):
                    upload.end()
                    raise
                upload.end()
                change.digest = registered.digest
                return adapters_pb2.UploadAdapterResponse(adapter=wire.registered_message(registered))

            return await self._idempotency.once(
                "UploadAdapter",
                header.request_id,
                header,
                register,
                adapters_pb2.UploadAdapterResponse,
                field="header.request_id",
            )

    async def GetUpload(
        self, request: adapters_pb2.GetUploadRequest, _context: Context
    ) -> adapters_pb2.GetUploadResponse:
        """What came of one upload of the caller."""
        if not request.upload_id:
            raise refuse("upload_id", "is empty; give the header.upload_id of the upload")
        require(check_request_id, request.upload_id, "upload_id")
        return adapters_pb2.GetUploadResponse(received_bytes=self._uploads.received_bytes(request.upload_id))

    async def CreateAdapter(
        self, request: adapters_pb2.CreateAdapterRequest, _context: Context
    ) -> operations_pb2.Operation:
        """Register from an operator's root, as an operation, which downloads what lies elsewhere."""
        self._gate.check()
        violations = Violations()
        check_adapter_id(request.adapter_id, "adapter_id", violations)
        check_display_name(request.display_name, "display_name", violations)
        check_labels(request.labels, "labels", violations)
        check_request_id(request.request_id, "request_id", violations)
        check_ownership(request, "", violations)
        checked_version_rollout(request, "", violations)
        violations.raise_if_any()
        source = await self._roots.find(request.source)

        async def start() -> operations_pb2.Operation:
            return operation_message(self._life_cycle.start_registering(_registration(request), source))

        begun = await self._idempotency.once(
            "CreateAdapter", request.request_id, request, start, operations_pb2.Operation
        )
        return self._present(begun)

    async def GetAdapter(
        self, request: adapters_pb2.GetAdapterRequest, _context: Context
    ) -> adapters_pb2.GetAdapterResponse:
        """One adapter with modules and placements."""
        record = self._registry.get(adapter_id_in(request.name))
        return adapters_pb2.GetAdapterResponse(
            adapter=wire.adapter_message(record, with_modules=True, placements=self._life_cycle.placements(record))
        )

    async def ListAdapters(
        self, request: adapters_pb2.ListAdaptersRequest, _context: Context
    ) -> adapters_pb2.ListAdaptersResponse:
        """A page of adapters, made in pieces: with all the labels that they may have, a thousand take 0.4 s."""
        num_left, after = page_size_of(request.page_size, request.page_token), request.page_token
        response = adapters_pb2.ListAdaptersResponse()
        num_bytes = 0
        while True:
            # The name to go on after may be one that the caller does not see: it never gets into the response.
            records, after = self._registry.list_part(after, min(num_left, ADAPTERS_AT_ONCE) or 1)
            if records and (num_left == 0 or num_bytes >= wire.MAX_PAGE_BYTES):
                response.next_page_token = response.adapters[-1].name.removeprefix("adapters/")
                return response
            for record in records:
                message = wire.adapter_message(record)
                num_bytes += message.ByteSize()
                response.adapters.append(message)
            num_left -= len(records)
            if not after:
                return response
            await asyncio.sleep(0)

    async def ListAdapterVersions(
        self, request: adapters_pb2.ListAdapterVersionsRequest, _context: Context
    ) -> adapters_pb2.ListAdapterVersionsResponse:
        """A page of one adapter's versions."""
        adapter_id = adapter_id_in(request.name)
        size = page_size_of(request.page_size, request.page_token)
        record = self._registry.get(adapter_id)
        versions, next_token = versions_page(record, size, request.page_token)
        labels_of = record.rollout.labels_of
        return adapters_pb2.ListAdapterVersionsResponse(
            versions=[wire.version_message(version, labels=labels_of(version.digest)) for version in versions],
            next_page_token=next_token,
        )

    async def UpdateAdapter(
        self, request: adapters_pb2.UpdateAdapterRequest, _context: Context
    ) -> adapters_pb2.UpdateAdapterResponse:
        """Change the description, who sees the adapter, or its rollout."""
        self._gate.check()
        adapter = request.adapter
        adapter_id = adapter_id_in(adapter.name, "adapter.name")
        violations = Violations()
        if len(request.update_mask.paths) > MAX_MASK_PATHS:
            raise refuse("update_mask", f"{len(request.update_mask.paths)} paths; at most {MAX_MASK_PATHS}")
        mask = set(request.update_mask.paths)
        if not mask:
            violations.add("update_mask", f"empty; name what to change: {', '.join(CHANGEABLE)}")
        for path in sorted(mask.difference(CHANGEABLE)):
            violations.add("update_mask", f"{path[:64]!r} cannot be changed; only {', '.join(CHANGEABLE)} can")
        check_display_name(adapter.display_name, "adapter.display_name", violations)
        check_labels(adapter.labels, "adapter.labels", violations)
        check_ownership(adapter, "adapter.", violations)
        if "visibility" in mask and not adapter.visibility:
            violations.add("adapter.visibility", "is unset; set it, or leave it out of update_mask")
        rollout = checked_rollout_change(request, mask, self._wall_clock(), violations)
        violations.raise_if_any()
        record = await self._life_cycle.update(
            adapter_id,
            display_name=adapter.display_name if "display_name" in mask else None,
            labels=dict(adapter.labels) if "labels" in mask else None,
            ownership=change_of_fields(adapter, mask),
            rollout=rollout,
            etag=adapter.etag,
        )
        return adapters_pb2.UpdateAdapterResponse(adapter=wire.adapter_message(record))

    async def ActivateAdapterVersion(
        self, request: adapters_pb2.ActivateAdapterVersionRequest, _context: Context
    ) -> adapters_pb2.ActivateAdapterVersionResponse:
        """Flip the name to another version."""
        self._gate.check()
        adapter_id = adapter_id_in(request.name)
        violations = Violations()
        check_digest(request.digest, "digest", violations)
        if request.expected_digest:
            check_digest(request.expected_digest, "expected_digest", violations)
        violations.raise_if_any()
        record = await self._life_cycle.activate(
            adapter_id, request.digest, request.etag, expected_digest=request.expected_digest
        )
        return adapters_pb2.ActivateAdapterVersionResponse(adapter=wire.adapter_message(record))

    async def RollbackAdapter(
        self, request: adapters_pb2.RollbackAdapterRequest, _context: Context
    ) -> adapters_pb2.RollbackAdapterResponse:
        """Flip the name to the version that was active before."""
        self._gate.check()
        adapter_id = adapter_id_in(request.name)
        if request.expected_digest:
            require(check_digest, request.expected_digest, "expected_digest")
        record = await self._life_cycle.roll_back(adapter_id, request.etag, expected_digest=request.expected_digest)
        return adapters_pb2.RollbackAdapterResponse(adapter=wire.adapter_message(record))

    async def PinAdapter(
        self, request: adapters_pb2.PinAdapterRequest, _context: Context
    ) -> adapters_pb2.PinAdapterResponse:
        """Keep it in the host cache."""
        self._gate.check()
        adapter_id = adapter_id_in(request.name)
        record = await self._life_cycle.pin(adapter_id)
        return adapters_pb2.PinAdapterResponse(
            adapter=wire.adapter_message(record, placements=self._life_cycle.placements(record))
        )

    async def UnpinAdapter(
        self, request: adapters_pb2.UnpinAdapterRequest, _context: Context
    ) -> adapters_pb2.UnpinAdapterResponse:
        """Take the pin back."""
        self._gate.check()
        adapter_id = adapter_id_in(request.name)
        record = await self._life_cycle.unpin(adapter_id)
        return adapters_pb2.UnpinAdapterResponse(adapter=wire.adapter_message(record))

    async def DeleteAdapter(
        self, request: adapters_pb2.DeleteAdapterRequest, _context: Context
    ) -> operations_pb2.Operation:
        """Refuse new requests at once; the operation ends when every tier is clear. One deletion runs per name."""
        self._gate.check()
        adapter_id = adapter_id_in(request.name)
        require(check_request_id, request.request_id, "request_id")

        async def start() -> operations_pb2.Operation:
            return operation_message(await self._life_cycle.delete(adapter_id, request.etag))

        return await self._begin_once("DeleteAdapter", request, start)

    async def DeleteAdapterVersion(
        self, request: adapters_pb2.DeleteAdapterVersionRequest, _context: Context
    ) -> operations_pb2.Operation:
        """Refuse new requests of the version at once; the operation ends when no tier has the version."""
        self._gate.check()
        adapter_id = adapter_id_in(request.name)
        violations = Violations()
        check_digest(request.digest, "digest", violations)
        check_request_id(request.request_id, "request_id", violations)
        violations.raise_if_any()

        async def start() -> operations_pb2.Operation:
            return operation_message(await self._life_cycle.delete_version(adapter_id, request.digest, request.etag))

        return await self._begin_once("DeleteAdapterVersion", request, start)

    async def _begin_once(
        self,
        method: str,
        request: adapters_pb2.DeleteAdapterRequest | adapters_pb2.DeleteAdapterVersionRequest,
        start: Callable[[], Awaitable[operations_pb2.Operation]],
    ) -> operations_pb2.Operation:
        """The deletion that this request, or an earlier one with its request id, began: as it stands now.

        A client that leaves may send the call again: the id is remembered though the handler is cancelled.
        """
        once = self._idempotency.once(method, request.request_id, request, start, operations_pb2.Operation)
        return self._present(await asyncio.shield(asyncio.ensure_future(once)))

    def _present(self, begun: operations_pb2.Operation) -> operations_pb2.Operation:
        """An operation as it stands now; as it began where it is not known any more."""
        operation = self._operations.find(operation_id_in(begun.name))
        return begun if operation is None else operation_message(operation)


def _registration(message: adapters_pb2.UploadHeader | adapters_pb2.CreateAdapterRequest) -> Registration:
    return Registration(
        adapter_id=message.adapter_id,
        display_name=message.display_name,
        labels=dict(message.labels),
        ownership=change_of(message),
        rollout=checked_version_rollout(message, "", Violations()),
        validate_only=message.validate_only,
    )


async def check_whole(context: Context) -> None:
    """Raise Unavailable unless the client ended its side in order.

    The end of a cancelled or cut-off stream looks like an orderly one, and comes before the cancellation is known. But
    nothing can be sent on such a stream any more.
    """
    try:
        await context.send_initial_metadata(())
    except Exception as error:
        raise Unavailable("the upload was cut off before its end; nothing was registered") from error
