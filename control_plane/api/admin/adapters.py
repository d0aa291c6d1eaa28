"""AdapterService: registers, lists, pins and deletes adapters.

Translates between messages and the registry, the host cache and the fleet, in the order that keeps every tier
consistent. One audit line per mutation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio

# googleapis-common-protos ships no py.typed marker.
from google.longrunning import operations_pb2  # type: ignore[import-untyped]
from google.protobuf import empty_pb2
from motet.v1 import adapters_pb2, adapters_pb2_grpc

from control_plane.api import wire
from control_plane.api.admin.adapter_roots import AdapterRoots
from control_plane.api.admin.idempotency_cache import IdempotencyCache
from control_plane.api.admin.operations import OperationBook
from control_plane.api.admin.upload import UploadReceiver
from control_plane.api.gate import DrainGate
from control_plane.api.pins import Pins
from control_plane.api.validation import (
    MAX_PAGE_BYTES,
    Violations,
    adapter_id_of,
    check_adapter_id,
    check_digest,
    check_display_name,
    check_labels,
    check_request_id,
    page_size_of,
    refuse,
)
from control_plane.errors import MotetError, Unavailable
from control_plane.fleet.fleet import Fleet
from control_plane.host_cache.weights import AdapterWeights
from control_plane.registry.records import AdapterRecord, Registered
from control_plane.registry.registry import Registry

logger = logging.getLogger(__name__)
audit = logging.getLogger("motet.audit")

SERVICE_NAME = adapters_pb2.DESCRIPTOR.services_by_name["AdapterService"].full_name
T = TypeVar("T")
ADAPTERS_AT_ONCE = 32  # of a page, before others have their turn of the event loop
MAX_MASK_PATHS = 16  # more than there are fields that can be changed
Context = grpc.aio.ServicerContext[Any, Any]


class AdapterService(adapters_pb2_grpc.AdapterServiceServicer):
    """See protos/motet/v1/adapters.proto."""

    def __init__(
        self,
        *,
        registry: Registry,
        weights: AdapterWeights,
        fleet: Fleet,
        gate: DrainGate,
        book: OperationBook,
        pins: Pins,
        uploads: UploadReceiver,
        roots: AdapterRoots,
        idempotency: IdempotencyCache,
    ) -> None:
        self._registry = registry
        self._weights = weights
        self._fleet = fleet
        self._gate = gate
        self._book = book
        self._pins = pins
        self._uploads = uploads
        self._roots = roots
        self._idempotency = idempotency
        # The operations of deletions that have not ended, by (adapter id, digest of the version or "" for all).
        self._deletions: dict[tuple[str, str], asyncio.Task[Any]] = {}

    # The stubs name the methods.
    # ruff: noqa: N802

    async def UploadAdapter(
        self, request_iterator: AsyncIterator[adapters_pb2.UploadAdapterRequest], context: Context
    ) -> adapters_pb2.UploadAdapterResponse:
        """Receive, check, register."""
        self._gate.check()
        with _Audit("upload", context) as line:
            async with self._uploads.open(request_iterator, context.peer()) as upload:
                header = upload.header
                line.adapter_id = header.adapter_id

                async def register() -> adapters_pb2.UploadAdapterResponse:
                    files = await upload.receive()
                    await _check_whole(context)
                    registered = await self._register(header, files)
                    line.digest = registered.record.active_digest
                    return adapters_pb2.UploadAdapterResponse(adapter=wire.registered_message(registered))

                return await self._idempotency.once(
                    "UploadAdapter",
                    header.request_id,
                    header,
                    register,
                    adapters_pb2.UploadAdapterResponse,
                    field="header.request_id",
                )

    async def CreateAdapter(self, request: adapters_pb2.CreateAdapterRequest, context: Context) -> Any:
        """Register from an operator's root, as an operation."""
        self._gate.check()
        violations = Violations()
        check_adapter_id(request.adapter_id, "adapter_id", violations)
        check_display_name(request.display_name, "display_name", violations)
        check_labels(request.labels, "labels", violations)
        check_request_id(request.request_id, violations)
        violations.raise_if_any()
        files = await self._roots.files(request.source)
        peer = context.peer()

        async def work() -> adapters_pb2.Adapter:
            with _Audit("create", peer, request.adapter_id) as line:
                registered = await self._register(request, files)
                line.digest = registered.record.active_digest
                return wire.registered_message(registered)

        async def start() -> Any:
            return self._book.start(request.adapter_id, "create", work, is_cancellable=True)

        begun = await self._idempotency.once(
            "CreateAdapter", request.request_id, request, start, operations_pb2.Operation
        )
        return self._book.as_it_stands(begun)

    async def GetAdapter(
        self, request: adapters_pb2.GetAdapterRequest, _context: Context
    ) -> adapters_pb2.GetAdapterResponse:
        """One adapter with modules and placements."""
        record = self._registry.get(adapter_id_of(request.name))
        return adapters_pb2.GetAdapterResponse(
            adapter=wire.adapter_message(record, with_modules=True, placements=self._placements(record))
        )

    async def ListAdapters(
        self, request: adapters_pb2.ListAdaptersRequest, _context: Context
    ) -> adapters_pb2.ListAdaptersResponse:
        """A page of adapters, made in pieces: with all the labels that they may have, a thousand take 0.4 s."""
        num_left, token = page_size_of(request.page_size, request.page_token), request.page_token
        response = adapters_pb2.ListAdaptersResponse()
        num_bytes = 0
        while True:
            records, token = self._registry.list_page(min(num_left, ADAPTERS_AT_ONCE), token)
            for record in records:
                message = wire.adapter_message(record)
                num_bytes += message.ByteSize()
                response.adapters.append(message)
            num_left -= len(records)
            if not (token and num_left and num_bytes < MAX_PAGE_BYTES):
                response.next_page_token = token
                return response
            await asyncio.sleep(0)

    async def ListAdapterVersions(
        self, request: adapters_pb2.ListAdapterVersionsRequest, _context: Context
    ) -> adapters_pb2.ListAdapterVersionsResponse:
        """A page of one adapter's versions."""
        adapter_id = adapter_id_of(request.name)
        size = page_size_of(request.page_size, request.page_token)
        versions, next_token = self._registry.versions_page(adapter_id, size, request.page_token)
        return adapters_pb2.ListAdapterVersionsResponse(
            versions=[wire.version_message(version) for version in versions], next_page_token=next_token
        )

    async def UpdateAdapter(
        self, request: adapters_pb2.UpdateAdapterRequest, context: Context
    ) -> adapters_pb2.UpdateAdapterResponse:
        """Change labels, display name or both."""
        self._gate.check()
        adapter = request.adapter
        adapter_id = adapter_id_of(adapter.name, "adapter.name")
        violations = Violations()
        if len(request.update_mask.paths) > MAX_MASK_PATHS:
            raise refuse("update_mask", f"{len(request.update_mask.paths)} paths; at most {MAX_MASK_PATHS}")
        mask = set(request.update_mask.paths)
        if not mask:
            violations.add("update_mask", 'empty; name "labels", "display_name" or both')
        for path in sorted(mask - {"labels", "display_name"}):
            violations.add("update_mask", f'{path[:64]!r} cannot be changed; only "labels" and "display_name" can')
        check_display_name(adapter.display_name, "adapter.display_name", violations)
        check_labels(adapter.labels, "adapter.labels", violations)
        violations.raise_if_any()
        with _Audit("update", context, adapter_id):
            record = await self._registry.update(
                adapter_id,
                display_name=adapter.display_name if "display_name" in mask else None,
                labels=dict(adapter.labels) if "labels" in mask else None,
                etag=adapter.etag,
            )
        return adapters_pb2.UpdateAdapterResponse(adapter=wire.adapter_message(record))

    async def ActivateAdapterVersion(
        self, request: adapters_pb2.ActivateAdapterVersionRequest, context: Context
    ) -> adapters_pb2.ActivateAdapterVersionResponse:
        """Flip the name to another version."""
        self._gate.check()
        adapter_id = adapter_id_of(request.name)
        violations = Violations()
        check_digest(request.digest, "digest", violations)
        violations.raise_if_any()

        async def activate() -> AdapterRecord:
            record = await self._registry.activate(adapter_id, request.digest, request.etag)
            await self._pins.follow(adapter_id)
            return record

        with _Audit("activate", context, adapter_id, request.digest):
            record = await _to_the_end(activate())
        return adapters_pb2.ActivateAdapterVersionResponse(adapter=wire.adapter_message(record))

    async def PinAdapter(
        self, request: adapters_pb2.PinAdapterRequest, context: Context
    ) -> adapters_pb2.PinAdapterResponse:
        """Keep it in the host cache."""
        self._gate.check()
        adapter_id = adapter_id_of(request.name)
        with _Audit("pin", context, adapter_id):
            record = await _to_the_end(self._pins.pin(adapter_id))
        # Placements tell whether it is in the host cache by now: a cache that is away gets it when it is back.
        return adapters_pb2.PinAdapterResponse(
            adapter=wire.adapter_message(record, placements=self._placements(record))
        )

    async def UnpinAdapter(
        self, request: adapters_pb2.UnpinAdapterRequest, context: Context
    ) -> adapters_pb2.UnpinAdapterResponse:
        """Take the pin back."""
        self._gate.check()
        adapter_id = adapter_id_of(request.name)
        with _Audit("unpin", context, adapter_id):
            record = await _to_the_end(self._pins.unpin(adapter_id))
        return adapters_pb2.UnpinAdapterResponse(adapter=wire.adapter_message(record))

    async def DeleteAdapter(self, request: adapters_pb2.DeleteAdapterRequest, context: Context) -> Any:
        """Refuse new requests at once; the operation ends when every tier is clear. One deletion runs per name."""
        self._gate.check()
        adapter_id = adapter_id_of(request.name)
        with _Audit("delete", context, adapter_id):
            return await self._begun((adapter_id, ""), self._begin_delete(adapter_id, request.etag))

    async def DeleteAdapterVersion(self, request: adapters_pb2.DeleteAdapterVersionRequest, context: Context) -> Any:
        """Refuse new requests of the version at once; the operation ends when every tier is clear of it."""
        self._gate.check()
        adapter_id = adapter_id_of(request.name)
        violations = Violations()
        check_digest(request.digest, "digest", violations)
        violations.raise_if_any()
        with _Audit("delete_version", context, adapter_id, request.digest):
            begin = self._begin_delete_version(adapter_id, request.digest, request.etag)
            return await self._begun((adapter_id, request.digest), begin)

    async def _register(
        self, asked: adapters_pb2.UploadHeader | adapters_pb2.CreateAdapterRequest, files: Mapping[str, Path]
    ) -> Registered:
        try:
            registered = await self._registry.register(
                asked.adapter_id,
                files,
                display_name=asked.display_name,
                labels=dict(asked.labels),
                validate_only=asked.validate_only,
            )
            if not asked.validate_only:
                self._fleet.keep(registered.record.active_digest)
                self._weights.stored_anew(registered.record.active_digest)
            return registered
        finally:  # cancelled, it may be registered all the same
            if not asked.validate_only:
                await _to_the_end(self._pins.follow(asked.adapter_id))

    async def _begun(self, key: tuple[str, str], begin: Coroutine[Any, Any, Any]) -> Any:
        """The operation of a deletion. One runs at a time for each key; a second call joins it."""
        begun = self._deletions.get(key)
        if begun is None:
            begun = self._deletions[key] = asyncio.ensure_future(begin)
            begun.add_done_callback(partial(self._forget_failed, key))
        else:
            begin.close()
        # A client that leaves now must not leave a name behind that is being deleted and never gone.
        return await asyncio.shield(begun)

    def _forget_failed(self, key: tuple[str, str], begun: asyncio.Task[Any]) -> None:
        """A deletion that could not begin may be tried again."""
        if begun.cancelled() or begun.exception() is not None:
            del self._deletions[key]

    async def _begin_delete(self, adapter_id: str, etag: str) -> Any:
        digests = await self._registry.begin_delete(adapter_id, etag)

        async def work() -> empty_pb2.Empty:
            try:
                await self.clear(adapter_id, digests)
            finally:
                del self._deletions[adapter_id, ""]
            return empty_pb2.Empty()

        return self._book.start(adapter_id, "delete", work, is_cancellable=False, is_waiting=True)

    async def _begin_delete_version(self, adapter_id: str, digest: str, etag: str) -> Any:
        await self._registry.begin_delete_version(adapter_id, digest, etag)

        async def work() -> empty_pb2.Empty:
            try:
                await self._clear_digest(digest)
                await self._registry.finish_delete_version(digest)
            finally:
                del self._deletions[adapter_id, digest]
            return empty_pb2.Empty()

        return self._book.start(
            adapter_id, "delete_version", work, is_cancellable=False, is_waiting=True, digest=digest
        )

    async def clear(self, adapter_id: str, digests: Sequence[str]) -> None:
        """Take a name that is being deleted, and its versions, out of every tier."""
        await self._pins.forget(adapter_id)
        for digest in digests:
            await self._clear_digest(digest)
        await self._registry.finish_delete(adapter_id)
        logger.info("adapter deleted adapter_id=%s num_digests=%d", adapter_id, len(digests))

    async def _clear_digest(self, digest: str) -> None:
        """Take weights out of arenas and host cache, unless a name has them: one may, at any time."""
        if not self._registry.is_named(digest):
            await self._fleet.retire(digest)
        if not self._registry.is_named(digest):
            await self._weights.drop(digest)

    def _placements(self, record: AdapterRecord) -> list[adapters_pb2.AdapterPlacement]:
        digest = record.active_digest
        if not digest:
            return []
        placements = [adapters_pb2.AdapterPlacement(tier=adapters_pb2.ADAPTER_TIER_STORE)]
        if self._weights.is_cached(digest):
            placements.append(adapters_pb2.AdapterPlacement(tier=adapters_pb2.ADAPTER_TIER_HOST_CACHE))
        placements += [
            adapters_pb2.AdapterPlacement(tier=adapters_pb2.ADAPTER_TIER_ARENA, worker_id=worker_id)
            for worker_id in self._fleet.placements(digest)
        ]
        return placements


async def _check_whole(context: Context) -> None:
    """Raise Unavailable unless the client ended its side in order.

    The end of a cancelled or cut-off stream looks like an orderly one, and comes before the cancellation is known. But
    nothing can be sent on such a stream any more.
    """
    try:
        await context.send_initial_metadata(())
    except Exception as error:
        raise Unavailable("the upload was cut off before its end; nothing was registered") from error


async def _to_the_end(change: Coroutine[Any, Any, T]) -> T:
    """What the change gives. It is made to its end even if the client leaves, so that the tiers stay consistent."""
    return await asyncio.shield(asyncio.ensure_future(change))


class _Audit:
    """Writes one line when a mutation ends: who, what, which digest, how it went."""

    def __init__(self, verb: str, caller: Context | str, adapter_id: str = "", digest: str = "") -> None:
        self._verb = verb
        self._peer = caller if isinstance(caller, str) else caller.peer()
        self.adapter_id = adapter_id
        self.digest = digest

    def __enter__(self) -> _Audit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        result = "ok" if kind is None else error.reason if isinstance(error, MotetError) else kind.__name__
        audit.info(
            "verb=%s adapter_id=%s digest=%s peer=%s result=%s",
            self._verb,
            self.adapter_id,
            self.digest,
            self._peer,
            result,
        )
