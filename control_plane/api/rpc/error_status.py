"""Turns an error into what a client receives: status code, short message, google.rpc details.

Owns the wire form of errors. Raises nothing and logs nothing; the interceptor calls it.
"""

from __future__ import annotations

import math

from google.protobuf import duration_pb2

# googleapis-common-protos ships no py.typed marker.
from google.rpc import error_details_pb2, status_pb2

from control_plane.errors import (
    ERROR_DOMAIN,
    AdapterNotFound,
    AuditUnavailable,
    Exhausted,
    InvalidRequest,
    MotetError,
    QuotaExceeded,
    Unavailable,
    status_of,
)

DETAILS_KEY = "grpc-status-details-bin"
# Trailers count against the client's metadata limit (8 KiB by default). The worst case: the message three times as
# long by percent-encoding, and again, with the violations, one third longer in base64: about 6 KiB.
MAX_MESSAGE_BYTES = 700
MAX_VIOLATIONS = 6
MAX_FIELD_BYTES = 120
MAX_DESCRIPTION_BYTES = 240


def shorten(text: str, max_bytes: int) -> str:
    """`text`, its end replaced by an ellipsis where it is longer than `max_bytes` of UTF-8."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= max_bytes:
        return text
    return encoded[: max_bytes - 3].decode("utf-8", "ignore") + "…"


def status_proto(error: MotetError) -> status_pb2.Status:
    """The google.rpc.Status for `error`."""
    message = shorten(str(error), MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=status_of(error).value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    if isinstance(error, AdapterNotFound):
        info.metadata["adapter"] = shorten(error.resource, MAX_DESCRIPTION_BYTES)
    if isinstance(error, QuotaExceeded):
        info.metadata.update({"tenant": error.tenant, "quota": error.quota, "limit": str(error.limit)})
    if isinstance(error, AuditUnavailable):
        info.metadata["change_made"] = "true" if error.is_change_made else "false"
    if isinstance(error, (Exhausted, Unavailable)):
        # Rounded up: whoever waits that long does not come too early. Never 0, which clients would take for "at once".
        retry_after_ms = max(math.ceil(error.retry_after_s * 1000), 1)
        info.metadata["retry_after_s"] = f"{retry_after_ms / 1000:.10g}"
    status.details.add().Pack(info)
    if isinstance(error, InvalidRequest):
        bad = error_details_pb2.BadRequest()
        for violation in error.violations[:MAX_VIOLATIONS]:
            bad.field_violations.add(
                field=shorten(violation.field, MAX_FIELD_BYTES),
                description=shorten(violation.description, MAX_DESCRIPTION_BYTES),
                reason=error.reason,
            )
        status.details.add().Pack(bad)
    if isinstance(error, AdapterNotFound):
        resource = error_details_pb2.ResourceInfo(
            resource_type="motet.v1.Adapter", resource_name=shorten(error.resource, MAX_FIELD_BYTES)
        )
        status.details.add().Pack(resource)
    if isinstance(error, QuotaExceeded):
        failure = error_details_pb2.QuotaFailure()
        failure.violations.add(
            subject=f"tenants/{error.tenant}", description=f"{error.quota}: limit {error.limit}; {message}"
        )
        status.details.add().Pack(failure)
    if isinstance(error, (Exhausted, Unavailable)):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(retry_after_ms)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def internal_status(correlation_id: str) -> status_pb2.Status:
    """The status for our own mistakes: nothing but an id that the server's log knows."""
    error = MotetError(f"internal error; the server's log has it under correlation id {correlation_id}")
    status = status_proto(error)
    del status.details[:]
    info = error_details_pb2.ErrorInfo(reason=MotetError.reason, domain=ERROR_DOMAIN)
    info.metadata["correlation_id"] = correlation_id
    status.details.add().Pack(info)
    return status
