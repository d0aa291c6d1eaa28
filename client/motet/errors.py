"""Every error the SDK raises, and the one table from gRPC status codes to them.

Errors of the server arrive as a status with google.rpc details (BadRequest, ErrorInfo, RetryInfo, ResourceInfo)
and are decoded here. What the SDK itself refuses, such as a missing file, uses the same classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True)
class FieldViolation:
    """One thing wrong with one field of a request."""

    field: str  # path of the field, such as "sampling.temperature"
    description: str  # what is wrong, the value and the limit


class MotetError(Exception):
    """Base of all errors that the SDK raises.

    `reason` is stable and made for programs ("ADAPTER_NOT_FOUND", "QUEUE_FULL"); empty if the server gave none.
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        field_violations: Iterable[FieldViolation] = (),
        retry_after_s: float | None = None,
        resource: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        self.reason = reason
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata or {}))
        self.field_violations = tuple(field_violations)
        self.retry_after_s = retry_after_s  # seconds the server wants the client to wait; None: it did not say
        self.resource = resource  # such as "adapters/{id}"; empty if the error is about none

    def extended(self, text: str) -> Self:
        """The same error with a sentence more."""
        return self.replaced(f"{self.message}; {text}")

    def replaced(self, message: str, *, reason: str = "") -> Self:
        """The same error with another message, and another reason if one is given."""
        error = type(self)(
            message,
            code=self.code,
            reason=reason or self.reason,
            metadata=self.metadata,
            field_violations=self.field_violations,
            retry_after_s=self.retry_after_s,
            resource=self.resource,
        )
        error.__cause__ = self.__cause__
        return error


class InvalidArgument(MotetError):
    """The request can never work as it is; `field_violations` says why."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(MotetError):
    """No such adapter, version or operation."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(MotetError):
    """The name is taken."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(MotetError):
    """Fine as it is, but not in the server's present state: wrong base model, adapter being deleted."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhausted(MotetError):
    """A queue, budget or quota is full, or a message too large; see `retry_after_s`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(MotetError):
    """The server cannot be reached or cannot respond at present."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(MotetError):
    """The time given for the call ran out."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(MotetError):
    """The call was cancelled."""

    code = grpc.StatusCode.CANCELLED


class Aborted(MotetError):
    """The resource changed since it was read, or the generation could not go on."""

    code = grpc.StatusCode.ABORTED


class DataLoss(MotetError):
    """Bytes or tokens did not arrive as announced."""

    code = grpc.StatusCode.DATA_LOSS


class PermissionDenied(MotetError):
    """Not allowed to this caller."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unauthenticated(MotetError):
    """No credentials, or none that count."""

    code = grpc.StatusCode.UNAUTHENTICATED


class Unimplemented(MotetError):
    """The server does not know this call: it is older, or another service."""

    code = grpc.StatusCode.UNIMPLEMENTED


class OutOfRange(MotetError):
    """A position beyond the end."""

    code = grpc.StatusCode.OUT_OF_RANGE


class ServerError(MotetError):
    """A mistake of the server (INTERNAL or UNKNOWN)."""

    code = grpc.StatusCode.INTERNAL


ERROR_BY_CODE: dict[grpc.StatusCode, type[MotetError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.DATA_LOSS: DataLoss,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRange,
    grpc.StatusCode.INTERNAL: ServerError,
    grpc.StatusCode.UNKNOWN: ServerError,
}
_CODE_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def error_from_rpc(rpc_error: grpc.RpcError) -> MotetError:
    """The MotetError that a failed call means, caused by it. Takes errors of grpc and of grpc.aio alike."""
    error = _read_error(rpc_error)
    error.__cause__ = rpc_error
    return error


def _read_error(rpc_error: grpc.RpcError) -> MotetError:
    code = rpc_error.code()
    message = rpc_error.details() or code.name
    trailers: Iterable[tuple[str, str | bytes]] = rpc_error.trailing_metadata() or ()  # type: ignore[assignment]  # tuples
    for key, value in trailers:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return error_from_status(status_pb2.Status.FromString(value), code=code)
            except DecodeError:
                break  # a proxy's garbage must not hide the status itself
    return ERROR_BY_CODE.get(code, MotetError)(message, code=code)


def error_from_status(status: status_pb2.Status, *, code: grpc.StatusCode | None = None) -> MotetError:
    """The MotetError that a google.rpc.Status means; `code` wins over the one in it."""
    code = code or _CODE_BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    resource = error_details_pb2.ResourceInfo()
    retry_after_s: float | None = None
    for detail in status.details:
        for message in (info, bad_request, retry, resource):
            if detail.Is(message.DESCRIPTOR):
                detail.Unpack(message)
                if message is retry:
                    retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return ERROR_BY_CODE.get(code, MotetError)(
        status.message or code.name,
        code=code,
        reason=info.reason,
        metadata=info.metadata,
        field_violations=[FieldViolation(v.field, v.description) for v in bad_request.field_violations],
        retry_after_s=retry_after_s,
        resource=resource.resource_name,
    )


def client_closed() -> Cancelled:
    """What a call of a client ends with that is closed meanwhile."""
    return Cancelled("the client was closed before the call had ended", reason="CANCELLED")


def invalid_field(field: str, description: str, *, reason: str = "FIELD_INVALID") -> InvalidArgument:
    """What the SDK raises for an argument that no server could accept."""
    return InvalidArgument(
        f"{field}: {description}", reason=reason, field_violations=(FieldViolation(field, description),)
    )
