"""Writes what a verification found into the documents of a version and its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from control_plane.caller import current_caller
from control_plane.errors import AdapterNotActive
from control_plane.registry.catalog import Catalog
from control_plane.registry.changes import Changes
from control_plane.registry.documents import Documents
from control_plane.registry.records import AdapterRecord, AdapterState
from control_plane.registry.versions.record_changes import version_of
from control_plane.registry.versions.verification import Verification


class VerifiedVersions:
    """Changes of the registry, which owns the parts."""

    def __init__(self, documents: Documents, catalog: Catalog, changes: Changes, clock: Callable[[], float]) -> None:
        self._documents = documents
        self._catalog = catalog
        self._changes = changes
        self._clock = clock  # wall clock, seconds

    async def put(self, adapter_id: str, digest: str, verification: Verification) -> AdapterRecord:
        """Store it with the version, durably. Raises AdapterNotFound or PermissionDenied."""
        return await self._changes.finish(self._put(adapter_id, digest, verification))

    async def _put(self, adapter_id: str, digest: str, verification: Verification) -> AdapterRecord:
        async with self._changes.locks.hold(f"name {adapter_id}"):
            record = self._catalog.current(adapter_id, "", current_caller())
            if record.state is AdapterState.DELETING:
                raise AdapterNotActive(f"adapter {adapter_id!r} is being deleted")
            version = version_of(record, digest)
            verified = replace(version, verification=verification)
            versions = tuple(verified if each is version else each for each in record.versions)
            changed = replace(record, versions=versions, update_time_s=self._clock(), revision=record.revision + 1)
            await self._documents.write_version(adapter_id, verified)
            await self._documents.write_record(changed, record)
            return changed
