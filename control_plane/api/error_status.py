"""Turns an error into what a client receives: status code, short message, google.rpc details.

Owns the wire form of errors. Raises nothing and logs nothing; the interceptor calls it.
"""

from __future__ import annotations

from google.protobuf import duration_pb2

# googleapis-common-protos ships no py.typed marker.
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from control_plane.errors import (
    ERROR_DOMAIN,
    AdapterNotFound,
    Exhausted,
    InvalidRequest,
    MotetError,
    Unavailable,
    status_of,
)

DETAILS_KEY = "grpc-status-details-bin"
# Trailers count against the client's metadata limit (8 KiB by default), so the parts are bounded.
MAX_MESSAGE_CHARS = 800
MAX_VIOLATIONS = 8
MAX_DESCRIPTION_CHARS = 240


def shorten(text: str, limit: int) -> str:
    """`text`, its end replaced by an ellipsis where it is longer than `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def status_proto(error: MotetError) -> status_pb2.Status:
    """The google.rpc.Status that tells `error`."""
    message = shorten(str(error), MAX_MESSAGE_CHARS)
    status = status_pb2.Status(code=status_of(error).value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    if isinstance(error, AdapterNotFound):
        info.metadata["adapter"] = shorten(error.resource, MAX_DESCRIPTION_CHARS)
    if isinstance(error, (Exhausted, Unavailable)):
        info.metadata["retry_after_s"] = f"{error.retry_after_s:g}"
    status.details.add().Pack(info)
    if isinstance(error, InvalidRequest):
        bad = error_details_pb2.BadRequest()
        for violation in error.violations[:MAX_VIOLATIONS]:
            bad.field_violations.add(
                field=shorten(violation.field, MAX_DESCRIPTION_CHARS),
                description=shorten(violation.description, MAX_DESCRIPTION_CHARS),
                reason=error.reason,
            )
        status.details.add().Pack(bad)
    if isinstance(error, AdapterNotFound):
        resource = error_details_pb2.ResourceInfo(
            resource_type="motet.v1.Adapter", resource_name=error.resource, description=message
        )
        status.details.add().Pack(resource)
    if isinstance(error, (Exhausted, Unavailable)):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(max(int(error.retry_after_s * 1000), 0))
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
