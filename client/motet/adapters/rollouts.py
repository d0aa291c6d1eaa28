"""How versions are rolled out and kept, as messages and calls: labels, canary, retention, time to live, rollback."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from motet.calls import UnaryCall, adapter_call, resource_name
from motet.errors import invalid_field
from motet.types import Adapter, AdapterCanary
from motet.v1 import adapters_pb2

MAX_UINT32 = 2**32 - 1


def set_rollout(
    request: adapters_pb2.UpdateAdapterRequest,
    *,
    version_labels: Mapping[str, str] | None = None,
    keep_versions: int | None = None,
    expire_time: datetime | None = None,
    ttl_s: float | None = None,
    never_expires: bool = False,
) -> None:
    """Add what is given to the request, in place."""
    adapter, paths = request.adapter, request.update_mask.paths
    if version_labels is not None:
        adapter.version_labels.update(version_labels)
        paths.append("version_labels")
    if keep_versions is not None:
        adapter.keep_versions = _count("keep_versions", keep_versions)
        paths.append("keep_versions")
    if sum((expire_time is not None, ttl_s is not None, never_expires)) > 1:
        raise invalid_field("expire_time", "give one of expire_time, ttl_s and never_expires")
    if expire_time is not None:
        if expire_time.tzinfo is None:
            raise invalid_field("expire_time", "has no time zone; give one, such as datetime.UTC")
        adapter.expire_time.FromDatetime(expire_time)
    if ttl_s is not None:
        request.ttl.CopyFrom(duration_of(ttl_s, "ttl"))
    if expire_time is not None or ttl_s is not None or never_expires:
        paths.append("expire_time")


def set_canary(name: str, canary: AdapterCanary | None, etag: str) -> UnaryCall[Adapter]:
    adapter = adapters_pb2.Adapter(name=resource_name(name), etag=etag)
    if canary is not None:
        adapter.canary.digest = canary.digest
        adapter.canary.per_mille = _count("canary.per_mille", canary.per_mille)
    request = adapters_pb2.UpdateAdapterRequest(adapter=adapter, update_mask=FieldMask(paths=["canary"]))
    return adapter_call("UpdateAdapter", request, is_repeatable=False)  # another may have changed it meanwhile


def set_label(adapter: Adapter, label: str, digest: str | None) -> UnaryCall[Adapter]:
    """All labels of the adapter that was read, with this one changed, if nothing else changed the adapter."""
    labels = {name: labelled for name, labelled in adapter.version_labels.items() if name != label}
    if digest is not None:
        labels[label] = digest
    changed = adapters_pb2.Adapter(name=resource_name(adapter.id), etag=adapter.etag, version_labels=labels)
    request = adapters_pb2.UpdateAdapterRequest(adapter=changed, update_mask=FieldMask(paths=["version_labels"]))
    return adapter_call("UpdateAdapter", request, is_repeatable=False)


def roll_back(name: str, etag: str, expected_digest: str) -> UnaryCall[Adapter]:
    request = adapters_pb2.RollbackAdapterRequest(name=resource_name(name), etag=etag, expected_digest=expected_digest)
    return adapter_call("RollbackAdapter", request, is_repeatable=False)  # made twice, it goes back twice


def duration_of(seconds: float, field: str) -> Duration:
    """A duration, to the microsecond. Raises InvalidArgument for what the wire cannot carry."""
    duration = Duration()
    try:
        duration.FromMicroseconds(round(seconds * 1e6))
    except (ValueError, OverflowError) as error:
        raise invalid_field(field, f"is {seconds!r}; give a number of seconds") from error
    return duration


def _count(field: str, value: int) -> int:
    if not 0 <= value <= MAX_UINT32:
        raise invalid_field(field, f"is {value}; give a count from 0 to {MAX_UINT32}")
    return value
