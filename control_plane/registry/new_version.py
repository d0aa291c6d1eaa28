"""What registering a version makes of a name's record."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace

from control_plane.access.visibility import Ownership
from control_plane.errors import Exhausted
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft.ingest import PackedInfo
from control_plane.registry.records import AdapterRecord, AdapterState, AdapterVersion, Registered

MAX_VERSIONS = 1000


@dataclass(frozen=True, slots=True)
class Description:
    """What the caller says of the name, beside the files."""

    adapter_id: str
    display_name: str  # empty: that of the record stays
    labels: Mapping[str, str]  # empty: those of the record stay


def registered(
    record: AdapterRecord | None,
    described: Description,
    ownership: Ownership,
    packed: PackedInfo,
    base_model: BaseModel,
    now_s: float,
) -> Registered:
    """The record with this version active and this ownership, and as it is. The same object if nothing changes."""
    if record is None or not record.versions:
        first = AdapterRecord(
            adapter_id=described.adapter_id,
            uid=uuid.uuid4().hex,
            display_name=described.display_name,
            labels=dict(described.labels),
            state=AdapterState.ACTIVE,
            state_reason="",
            versions=(_version(packed, base_model, 1, now_s),),
            active_digest=packed.digest,
            is_pinned=False,
            create_time_s=now_s,
            update_time_s=now_s,
            last_number=1,
            ownership=ownership,
        )
        return Registered(first, record)
    is_known = record.version(packed.digest) is not None
    is_active = is_known and record.active_digest == packed.digest and record.state is AdapterState.ACTIVE
    if is_active and ownership == record.ownership:
        return Registered(record, record)
    changed = replace(record, ownership=ownership, update_time_s=now_s, revision=record.revision + 1)
    if is_active:
        return Registered(changed, record)
    changed = replace(
        changed,
        display_name=described.display_name or record.display_name,
        labels=dict(described.labels) or record.labels,
        state=AdapterState.ACTIVE,
        state_reason="",
        active_digest=packed.digest,
    )
    if is_known:
        return Registered(changed, record)
    if len(record.versions) >= MAX_VERSIONS:
        raise Exhausted(
            f"adapter {record.adapter_id!r} has {MAX_VERSIONS} versions, the limit; delete versions that are not in "
            "use (DeleteAdapterVersion, `motet adapters remove NAME --version DIGEST`), or use another id",
            retry_after_s=60.0,
        )
    number = record.last_number + 1
    version = _version(packed, base_model, number, now_s)
    return Registered(replace(changed, versions=(version, *record.versions), last_number=number), record)


def _version(packed: PackedInfo, base_model: BaseModel, number: int, now_s: float) -> AdapterVersion:
    return AdapterVersion(
        digest=packed.digest,
        kind=packed.kind,
        max_rank=packed.max_rank,
        dtype=base_model.dtype,
        size_bytes=packed.size_bytes,
        arena_bytes=packed.arena_bytes,
        target_modules=packed.target_modules,
        create_time_s=now_s,
        base_fingerprint=base_model.fingerprint,
        number=number,
    )
