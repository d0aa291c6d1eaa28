"""A registry and weights that tests script: records in memory, no store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from control_plane.access.visibility import NOBODYS, Ownership
from control_plane.errors import AdapterNotFound, AdapterVersionActive, PinBudgetExceeded
from control_plane.host_cache.base import HostCacheStats
from control_plane.host_cache.weights import AdapterWeights
from control_plane.registry.catalog import RegistryStats
from control_plane.registry.companions.inherited import NOT_INHERITED, Inherited
from control_plane.registry.ownership_change import NO_CHANGE, OwnershipChange
from control_plane.registry.peft.packing import CheckFiles, take_as_they_are
from control_plane.registry.records import AdapterRecord, AdapterState, AdapterVersion, Registered, ResolvedAdapter
from control_plane.registry.registry import Registry
from control_plane.registry.versions.early_versions import Publish
from control_plane.registry.versions.record_changes import NO_ROLLOUT_CHANGE, RolloutChange
from control_plane.registry.versions.rollout import AT_ONCE, VersionRollout
from control_plane.scheduler.types import AdapterRef

DIGEST = "a" * 64
OTHER_DIGEST = "b" * 64


def adapter_version(digest: str, *, number: int = 1) -> AdapterVersion:
    return AdapterVersion(
        digest=digest,
        kind="lora",
        max_rank=8,
        dtype="float32",
        size_bytes=1000,
        arena_bytes=4096,
        target_modules=("model.layers.0.self_attn.q_proj",),
        create_time_s=1.5,
        number=number,
        min_rank=8,
        parts=("a", "b"),
    )


def adapter_record(
    adapter_id: str, versions: Sequence[AdapterVersion], active_digest: str, **fields: Any
) -> AdapterRecord:
    """A record with the etag "u1-1"."""
    record = AdapterRecord(
        adapter_id=adapter_id,
        uid="u1",
        display_name="",
        labels={},
        state=AdapterState.ACTIVE,
        state_reason="",
        versions=tuple(versions),
        active_digest=active_digest,
        is_pinned=False,
        create_time_s=1.5,
        update_time_s=2.5,
    )
    return replace(record, **fields)


class FakeRegistry(Registry):
    """Records in a dict; `calls` lists the calls, `files` what was registered."""

    def __init__(self) -> None:
        self.records: dict[str, AdapterRecord] = {}
        self.calls: list[tuple[object, ...]] = []
        self.files: dict[str, dict[str, bytes]] = {}
        self.gate: asyncio.Event | None = None  # register waits for it
        self.delete_gate: asyncio.Event | None = None  # begin_delete waits for it
        self.response_gate: asyncio.Event | None = None  # what is pinned or unpinned already waits for it
        self.response_due = asyncio.Event()
        self.delete_begun, self.delete_finished = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None
        self.entered, self.entered_twice, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def add(self, adapter_id: str, *digests: str) -> AdapterRecord:
        versions = [adapter_version(digest) for digest in digests or (DIGEST,)]
        self.records[adapter_id] = adapter_record(adapter_id, versions, versions[0].digest)
        return self.records[adapter_id]

    def get(self, adapter_id: str) -> AdapterRecord:
        if adapter_id not in self.records:
            near = ", ".join(sorted(self.records)[:3])
            raise AdapterNotFound(f"no adapter {adapter_id}; nearest: {near}", resource=f"adapters/{adapter_id}")
        return self.records[adapter_id]

    def names_of(self, digest: str) -> set[str]:
        return {name for name, record in self.records.items() if record.version(digest) is not None}

    def resolve(self, adapter_id: str, digest: str = "", *, selector: str = "", key: str = "") -> ResolvedAdapter:
        record = self.get(adapter_id)
        version = record.version(digest or record.active_digest)
        if version is None:
            raise AdapterNotFound(f"adapter {adapter_id} has no version {digest}", resource=f"adapters/{adapter_id}")
        return ResolvedAdapter(adapter_id, version, AdapterRef(version.digest, version.arena_bytes))

    def changeable(self, adapter_id: str) -> AdapterRecord:
        return self.get(adapter_id)

    def find(self, adapter_id: str) -> AdapterRecord | None:
        return self.records.get(adapter_id)

    def list_part(self, after: str = "", count: int = 1000) -> tuple[list[AdapterRecord], str]:
        names = [name for name in sorted(self.records) if name > after]
        more = names[count - 1] if len(names) > count else ""
        return [self.records[name] for name in names[:count]], more

    def check_registrable(self, adapter_id: str, ownership: OwnershipChange = NO_CHANGE) -> Ownership:
        return NOBODYS

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
        self.calls.append(("register", adapter_id, validate_only))
        (self.entered_twice if self.entered.is_set() else self.entered).set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.left.set()
        if self.error is not None:
            raise self.error
        self.files[adapter_id] = {name: path.read_bytes() for name, path in files.items()}
        before = self.records.get(adapter_id)
        is_pinned = before is not None and before.is_pinned
        record = adapter_record(
            adapter_id,
            [adapter_version(DIGEST)],
            DIGEST,
            display_name=display_name,
            labels=dict(labels or {}),
            is_pinned=is_pinned,
        )
        if not validate_only:
            self.records[adapter_id] = record
        return Registered(DIGEST, record, before)

    def is_named(self, digest: str) -> bool:
        return any(version.digest == digest for record in self.records.values() for version in record.versions)

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
        self.calls.append(("update", adapter_id, display_name, labels, etag))
        record = self.get(adapter_id)
        if display_name is not None:
            record = replace(record, display_name=display_name)
        if labels is not None:
            record = replace(record, labels=dict(labels))
        record = replace(record, ownership=ownership.applied_to(record.ownership))
        self.records[adapter_id] = record
        return record

    async def activate(
        self, adapter_id: str, digest: str, etag: str = "", *, expected_digest: str = ""
    ) -> AdapterRecord:
        self.records[adapter_id] = replace(self.get(adapter_id), active_digest=digest)
        return self.records[adapter_id]

    async def set_pinned(self, adapter_id: str) -> AdapterRecord:
        if self.error is not None:
            raise self.error
        self.records[adapter_id] = replace(self.get(adapter_id), is_pinned=True)
        await self._respond()
        return self.records[adapter_id]

    async def clear_pinned(self, adapter_id: str) -> AdapterRecord:
        self.records[adapter_id] = replace(self.get(adapter_id), is_pinned=False)
        await self._respond()
        return self.records[adapter_id]

    async def _respond(self) -> None:
        self.response_due.set()
        if self.response_gate is not None:
            await self.response_gate.wait()

    async def begin_delete(self, adapter_id: str, etag: str = "") -> list[str]:
        record = self.get(adapter_id)
        self.calls.append(("begin_delete", adapter_id, etag))
        self.delete_begun.set()
        if self.delete_gate is not None:
            await self.delete_gate.wait()
        del self.records[adapter_id]
        return [version.digest for version in record.versions]

    async def finish_delete(self, adapter_id: str) -> None:
        self.calls.append(("finish_delete", adapter_id))
        self.delete_finished.set()

    async def begin_delete_version(self, adapter_id: str, digest: str, etag: str = "") -> None:
        record = self.get(adapter_id)
        self.calls.append(("begin_delete_version", adapter_id, digest, etag))
        self.delete_begun.set()
        if digest == record.active_digest:
            raise AdapterVersionActive(f"version {digest} is the active one")
        if self.delete_gate is not None:
            await self.delete_gate.wait()
        versions = tuple(version for version in record.versions if version.digest != digest)
        self.records[adapter_id] = replace(record, versions=versions)

    async def finish_delete_version(self, digest: str) -> None:
        self.calls.append(("finish_delete_version", digest))
        self.delete_finished.set()

    def stats(self) -> RegistryStats:
        return RegistryStats(len(self.records), len(self.records), num_visible=len(self.records))


class FakeWeights(AdapterWeights):
    """Counts pins; `calls` lists the calls in order."""

    def __init__(self, calls: list[tuple[object, ...]]) -> None:
        self.calls = calls
        self.pins: list[tuple[str, str]] = []  # digest and holder
        self.stored: list[str] = []  # digests that were registered
        self.error = ""
        self.max_pinned = 10
        self.pin_gate: asyncio.Event | None = None  # pin waits for it
        self.pin_begun = asyncio.Event()

    async def drop(self, digest: str) -> None:
        self.calls.append(("drop", digest))

    async def pin(self, digest: str, holder: str = "") -> None:
        if len(self.pins) >= self.max_pinned:
            raise PinBudgetExceeded("pins would exceed the budget of 100 bytes; unpin another adapter")
        assert (digest, holder) not in self.pins
        self.pin_begun.set()
        if self.pin_gate is not None:
            await self.pin_gate.wait()
        self.pins.append((digest, holder))

    async def unpin(self, digest: str, holder: str = "") -> None:
        if (digest, holder) in self.pins:
            self.pins.remove((digest, holder))

    @property
    def pinned(self) -> list[str]:
        return [digest for digest, _ in self.pins]

    def is_cached(self, digest: str) -> bool:
        return digest == DIGEST

    def stored_anew(self, digest: str) -> None:
        self.stored.append(digest)

    def stats(self) -> HostCacheStats:
        return HostCacheStats(
            num_adapters=1,
            used_bytes=10,
            budget_bytes=100,
            is_available=not self.error,
            error=self.error,
            num_hits=3,
            num_misses=2,
            num_corrupt=1,
        )
