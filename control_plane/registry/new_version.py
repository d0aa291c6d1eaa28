"""What registering a version makes of a name's record."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace

from control_plane.access.visibility import Ownership
from control_plane.checks import refuse
from control_plane.errors import Exhausted
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft.ingest import PackedInfo
from control_plane.registry.records import NONE_ACTIVE, AdapterRecord, AdapterState, AdapterVersion, Registered
from control_plane.registry.versions.record_changes import activated
from control_plane.registry.versions.rollout import AT_ONCE, NO_ROLLOUT, VersionRollout

MAX_VERSIONS = 1000


@dataclass(frozen=True, slots=True)
class Description:
    """What the caller says of the name, beside the files."""

    adapter_id: str
    display_name: str  # empty: that of the record stays
    labels: Mapping[str, str]  # empty: those of the record stay
    rollout: VersionRollout = AT_ONCE
    source: str = ""  # where the files came from


def registered(
    record: AdapterRecord | None,
    described: Description,
    ownership: Ownership,
    packed: PackedInfo,
    base_model: BaseModel,
    now_s: float,
) -> Registered:
    """The record with this version, rolled out as described, and as it is. The same object if nothing changes."""
    if described.rollout.canary_per_mille and (
        record is None or not record.versions or record.active_digest == packed.digest
    ):
        raise refuse("rollout.canary_per_mille", "is set, and the version is the active one, so it gets all requests")
    if record is None or not record.versions:
        first = AdapterRecord(
            adapter_id=described.adapter_id,
            uid=uuid.uuid4().hex,
            display_name=described.display_name,
            labels=dict(described.labels),
            state=AdapterState.FAILED if described.rollout.is_held else AdapterState.ACTIVE,
            state_reason=NONE_ACTIVE if described.rollout.is_held else "",
            versions=(version_of_packed(packed, base_model, 1, now_s, described.source),),
            active_digest="" if described.rollout.is_held else packed.digest,
            is_pinned=False,
            create_time_s=now_s,
            update_time_s=now_s,
            last_number=1,
            ownership=ownership,
            rollout=described.rollout.applied_to(NO_ROLLOUT, packed.digest, now_s),
        )
        return Registered(packed.digest, first, record)
    changed = _with_version(record, packed, base_model, now_s, described.source)
    is_same = record.active_digest == packed.digest
    if not (is_same and record.state is AdapterState.ACTIVE):
        changed = replace(
            changed,
            display_name=described.display_name or record.display_name,
            labels=dict(described.labels) or record.labels,
        )
        if is_same or not described.rollout.is_staged:
            changed = replace(activated(changed, packed.digest), state=AdapterState.ACTIVE, state_reason="")
    rollout = described.rollout.applied_to(changed.rollout, packed.digest, now_s)
    changed = replace(changed, ownership=ownership, rollout=rollout)
    if changed == record:
        return Registered(packed.digest, record, record)
    changed = replace(changed, update_time_s=now_s, revision=record.revision + 1)
    return Registered(packed.digest, changed, record)


def _with_version(
    record: AdapterRecord, packed: PackedInfo, base_model: BaseModel, now_s: float, source: str
) -> AdapterRecord:
    """The record with the version among its versions. Raises Exhausted."""
    if record.version(packed.digest) is not None:
        return record
    if len(record.versions) >= MAX_VERSIONS:
        raise Exhausted(
            f"adapter {record.adapter_id!r} has {MAX_VERSIONS} versions, the limit; delete versions that are not in "
            "use (DeleteAdapterVersion, `motet adapters remove NAME --version DIGEST`), keep only the newest ones "
            "(`motet adapters update NAME --keep-versions COUNT`), or use another id",
            retry_after_s=60.0,
        )
    number = record.last_number + 1
    version = version_of_packed(packed, base_model, number, now_s, source)
    return replace(record, versions=(version, *record.versions), last_number=number)


def version_of_packed(
    packed: PackedInfo, base_model: BaseModel, number: int, now_s: float, source: str = ""
) -> AdapterVersion:
    """The version that packed files make."""
    return AdapterVersion(
        digest=packed.digest,
        kind=packed.kind,
        max_rank=packed.max_rank,
        dtype=base_model.dtype,
        size_bytes=packed.size_bytes,
        arena_bytes=packed.arena_bytes,
        target_modules=packed.target_modules,
        context_length=packed.context_length,
        create_time_s=now_s,
        base_fingerprint=base_model.fingerprint,
        number=number,
        vocab_size=packed.num_tokens or 0,
        num_rows=packed.num_rows,
        files=packed.companions,
        min_rank=packed.min_rank,
        parts=packed.parts,
        labels=packed.labels,
        problem_type=packed.problem_type,
        source=source,
        alora_invocation_tokens=packed.alora_invocation_tokens,
        warnings=packed.warnings,
    )
