"""How versions are rolled out and kept, as messages: what clients send, and what they get."""

from __future__ import annotations

from collections.abc import Collection

from google.protobuf import duration_pb2, timestamp_pb2
from motet.v1 import adapters_pb2

from contract.ids import LABEL_KEY_FORM, is_label_key
from control_plane.checks import Violations, check_digest, quoted
from control_plane.registry.versions.record_changes import RolloutChange
from control_plane.registry.versions.rollout import (
    AT_ONCE,
    MAX_KEPT_VERSIONS,
    MAX_TTL_S,
    MAX_VERSION_LABELS,
    PER_MILLE,
    Canary,
    Rollout,
    VersionRollout,
)

FIELDS = ("version_labels", "canary", "keep_versions", "expire_time")  # of Adapter, in an update mask
_EXPIRY = "expire_time"
_MAX_TIME_S = 253_402_300_799  # the year 9999, as google.protobuf.Timestamp has it


def add_rollout(message: adapters_pb2.Adapter, rollout: Rollout) -> None:
    """Set the adapter's fields, in place."""
    message.version_labels.update(rollout.version_labels)
    if rollout.canary is not None:
        message.canary.digest, message.canary.per_mille = rollout.canary
    message.keep_versions = rollout.keep_versions
    if rollout.expire_time_s is not None:
        message.expire_time.FromMicroseconds(round(rollout.expire_time_s * 1e6))
    message.previous_digests.extend(rollout.previous_digests)


def checked_version_rollout(
    registration: adapters_pb2.UploadHeader | adapters_pb2.CreateAdapterRequest, prefix: str, violations: Violations
) -> VersionRollout:
    """How the version is rolled out that is registered. `prefix` is that of the fields' paths."""
    if not registration.HasField("rollout"):
        return AT_ONCE
    message, path = registration.rollout, f"{prefix}rollout"
    _check_per_mille(message.canary_per_mille, f"{path}.canary_per_mille", violations)
    _check_version_labels(message.version_labels, f"{path}.version_labels", violations)
    _check_keep_versions(message.keep_versions, f"{path}.keep_versions", violations)
    if message.hold and (message.canary_per_mille or message.version_labels):
        violations.add(
            f"{path}.hold",
            "is set together with canary_per_mille or version_labels, by which requests get the version; set these "
            "when it was verified",
        )
    return VersionRollout(
        is_active_kept=message.keep_active,
        canary_per_mille=message.canary_per_mille,
        labels=tuple(message.version_labels),
        keep_versions=message.keep_versions if message.HasField("keep_versions") else None,
        ttl_s=_ttl_s(message.ttl, f"{path}.ttl", violations) if message.HasField("ttl") else None,
        is_held=message.hold,
    )


def checked_rollout_change(
    request: adapters_pb2.UpdateAdapterRequest, mask: Collection[str], now_s: float, violations: Violations
) -> RolloutChange:
    """The change that the request's mask names. What it does not name is checked too, and left as it is."""
    adapter = request.adapter
    if _check_version_labels(adapter.version_labels, "adapter.version_labels", violations):
        for digest in adapter.version_labels.values():
            check_digest(digest, "adapter.version_labels", violations)
    _check_keep_versions(adapter.keep_versions, "adapter.keep_versions", violations)
    canary = _canary(adapter.canary, violations)
    expire_time_s = None
    if request.HasField("ttl"):
        if _EXPIRY not in mask:
            violations.add("ttl", f"is set without {_EXPIRY!r} in update_mask; name it there")
        if adapter.HasField(_EXPIRY):
            violations.add("ttl", f"is set together with adapter.{_EXPIRY}; give one of them")
        expire_time_s = now_s + _ttl_s(request.ttl, "ttl", violations)
    elif adapter.HasField(_EXPIRY):
        expire_time_s = _time_s(adapter.expire_time, now_s, violations)
    return RolloutChange(
        version_labels=dict(adapter.version_labels) if "version_labels" in mask else None,
        canary=canary if "canary" in mask else None,
        ends_canary="canary" in mask and canary is None,
        keep_versions=adapter.keep_versions if "keep_versions" in mask else None,
        expire_time_s=expire_time_s if _EXPIRY in mask else None,
        ends_expiry=_EXPIRY in mask and expire_time_s is None,
    )


def _canary(message: adapters_pb2.AdapterCanary, violations: Violations) -> Canary | None:
    _check_per_mille(message.per_mille, "adapter.canary.per_mille", violations)
    if not message.digest:
        if message.per_mille:
            violations.add("adapter.canary.digest", "is empty, and per_mille is not; give the version's digest")
        return None
    check_digest(message.digest, "adapter.canary.digest", violations)
    if not message.per_mille:
        violations.add("adapter.canary.per_mille", "is 0; give a share in thousandths from 1 to 1000, or no digest")
    return Canary(message.digest, message.per_mille)


def _ttl_s(message: duration_pb2.Duration, field: str, violations: Violations) -> float:
    ttl_s = message.seconds + message.nanos / 1e9
    if not (0 < ttl_s <= MAX_TTL_S and abs(message.nanos) < 10**9):
        violations.add(field, f"is {ttl_s:g} s; give more than 0 s and at most {MAX_TTL_S:.0f} s")
    return ttl_s


def _time_s(message: timestamp_pb2.Timestamp, now_s: float, violations: Violations) -> float:
    time_s = message.seconds + message.nanos / 1e9
    if not (0 <= message.nanos < 10**9 and now_s < time_s <= min(now_s + MAX_TTL_S, _MAX_TIME_S)):
        violations.add(
            f"adapter.{_EXPIRY}",
            f"is {message.seconds} s and {message.nanos} ns since 1970; give a time in the next {MAX_TTL_S:.0f} s, or "
            "none, and the adapter does not expire",
        )
    return time_s


def _check_version_labels(labels: Collection[str], field: str, violations: Violations) -> bool:
    """Labels of versions, each once. Returns whether there are few enough to be looked at one by one."""
    if len(labels) > MAX_VERSION_LABELS:
        violations.add(field, f"has {len(labels)} labels; use at most {MAX_VERSION_LABELS}")
        return False
    for label in labels:
        if not is_label_key(label):
            violations.add(field, f"{quoted(label)} is not a valid label of a version: {LABEL_KEY_FORM}")
    if len(set(labels)) < len(labels):
        violations.add(field, "names a label twice; name each once")
    return True


def _check_per_mille(per_mille: int, field: str, violations: Violations) -> None:
    """A share of requests."""
    if per_mille > PER_MILLE:
        violations.add(field, f"is {per_mille}; use a share in thousandths, at most {PER_MILLE}")


def _check_keep_versions(count: int, field: str, violations: Violations) -> None:
    """A number of versions to keep."""
    if count > MAX_KEPT_VERSIONS:
        violations.add(field, f"is {count}; use a count of at most {MAX_KEPT_VERSIONS}, or 0 to keep all")
