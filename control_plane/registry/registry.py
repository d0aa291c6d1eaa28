"""Names, versions and their states. Every change reaches the store first.

Reading is synchronous and touches memory only. Changes of one name happen one after the other; of two that carry the
same etag one wins. A caller's cancellation never leaves memory and store apart.

What is read or changed is judged by the caller of the RPC that runs (`current_caller`): a name that it does not see
does not exist for it. `find` and the steps that finish a deletion are the server's own work, whoever began it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from control_plane.access.name_prefixes import NO_PREFIXES, NamePrefixes
from control_plane.access.visibility import Ownership, owner_of_new
from control_plane.caller import current_caller
from control_plane.checks import Violations, check_adapter_id, check_digest, check_display_name, check_labels, require
from control_plane.errors import AdapterNotActive, EtagMismatch, MotetError
from control_plane.registry.blob_writer import BlobWriter
from control_plane.registry.catalog import Catalog, RegistryStats
from control_plane.registry.changes import Abandoned, Changes
from control_plane.registry.companions.inherited import NOT_INHERITED, Inherited
from control_plane.registry.documents import Documents
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.worker_reports import WorkerReports
from control_plane.registry.new_version import Description, registered
from control_plane.registry.ownership_change import NO_CHANGE, OwnershipChange
from control_plane.registry.packing.ingest_pool import IngestPool
from control_plane.registry.peft.ingest import PackedInfo
from control_plane.registry.peft.packing import CheckFiles, CheckTemplate, Packer, take_as_they_are
from control_plane.registry.permissions import require_owner, require_registration, require_same_owner
from control_plane.registry.records import AdapterRecord, AdapterState, Registered, ResolvedAdapter
from control_plane.registry.recovery import recover
from control_plane.registry.signed_version import with_signature
from control_plane.registry.snapshot.known_documents import KnownDocuments
from control_plane.registry.store.artifact_store import MAX_LOCK_WAIT_S, ArtifactStore
from control_plane.registry.versions.early_versions import Publish, show_and_store
from control_plane.registry.versions.record_changes import (
    NO_ROLLOUT_CHANGE,
    Change,
    RolloutChange,
    activated,
    deleting,
    described,
    require_active,
    require_deletable,
    rolled_back,
    version_of,
    without_version,
)
from control_plane.registry.versions.rollout import AT_ONCE, VersionRollout
from control_plane.registry.versions.verified_versions import VerifiedVersions
from control_plane.registry.versions.version_names import VersionName
from control_plane.store_calls import StoreCalls

logger = logging.getLogger(__name__)


class Registry:
    """All adapters of one base model."""

    def __init__(
        self,
        store: ArtifactStore,
        calls: StoreCalls,
        catalog: Catalog,
        packer: Packer,
        *,
        incarnation: int,
        clock: Callable[[], float],
        prefixes: NamePrefixes,
    ) -> None:
        """Use `open`. The store is locked and in order, and `catalog` has what is in it."""
        self.incarnation = incarnation  # durable, one more with every open
        self._store = store
        self._calls = calls
        self._catalog = catalog
        self.when_changed, self.names_of = catalog.when_changed, catalog.names_of  # see Catalog
        self.packer = packer  # also packs what gets no name
        self._blobs = BlobWriter(store, calls, catalog)
        self._documents = Documents(store, calls, catalog)
        self._changes = Changes(calls)
        self._clock = clock  # wall clock, seconds
        self._prefixes = prefixes
        self.verified = VerifiedVersions(self._documents, catalog, self._changes, clock)

    @classmethod
    async def open(
        cls,
        *,
        store: ArtifactStore,
        base_model: BaseModel,
        calls: StoreCalls,
        max_adapter_bytes: int,
        reports: WorkerReports,
        clock: Callable[[], float] = time.time,
        scratch_dir: Path | None = None,
        prefixes: NamePrefixes = NO_PREFIXES,
        pool: IngestPool | None = None,
        check_template: CheckTemplate | None = None,
        known: KnownDocuments | None = None,
    ) -> Registry:
        """Lock the store, bring it in order, read it. `scratch_dir` takes adapters while they are packed.

        Adapters are judged by what `reports` says that the workers serve. `prefixes` are reserved for tenants.
        `pool`: its processes pack adapters, until `close`; None: threads of this one do. `known`: see recovery.py.
        """
        incarnation = await calls.read(store.acquire, extra_s=MAX_LOCK_WAIT_S)
        try:
            recovered = await recover(store, calls, known)
        except BaseException:
            with contextlib.suppress(MotetError):
                await calls.read(store.close)
            raise
        catalog = Catalog(base_model, recovered.blobs, recovered.records, reports=reports, clock=clock)
        packer = Packer(
            base_model,
            reports,
            max_adapter_bytes=max_adapter_bytes,
            scratch_dir=scratch_dir,
            pool=pool,
            check_template=check_template,
        )
        logger.info("registry open incarnation=%d num_adapters=%d", incarnation, len(recovered.records))
        return cls(store, calls, catalog, packer, incarnation=incarnation, clock=clock, prefixes=prefixes)

    async def close(self) -> None:
        """Wait for changes under way, though not for a store that hangs, then give the store back.

        Where a change hangs the store is not given back: that change may still be made, so the store's lock has to end
        with the process.
        """
        has_ended = await self._changes.close()
        await self.packer.close()
        if has_ended:
            try:
                await self._calls.read(self._store.close)
            except MotetError as error:
                logger.warning("artifact store not given back error=%s", error)

    # ---- reading ----

    def resolve(self, adapter_id: str, digest: str = "", *, selector: str = "", key: str = "") -> ResolvedAdapter:
        """The version that a new request gets: that of `digest` or `selector` (a number or a label), if one is given.

        Else the active one, or the canary for its share of all keys. `version_names.py` parses what clients name.
        """
        return self._catalog.resolve(VersionName(adapter_id, selector), digest, key, current_caller())

    def get(self, adapter_id: str) -> AdapterRecord:
        """The record of a name. Raises AdapterNotFound, which suggests the nearest names that the caller sees."""
        return self._catalog.get(adapter_id, current_caller())

    def changeable(self, adapter_id: str) -> AdapterRecord:
        """The record of a name that the caller may change. Raises AdapterNotFound or PermissionDenied."""
        return self._catalog.changeable(adapter_id, current_caller())

    def find(self, adapter_id: str) -> AdapterRecord | None:
        """The record of a name, if there is one, whoever may see it: for the server's own work."""
        return self._catalog.find(adapter_id)

    def list_part(self, after: str = "", count: int = 1000) -> tuple[list[AdapterRecord], str]:
        """Up to `count` records after a name, and the name to go on after ("": the caller sees no further record).

        The name to go on after may be one that the caller does not see: give it to nobody. A part may have fewer
        records than `count`, also none, before the last one.
        """
        return self._catalog.list_part(current_caller(), after, count)

    def is_named(self, digest: str) -> bool:
        """Whether a name that is not being deleted has a version of this digest."""
        return self._catalog.is_named(digest)

    def stats(self) -> RegistryStats:
        """Counts. `num_visible` is that of the caller; see also `count_visible`."""
        counts = self._catalog.stats(current_caller())
        return replace(counts, num_changes=len(self._changes), num_locks=len(self._changes.locks))

    # ---- changes ----

    async def register(
        self,
        adapter_id: str,
        files: Mapping[str, Path],
        *,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        ownership: OwnershipChange = NO_CHANGE,
        rollout: VersionRollout = AT_ONCE,
        source: str = "",
        validate_only: bool = False,
        check_files: CheckFiles = take_as_they_are,
        publish: Publish | None = None,
        inherited: Inherited = NOT_INHERITED,
    ) -> Registered:
        """Check and pack the files and make them a version of the name, rolled out so, which gets this ownership.

        The same bytes again change nothing, but that they are active again, and whose signature they have. Cancelled
        before the change begins, nothing is registered; cancelled later, the change is made to its end before this
        returns. `check_files` looks at the files before they are packed. `publish`: see versions/early_versions.py.
        `inherited`: what the version has of another one, beside the files.
        """
        violations = Violations()
        check_adapter_id(adapter_id, "adapter_id", violations)
        check_display_name(display_name, "display_name", violations)
        check_labels(labels or {}, "labels", violations)
        violations.raise_if_any()
        self.check_registrable(adapter_id, ownership)
        description = Description(adapter_id, display_name, dict(labels or {}), rollout, source)
        is_abandoned = threading.Event()
        packing = self.packer.packed(dict(files), is_abandoned, check_files, inherited)
        parts = (description, ownership, packing, is_abandoned, publish)
        change = self._register(*parts, validate_only=validate_only)
        return await self._changes.finish(change, on_cancelled=is_abandoned.set)

    def check_registrable(self, adapter_id: str, ownership: OwnershipChange = NO_CHANGE) -> Ownership:
        """The ownership that the name would have. Raises what registering under it would raise, whatever the files."""
        return self._registrable(adapter_id, ownership)[1]

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
        if display_name is not None:
            require(check_display_name, display_name, "display_name")
        if labels is not None:
            require(check_labels, labels, "labels")
        require_owner(ownership.owner, current_caller(), "adapter.owner")
        change = described(display_name, labels, ownership, rollout)
        return await self._changes.finish(self._change(adapter_id, etag, change))

    async def activate(
        self, adapter_id: str, digest: str, etag: str = "", *, expected_digest: str = ""
    ) -> AdapterRecord:
        """Make a registered version the active one; with `expected_digest`, only in place of that one."""
        require(check_digest, digest, "digest")

        def change(record: AdapterRecord) -> AdapterRecord:
            require_active(record, expected_digest)
            if error := self._catalog.servability_error(version_of(record, digest)):
                raise error
            return activated(record, digest)

        return await self._changes.finish(self._change(adapter_id, etag, change))

    async def roll_back(self, adapter_id: str, etag: str = "", *, expected_digest: str = "") -> AdapterRecord:
        """Make the version active that was active before; with `expected_digest`, only in place of that one."""

        def change(record: AdapterRecord) -> AdapterRecord:
            require_active(record, expected_digest)
            changed = rolled_back(record)
            if error := self._catalog.servability_error(version_of(record, changed.active_digest)):
                raise error
            return changed

        return await self._changes.finish(self._change(adapter_id, etag, change))

    async def set_pinned(self, adapter_id: str) -> AdapterRecord:
        """Mark as pinned; already pinned is fine."""
        return await self._changes.finish(self._change(adapter_id, "", lambda record: replace(record, is_pinned=True)))

    async def clear_pinned(self, adapter_id: str) -> AdapterRecord:
        """Take the mark back; not pinned is fine."""
        return await self._changes.finish(self._change(adapter_id, "", lambda record: replace(record, is_pinned=False)))

    async def begin_delete(self, adapter_id: str, etag: str = "") -> list[str]:
        """Stop serving the name. Returns the digests of its versions: the tiers forget those that no name has."""
        return await self._changes.finish(self._begin_delete(adapter_id, etag))

    async def finish_delete(self, adapter_id: str) -> None:
        """Remove the record and the blobs that no name uses. Call begin_delete first."""
        await self._changes.finish(self._finish_delete(adapter_id))

    async def begin_delete_version(self, adapter_id: str, digest: str, etag: str = "") -> None:
        """Stop serving a version that is not the active one; its weights stay until finish_delete_version."""
        require(check_digest, digest, "digest")
        await self._changes.finish(self._begin_delete_version(adapter_id, digest, etag))

    async def finish_delete_version(self, digest: str) -> None:
        """Remove the weights of a deleted version, unless a name has the same ones."""
        await self._changes.finish(self._delete_unnamed_blob(digest))

    # ---- how changes are made ----

    async def _register(
        self,
        description: Description,
        ownership: OwnershipChange,
        packing: contextlib.AbstractAsyncContextManager[PackedInfo],
        is_abandoned: threading.Event,
        publish: Publish | None,
        *,
        validate_only: bool,
    ) -> Registered:
        async with packing as packed:
            if validate_only:
                return self._registered(description, ownership, packed)
            locks = self._changes.locks
            async with locks.hold(f"name {description.adapter_id}"), locks.hold(f"blob {packed.digest}"):
                if is_abandoned.is_set():
                    raise Abandoned
                result = self._registered(description, ownership, packed)
                is_repaired = await self._store_version(result.record, packed, publish)
            return replace(result, is_repaired=is_repaired)

    def _registrable(self, adapter_id: str, change: OwnershipChange) -> tuple[AdapterRecord | None, Ownership]:
        """The present record of the name, if any, and its ownership after registering. Raises if it cannot be had."""
        caller = current_caller()
        record = self._catalog.find(adapter_id)
        require_registration(adapter_id, record, caller, self._prefixes)
        if record is not None and record.state is AdapterState.DELETING:
            raise AdapterNotActive(f"adapter {adapter_id!r} is being deleted; register it when that has ended")
        require_owner(change.owner, caller, "owner")
        if record is None or not record.versions:
            _, reserved_for = self._prefixes.reserved(adapter_id) or ("", "")
            owner = owner_of_new(caller.principal, caller.tenant, reserved_for)
            return record, change.applied_to(Ownership(owner))
        require_same_owner(record, change.owner)
        return record, change.applied_to(record.ownership)

    def _registered(self, description: Description, change: OwnershipChange, packed: PackedInfo) -> Registered:
        record, ownership = self._registrable(description.adapter_id, change)
        now_s = self._clock()
        unsigned = registered(record, description, ownership, packed, self._catalog.base_model, now_s)
        return with_signature(unsigned, packed.digest, packed.signature, now_s)

    async def _store_version(self, record: AdapterRecord, packed: PackedInfo, publish: Publish | None) -> bool:
        """Blob first, then the version's document, then the record that names it. Whether the blob was repaired.

        A whole blob stays even if the record's write fails: whether that write took effect is not known then, and the
        next start removes blobs that no record names.
        """
        known = self._catalog.find(record.adapter_id)

        async def store() -> bool:
            is_repaired = await self._blobs.put(packed)
            if known is not record:
                version = record.version(packed.digest)
                assert version is not None, "the version that is being registered is one of the record's"
                if known is None or known.version(packed.digest) != version:
                    await self._documents.write_version(record.adapter_id, version)
                await self._blobs.confirm(packed.digest)
                try:
                    await self._documents.write_record(record, known)
                except EtagMismatch:
                    await self._blobs.delete_unnamed(packed.digest)
                    raise
                logger.info("adapter registered adapter_id=%s digest=%s", record.adapter_id, packed.digest)
                for warning in packed.warnings:
                    logger.warning("adapter registered adapter_id=%s: %s", record.adapter_id, warning)
            else:
                await self._documents.confirm(record)
            return is_repaired

        if publish is None:
            return await store()
        return await show_and_store(self._catalog, known, record, packed, publish, store)

    async def _delete_unnamed_blob(self, digest: str) -> None:
        async with self._changes.locks.hold(f"blob {digest}"):
            await self._blobs.delete_unnamed(digest)

    async def _change(self, adapter_id: str, etag: str, change: Change) -> AdapterRecord:
        require(check_adapter_id, adapter_id, "adapter_id")
        async with self._changes.locks.hold(f"name {adapter_id}"):
            record = self._changeable(adapter_id, etag)
            changed = change(record)
            if changed == record:
                await self._documents.confirm(record)
                return record
            changed = self._catalog.with_state(self._revised(changed))
            await self._documents.write_record(changed, record)
            return changed

    def _revised(self, record: AdapterRecord) -> AdapterRecord:
        """The record with the time and the number of a change that was made of it."""
        return replace(record, update_time_s=self._clock(), revision=record.revision + 1)

    def _changeable(self, adapter_id: str, etag: str) -> AdapterRecord:
        """The present record, if it can be changed and is the one that the caller read."""
        record = self._catalog.current(adapter_id, etag, current_caller())
        if record.state is AdapterState.DELETING or not record.versions:
            self._catalog.refuse_failed(record)
        return record

    async def _begin_delete(self, adapter_id: str, etag: str) -> list[str]:
        async with self._changes.locks.hold(f"name {adapter_id}"):
            record = self._catalog.current(adapter_id, etag, current_caller())
            if record.state is not AdapterState.DELETING:
                await self._documents.delete_record(record)
                self._catalog.put(self._revised(deleting(record)))
                logger.info("adapter being deleted adapter_id=%s", adapter_id)
            return sorted(version.digest for version in record.versions)

    async def _finish_delete(self, adapter_id: str) -> None:
        async with self._changes.locks.hold(f"name {adapter_id}"):
            record = self.find(adapter_id)
            if record is None or record.state is not AdapterState.DELETING:
                raise AdapterNotActive(f"adapter {adapter_id!r} is not being deleted")
            await self._documents.delete_versions(record)
            self._catalog.remove(record)
            for version in record.versions:
                await self._delete_unnamed_blob(version.digest)
            logger.info("adapter deleted adapter_id=%s", adapter_id)

    async def _begin_delete_version(self, adapter_id: str, digest: str, etag: str) -> None:
        require(check_adapter_id, adapter_id, "adapter_id")
        async with self._changes.locks.hold(f"name {adapter_id}"):
            record = self._changeable(adapter_id, etag)
            require_deletable(record, digest)
            remaining = self._revised(without_version(record, digest))
            await self._documents.remove_version(record, remaining, version_of(record, digest))
            logger.info("adapter version deleted adapter_id=%s digest=%s", adapter_id, digest)


async def count_visible(registry: Registry) -> int:
    """How many adapters the caller sees. Gives other tasks a turn where they have to be looked at one by one."""
    num_visible = registry.stats().num_visible
    if num_visible is not None:
        return num_visible
    num_visible, after = 0, ""
    while True:
        records, after = registry.list_part(after)
        num_visible += len(records)
        if not after:
            return num_visible
        await asyncio.sleep(0)
