"""What a change makes of a name's record. Pure: the registry stores the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from control_plane.checks import refuse
from control_plane.errors import (
    AdapterNotFound,
    AdapterVersionActive,
    AdapterVersionHeld,
    EtagMismatch,
    NoFormerVersion,
)
from control_plane.registry.ownership_change import OwnershipChange
from control_plane.registry.records import AdapterRecord, AdapterState, AdapterVersion
from control_plane.registry.versions.rollout import Canary, Rollout

Change = Callable[[AdapterRecord], AdapterRecord]


@dataclass(frozen=True, slots=True)
class RolloutChange:
    """None leaves a part as it is."""

    version_labels: Mapping[str, str] | None = None  # in place of all labels
    canary: Canary | None = None
    ends_canary: bool = False
    keep_versions: int | None = None
    expire_time_s: float | None = None
    ends_expiry: bool = False  # the adapter does not expire any more

    def applied_to(self, record: AdapterRecord) -> Rollout:
        """The rollout after the change. Raises InvalidRequest or AdapterNotFound for versions that are not there."""
        rollout = record.rollout
        if self.version_labels is not None:
            for digest in self.version_labels.values():
                version_of(record, digest)
            rollout = replace(rollout, version_labels=dict(self.version_labels))
        if self.canary is not None:
            version_of(record, self.canary.digest)
            if self.canary.digest == record.active_digest:
                raise refuse("adapter.canary.digest", "is the active version; name another version, or none to end it")
            rollout = replace(rollout, canary=self.canary)
        if self.ends_canary:
            rollout = replace(rollout, canary=None)
        if self.keep_versions is not None:
            rollout = replace(rollout, keep_versions=self.keep_versions)
        if self.expire_time_s is not None or self.ends_expiry:
            rollout = replace(rollout, expire_time_s=self.expire_time_s)
        return rollout


NO_ROLLOUT_CHANGE = RolloutChange()


def version_of(record: AdapterRecord, digest: str) -> AdapterVersion:
    """A version of a record. Raises AdapterNotFound."""
    version = record.version(digest)
    if version is None:
        raise AdapterNotFound(
            f"adapter {record.adapter_id!r} has no version {digest}; ListAdapterVersions (`motet adapters versions "
            f"{record.adapter_id}`) shows all versions",
            resource=f"adapters/{record.adapter_id}",
        )
    return version


def described(
    display_name: str | None, labels: Mapping[str, str] | None, ownership: OwnershipChange, rollout: RolloutChange
) -> Change:
    """Change the description, the ownership and the rollout."""

    def change(record: AdapterRecord) -> AdapterRecord:
        return replace(
            record,
            ownership=ownership.applied_to(record.ownership),
            display_name=record.display_name if display_name is None else display_name,
            labels=record.labels if labels is None else dict(labels),
            rollout=rollout.applied_to(record),
        )

    return change


def activated(record: AdapterRecord, digest: str) -> AdapterRecord:
    """Another version becomes the active one; the same one changes nothing."""
    if digest == record.active_digest:
        return record
    rollout = record.rollout.activated(digest, record.active_digest)
    return replace(record, active_digest=digest, rollout=rollout)


def rolled_back(record: AdapterRecord) -> AdapterRecord:
    """The version that was active before becomes the active one. Raises NoFormerVersion."""
    if not record.rollout.previous_digests:
        raise NoFormerVersion(
            f"adapter {record.adapter_id!r} has no version that was active before version {record.active_digest}; "
            f"activate one (`motet adapters activate {record.adapter_id} DIGEST`)"
        )
    return replace(record, active_digest=record.rollout.previous_digests[0], rollout=record.rollout.rolled_back())


def require_active(record: AdapterRecord, expected_digest: str) -> None:
    """Raise EtagMismatch unless this version is the active one; an empty digest matches any."""
    if expected_digest and expected_digest != record.active_digest:
        raise EtagMismatch(
            f"the active version of adapter {record.adapter_id!r} is {record.active_digest} and not the expected one; "
            "read the adapter again and retry"
        )


def require_deletable(record: AdapterRecord, digest: str) -> None:
    """Raise AdapterNotFound, AdapterVersionActive or AdapterVersionHeld unless the version may be deleted."""
    version_of(record, digest)
    if digest == record.active_digest:
        raise AdapterVersionActive(
            f"version {digest} is the active one of adapter {record.adapter_id!r}; activate another version before "
            "you delete it, or delete the adapter"
        )
    if len(record.versions) == 1:
        raise AdapterVersionActive(
            f"version {digest} is the only one of adapter {record.adapter_id!r}; delete the adapter instead"
        )
    if record.rollout.holds(digest):
        labels = record.rollout.labels_of(digest)
        held_by = f"has the label {labels[0]!r}" if labels else "is the canary"
        raise AdapterVersionHeld(
            f"version {digest} of adapter {record.adapter_id!r} {held_by}; change that before you delete it "
            f"(UpdateAdapter, `motet adapters {'label' if labels else 'canary'} {record.adapter_id}`)"
        )


def without_version(record: AdapterRecord, digest: str) -> AdapterRecord:
    """The record after this version was deleted."""
    return replace(
        record,
        versions=tuple(version for version in record.versions if version.digest != digest),
        rollout=record.rollout.without_versions({digest}),
    )


def deleting(record: AdapterRecord) -> AdapterRecord:
    """The record while the name is being deleted."""
    return replace(record, state=AdapterState.DELETING, state_reason="it is being deleted", is_pinned=False)
