"""The life of an adapter over every tier: the store, the host cache, and the slots of the workers.

Owns the order in which the tiers change, so that they agree with the registry also when a client leaves half-way, or
when another name has the same weights. Every change writes a line of the audit log. Knows nothing of messages and
connections. What only reads goes to the registry, which also judges what the caller may see and change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from control_plane.access.visibility import Ownership, may_change
from control_plane.adapters.operations import Operation, OperationStore
from control_plane.adapters.pins import Pins
from control_plane.adapters.sources.adapter_source import AdapterSource
from control_plane.adapters.sources.progress import Progress
from control_plane.audit import actions
from control_plane.audit.audit_log import AuditLog
from control_plane.caller import current_caller
from control_plane.errors import AdapterNotActive
from control_plane.fleet.fleet import Fleet
from control_plane.host_cache.weights import AdapterWeights
from control_plane.registry.adapter_files import format_of
from control_plane.registry.companions.inherited import NOT_INHERITED, Inherited
from control_plane.registry.ownership_change import NO_CHANGE, OwnershipChange
from control_plane.registry.peft.ingest import PackedInfo
from control_plane.registry.records import AdapterRecord, Registered
from control_plane.registry.registry import Registry
from control_plane.registry.versions.early_versions import Publish
from control_plane.registry.versions.record_changes import NO_ROLLOUT_CHANGE, RolloutChange
from control_plane.registry.versions.rollout import AT_ONCE, VersionRollout
from control_plane.signatures.verdict import SignatureVerdict
from control_plane.signatures.verifier import SignatureVerifier

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Registration:
    """What a client says of the version that it registers, beside the files."""

    adapter_id: str
    display_name: str = ""  # empty: that of the record stays
    labels: Mapping[str, str] = field(default_factory=dict)  # empty: those of the record stay
    ownership: OwnershipChange = NO_CHANGE  # a new name is the caller's, and private
    rollout: VersionRollout = AT_ONCE
    source: str = ""  # where the files came from, as it is stored with the version
    validate_only: bool = False  # check and pack the files, and store nothing


@dataclass(frozen=True, slots=True)
class Placements:
    """Where the weights of an adapter's active version are."""

    is_stored: bool = False
    is_host_cached: bool = False
    worker_ids: tuple[str, ...] = ()  # workers that have them in a slot


@dataclass(frozen=True, slots=True)
class _Deletion:
    """A deletion that has not ended."""

    ownership: Ownership  # of the adapter when the deletion began
    begun: asyncio.Task[Operation]  # ends as soon as new requests are refused


class AdapterLifeCycle:
    """Registers, activates, pins and deletes adapters. Used from one event loop."""

    def __init__(
        self,
        *,
        registry: Registry,
        weights: AdapterWeights,
        fleet: Fleet,
        operations: OperationStore,
        audit: AuditLog | None = None,
        signatures: SignatureVerifier | None = None,
        max_pinned_bytes: Callable[[str], int | None] = lambda _tenant: None,
        has_task: Callable[[str], bool] = lambda _digest: False,
    ) -> None:
        """`audit`: None for lines of the process log alone. `signatures`: None if they are not looked at.

        `has_task`: whether a LoRA task has the weights of this digest.
        """
        self._has_task = has_task
        self._signatures = signatures or SignatureVerifier()
        self._audit = audit or AuditLog()
        self._registry = registry
        self._weights = weights
        self._fleet = fleet
        self._operations = operations
        self._pins = Pins(registry, weights, fleet, max_pinned_bytes)
        # The operations of deletions that have not ended, by (adapter id, digest of the version or "" for all).
        self._deletions: dict[tuple[str, str], _Deletion] = {}

    def placements(self, record: AdapterRecord) -> Placements:
        """Where the weights of the active version are at present, as far as the caller may know.

        Other tenants may have the same weights, and use brings them to host cache and workers. So only an admin learns
        of those; other callers learn what a pin of the name itself keeps in the host cache.
        """
        digest = record.active_digest
        is_admin = current_caller().principal.is_admin
        worker_ids = tuple(self._fleet.placements(digest)) if is_admin else ()
        return shown_placements(record, is_cached=self._weights.is_cached(digest), worker_ids=worker_ids)

    async def restore_pins(self) -> None:
        """Pin what the registry says is pinned; run once after a start, beside serving."""
        await self._pins.restore()

    # ---- registering ----

    async def register(
        self,
        registration: Registration,
        files: Mapping[str, Path],
        *,
        may_change: bool = False,
        publish: Publish | None = None,
        inherited: Inherited = NOT_INHERITED,
    ) -> Registered:
        """Check the files and make them a version of the name, rolled out so. The caller writes the audit log.

        The signature counts for the tenant of the current caller. `may_change`: somebody else may write to the files.
        `publish` and `inherited`: as Registry.register has them. If this is cancelled, the version may be registered
        all the same, and pins follow it then.
        """
        is_stored = not registration.validate_only
        try:
            registered = await self._registry.register(
                registration.adapter_id,
                files,
                display_name=registration.display_name,
                labels=registration.labels,
                ownership=registration.ownership,
                rollout=registration.rollout,
                source=registration.source,
                validate_only=registration.validate_only,
                check_files=partial(self._check_signature, current_caller().tenant, may_change),
                publish=publish,
                inherited=inherited,
            )
            if is_stored:
                self._fleet.cancel_unload(registered.digest)
                self._weights.stored_anew(registered.digest)
            return registered
        finally:
            if is_stored:
                await _to_the_end(self._pins.follow(registration.adapter_id))

    def check_registrable(self, registration: Registration) -> None:
        """Raise what registering would raise whatever the files: a name that is another tenant's, for example."""
        self._registry.check_registrable(registration.adapter_id, registration.ownership)

    @contextlib.asynccontextmanager
    async def packed(self, files: Mapping[str, Path]) -> AsyncIterator[PackedInfo]:
        """The files packed, with the checks of `register` and without a name. They are removed when the block ends."""
        check_files = partial(self._check_signature, current_caller().tenant, False)
        async with self._registry.packer.packed(files, threading.Event(), check_files) as packed:
            yield packed

    def _check_signature(
        self, tenant: str, may_change: bool, files: Mapping[str, Path], copies: Path
    ) -> tuple[Mapping[str, Path], SignatureVerdict | None]:
        demanded = format_of(files).companions  # without its chat template the adapter would do something else
        return self._signatures.verify(tenant, files, copies if may_change else None, demanded)

    def start_registering(self, registration: Registration, source: AdapterSource) -> Operation:
        """Register as an operation, which a client can cancel. Raises Exhausted where too many are running.

        The source is opened by the operation: a download counts as a part of it.
        """
        self._audit.check()

        ownership = self._registry.check_registrable(registration.adapter_id, registration.ownership)

        progress = Progress()

        async def work() -> Registered:
            resource = _resource(registration.adapter_id)
            async with self._audit.change(actions.CREATE, resource) as change, source.open(progress) as found:
                from_there = replace(registration, source=found.source)
                registered = await self.register(from_there, found.files, may_change=found.may_change)
                change.digest = registered.digest
                return registered

        return self._operations.start(
            registration.adapter_id, "create", work, owner=ownership.owner, is_cancellable=True, progress=progress
        )

    # ---- changing ----

    async def update(
        self,
        adapter_id: str,
        *,
        display_name: str | None = None,
        labels: Mapping[str, str] | None = None,
        ownership: OwnershipChange = NO_CHANGE,
        rollout: RolloutChange = NO_ROLLOUT_CHANGE,
        etag: str = "",
    ) -> AdapterRecord:
        """Change the description, the ownership and the rollout; None leaves a field as it is."""
        async with self._audit.change(actions.UPDATE, _resource(adapter_id)):
            record = await self._registry.update(
                adapter_id, display_name=display_name, labels=labels, ownership=ownership, rollout=rollout, etag=etag
            )
            if ownership.owner is not None:
                await _to_the_end(self._pins.follow(adapter_id))
            return record

    async def activate(
        self, adapter_id: str, digest: str, etag: str = "", *, expected_digest: str = ""
    ) -> AdapterRecord:
        """Make a registered version the active one, and move the pin of a pinned name to it."""

        async def activate() -> AdapterRecord:
            record = await self._registry.activate(adapter_id, digest, etag, expected_digest=expected_digest)
            await self._pins.follow(adapter_id)
            return record

        async with self._audit.change(actions.ACTIVATE, _resource(adapter_id), digest=digest):
            return await _to_the_end(activate())

    async def roll_back(self, adapter_id: str, etag: str = "", *, expected_digest: str = "") -> AdapterRecord:
        """Make the version active that was active before, and move the pin of a pinned name to it."""

        async def roll_back() -> AdapterRecord:
            record = await self._registry.roll_back(adapter_id, etag, expected_digest=expected_digest)
            await self._pins.follow(adapter_id)
            return record

        async with self._audit.change(actions.ROLL_BACK, _resource(adapter_id)) as change:
            record = await _to_the_end(roll_back())
            change.digest = record.active_digest
            return record

    async def pin(self, adapter_id: str) -> AdapterRecord:
        """Keep the active version in the host cache. Raises PinBudgetExceeded, and changes nothing then.

        A host cache that is not available at present takes the version in when it is back; `placements` says so.
        """
        async with self._audit.change(actions.PIN, _resource(adapter_id)):
            return await _to_the_end(self._pins.pin(adapter_id))

    async def unpin(self, adapter_id: str) -> AdapterRecord:
        """Take the pin back; a name without a pin is fine."""
        async with self._audit.change(actions.UNPIN, _resource(adapter_id)):
            return await _to_the_end(self._pins.unpin(adapter_id))

    # ---- deleting ----

    async def delete(self, adapter_id: str, etag: str = "") -> Operation:
        """Refuse new requests of the name at once. The operation ends when every tier is clear of its versions.

        One deletion runs for each name: a second call returns the operation of the first.
        """
        async with self._audit.change(actions.DELETE, _resource(adapter_id)):
            return await self._joined((adapter_id, ""), partial(self._begin_delete, adapter_id, etag))

    async def delete_version(self, adapter_id: str, digest: str, etag: str = "") -> Operation:
        """Refuse new requests of a version at once. The operation ends when every tier is clear of it.

        One deletion runs for each version: a second call returns the operation of the first.
        """
        async with self._audit.change(actions.DELETE_VERSION, _resource(adapter_id), digest=digest):
            begin = partial(self._begin_delete_version, adapter_id, digest, etag)
            return await self._joined((adapter_id, digest), begin)

    async def _joined(self, key: tuple[str, str], begin: Callable[[str], Coroutine[Any, Any, Operation]]) -> Operation:
        adapter_id, caller = key[0], current_caller()
        deletion = self._deletions.get(key)
        # The deletion knows whose the adapter was: near its end there is no record of the name any more.
        if deletion is None or not may_change(caller.principal, caller.tenant, deletion.ownership, adapter_id):
            ownership = self._registry.changeable(adapter_id).ownership
            if deletion is not None:
                raise AdapterNotActive(f"adapter {adapter_id!r} is being deleted; try again when that has ended")
            begun = asyncio.ensure_future(begin(ownership.owner))
            deletion = self._deletions[key] = _Deletion(ownership, begun)
            begun.add_done_callback(partial(self._forget_failed, key))
        # If the client leaves here, the deletion must go on: the name would stay in deletion for ever.
        return await asyncio.shield(deletion.begun)

    def _forget_failed(self, key: tuple[str, str], begun: asyncio.Task[Operation]) -> None:
        """A deletion that could not begin may be tried again."""
        if begun.cancelled() or begun.exception() is not None:
            del self._deletions[key]

    async def _begin_delete(self, adapter_id: str, etag: str, owner: str) -> Operation:
        digests = await self._registry.begin_delete(adapter_id, etag)

        async def work() -> None:
            try:
                await self._clear(adapter_id, digests)
            finally:
                del self._deletions[adapter_id, ""]

        return self._operations.start(adapter_id, "delete", work, owner=owner, is_cancellable=False, is_waiting=True)

    async def _begin_delete_version(self, adapter_id: str, digest: str, etag: str, owner: str) -> Operation:
        await self._registry.begin_delete_version(adapter_id, digest, etag)

        async def work() -> None:
            try:
                await self.clear_digest(digest)
                await self._registry.finish_delete_version(digest)
            finally:
                del self._deletions[adapter_id, digest]

        return self._operations.start(
            adapter_id, "delete_version", work, owner=owner, is_cancellable=False, is_waiting=True, digest=digest
        )

    async def _clear(self, adapter_id: str, digests: Sequence[str]) -> None:
        """Take a name that is being deleted, and its versions, out of every tier."""
        await self._pins.forget(adapter_id)
        for digest in digests:
            await self.clear_digest(digest)
        await self._registry.finish_delete(adapter_id)
        logger.info("adapter deleted adapter_id=%s num_digests=%d", adapter_id, len(digests))

    async def clear_digest(self, digest: str) -> None:
        """Take weights out of slots and host cache, unless a name or a task has them. These may get them again."""
        if not self._is_wanted(digest):
            await self._fleet.unload(digest)
        if not self._is_wanted(digest):
            await self._weights.drop(digest)

    def _is_wanted(self, digest: str) -> bool:
        return self._registry.is_named(digest) or self._has_task(digest)


def shown_placements(record: AdapterRecord, *, is_cached: bool, worker_ids: tuple[str, ...]) -> Placements:
    """Where the active version is, as far as the current caller may know; see AdapterLifeCycle.placements."""
    if not record.active_digest:
        return Placements()
    is_admin = current_caller().principal.is_admin
    return Placements(
        is_stored=True,
        is_host_cached=(is_admin or record.is_pinned) and is_cached,
        worker_ids=worker_ids if is_admin else (),
    )


def _resource(adapter_id: str) -> str:
    return f"adapters/{adapter_id}"


async def _to_the_end(change: Coroutine[Any, Any, T]) -> T:
    """The result of the change, which goes on to its end even if the client leaves: so the tiers stay consistent."""
    return await asyncio.shield(asyncio.ensure_future(change))
