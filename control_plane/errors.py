"""Every error that a client may see, and the one table to gRPC status codes.

Code elsewhere raises these plainly; `control_plane.api.rpc.interceptor` turns them into a status with google.rpc
details. Messages are read by clients: they name the field, the value, the limit and the next step, and never a
path, a key, an address or a stack.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Self

import grpc

ERROR_DOMAIN = "motet"


class MotetError(Exception):
    """Base of all errors that a client may see. `reason` is the ErrorInfo reason."""

    reason = "INTERNAL"
    is_audited = False  # whether a line of the audit log is about it already
    refused_principal: object = None  # whom the audit log names, where the call has no caller yet

    def of(self, principal: object) -> Self:
        """This error, with the Principal that is refused. It needs no rights."""
        self.refused_principal = principal
        return self


@dataclass(frozen=True)
class FieldViolation:
    """One thing wrong with one field of a request."""

    field: str  # path of the field, such as "sampling.temperature"
    description: str  # what is wrong, the value and the limit


class InvalidRequest(MotetError):
    """The caller sent something that can never work as it is."""

    reason = "FIELD_INVALID"

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations


class InvalidAdapter(InvalidRequest):
    """The adapter's files cannot be served; the fields are config keys or tensor names."""

    reason = "ADAPTER_INVALID"


class ContextTooLong(InvalidRequest):
    """Prompt and max_tokens do not fit the context or the KV cache of any worker."""

    reason = "CONTEXT_TOO_LONG"


class QuotaTooSmall(InvalidRequest):
    """The request alone exceeds a quota of its tenant: waiting does not help."""

    reason = "QUOTA_TOO_SMALL"


class Unauthenticated(MotetError):
    """The call has no credential, or one that is not valid."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(MotetError):
    """The credential is valid and does not allow the call."""

    reason = "PERMISSION_DENIED"


class SignatureInvalid(MotetError):
    """The adapter's signature is missing where one is required, is not valid, or is nobody's who is trusted."""

    reason = "SIGNATURE_INVALID"


class AdapterNotFound(MotetError):
    """No adapter of that name, or no such version."""

    reason = "ADAPTER_NOT_FOUND"

    def __init__(self, message: str, *, resource: str) -> None:
        super().__init__(message)
        self.resource = resource  # "adapters/{id}"


class LoraTaskNotCached(AdapterNotFound):
    """The caller's tenant has no LoRA task of that id in the cache, or not with those weights."""

    reason = "LORA_TASK_NOT_CACHED"


class AdapterNameTaken(MotetError):
    """The name belongs to an adapter of another tenant, of which the caller learns nothing else."""

    reason = "NAME_TAKEN"


class LoraTaskTaken(AdapterNameTaken):
    """The LoRA task is cached with other weights, which stay."""

    reason = "LORA_TASK_TAKEN"


class OperationNotFound(MotetError):
    """No long-running operation of that name."""

    reason = "OPERATION_NOT_FOUND"


class UploadNotFound(MotetError):
    """No upload of the caller with that id can be continued."""

    reason = "UPLOAD_NOT_FOUND"


class WorkerNotFound(MotetError):
    """No worker of that id."""

    reason = "WORKER_NOT_FOUND"


class LastWorker(MotetError):
    """No other worker takes requests."""

    reason = "LAST_WORKER"


class UploadTakenOver(MotetError):
    """Another call continues the upload that this call sent."""

    reason = "UPLOAD_TAKEN_OVER"


class AdapterNotActive(MotetError):
    """The adapter exists and cannot be used: it is being deleted or its record is broken."""

    reason = "ADAPTER_NOT_ACTIVE"


class AdapterVersionActive(MotetError):
    """The version is the one that new requests get, so it cannot be deleted."""

    reason = "VERSION_ACTIVE"


class AdapterVersionHeld(MotetError):
    """A label points to the version, or it is the canary, so it cannot be deleted."""

    reason = "VERSION_HELD"


class NoFormerVersion(MotetError):
    """No version was active before the active one, so there is nothing to go back to."""

    reason = "NO_FORMER_VERSION"


class AdapterDamaged(MotetError):
    """The stored weights of the adapter are not those that were registered."""

    reason = "ADAPTER_DAMAGED"


class AdapterNotServed(MotetError):
    """The adapter changes modules that no worker lets adapters change."""

    reason = "ADAPTER_NOT_SERVED"


class PoolingNotServed(MotetError):
    """The base model, or the adapter, has no vectors of the kind that is requested."""

    reason = "POOLING_NOT_SERVED"


class AdapterTooLarge(MotetError):
    """The adapters of a request fit the adapter memory of no worker, or pinned ones leave no room for them."""

    reason = "ADAPTER_TOO_LARGE"


class BaseModelMismatch(MotetError):
    """The adapter or the worker belongs to another base model."""

    reason = "BASE_MODEL_MISMATCH"


class TokenizerUnavailable(MotetError):
    """The checkpoint gives no tokenizer or no chat template; token ids still work."""

    reason = "TOKENIZER_UNAVAILABLE"


class PreconditionFailed(MotetError):
    """The request relies on a model or a prompt that is not the one here."""

    reason = "PRECONDITION_FAILED"


class StaleControlPlane(MotetError):
    """The worker served a later session than any that this control plane can give it."""

    reason = "STALE_CONTROL_PLANE"


class EtagMismatch(MotetError):
    """The resource changed since the caller read it."""

    reason = "ETAG_MISMATCH"


class DigestMismatch(MotetError):
    """Bytes did not arrive as announced."""

    reason = "DIGEST_MISMATCH"


class PathNotAllowed(MotetError):
    """A source outside the operator's roots."""

    reason = "PATH_NOT_ALLOWED"


class Exhausted(MotetError):
    """A queue, budget or quota is full; try again after `retry_after_s`."""

    reason = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Exhausted):
    """Too many requests wait already."""

    reason = "QUEUE_FULL"


class QuotaExceeded(Exhausted):
    """The tenant uses all that it is granted at present."""

    reason = "QUOTA_EXCEEDED"

    def __init__(self, message: str, *, tenant: str, quota: str, limit: int, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.tenant = tenant
        self.quota = quota  # name of the limit, as in the operator's file
        self.limit = limit


class PinBudgetExceeded(Exhausted):
    """The pinned adapters would not fit the host cache."""

    reason = "PIN_BUDGET"


class SlowConsumer(Exhausted):
    """The client did not read its stream for too long."""

    reason = "SLOW_CONSUMER"


class Unavailable(MotetError):
    """The service cannot respond at present; try again after `retry_after_s`."""

    reason = "UNAVAILABLE"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorker(Unavailable):
    """No worker is attached."""

    reason = "NO_WORKER"


class ShuttingDown(Unavailable):
    """The server is shutting down. Any call may be repeated: of one that changes something it has begun nothing."""

    reason = "DRAINING"

    def __init__(
        self,
        message: str = "the server is shutting down; try another one, or again in a moment",
        *,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class WorkerIdTaken(Unavailable):
    """Another worker is attached under the worker's id."""

    reason = "WORKER_ID_TAKEN"


class WorkerQuarantined(Unavailable):
    """The worker's sessions keep ending by faults."""

    reason = "WORKER_QUARANTINED"


class WorkerLost(Unavailable):
    """The request lost its worker too often."""

    reason = "WORKER_LOST"


class AdapterLoadFailed(Unavailable):
    """No worker could load the adapter."""

    reason = "ADAPTER_LOAD_FAILED"


class StoreUnavailable(Unavailable):
    """The artifact store does not respond."""

    reason = "STORE_DOWN"


class AuditUnavailable(Unavailable):
    """The audit log cannot be written: nothing was changed, or a change was made that has no line yet."""

    reason = "AUDIT_LOG_DOWN"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, is_change_made: bool = False) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.is_change_made = is_change_made


class NotFinite(MotetError):
    """The model's logits were not finite for this request."""

    reason = "LOGITS_NOT_FINITE"


class ConstraintFailed(MotetError):
    """The request's constraint took too much work to follow."""

    reason = "CONSTRAINT_FAILED"


class PoisonedRequest(MotetError):
    """Workers died whenever they computed the request; it is not tried again."""

    reason = "POISONED_REQUEST"


class DeadlineExceeded(MotetError):
    """The request's deadline passed."""

    reason = "DEADLINE_EXCEEDED"


# The most exact class wins: the interceptor walks an error's method resolution order.
STATUS_BY_ERROR: dict[type[MotetError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    AdapterNotFound: grpc.StatusCode.NOT_FOUND,
    AdapterNameTaken: grpc.StatusCode.ALREADY_EXISTS,
    OperationNotFound: grpc.StatusCode.NOT_FOUND,
    UploadNotFound: grpc.StatusCode.NOT_FOUND,
    WorkerNotFound: grpc.StatusCode.NOT_FOUND,
    LastWorker: grpc.StatusCode.FAILED_PRECONDITION,
    UploadTakenOver: grpc.StatusCode.ABORTED,
    AdapterNotActive: grpc.StatusCode.FAILED_PRECONDITION,
    AdapterVersionActive: grpc.StatusCode.FAILED_PRECONDITION,
    AdapterVersionHeld: grpc.StatusCode.FAILED_PRECONDITION,
    NoFormerVersion: grpc.StatusCode.FAILED_PRECONDITION,
    AdapterDamaged: grpc.StatusCode.DATA_LOSS,
    AdapterNotServed: grpc.StatusCode.FAILED_PRECONDITION,
    PoolingNotServed: grpc.StatusCode.FAILED_PRECONDITION,
    AdapterTooLarge: grpc.StatusCode.FAILED_PRECONDITION,
    BaseModelMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    PreconditionFailed: grpc.StatusCode.FAILED_PRECONDITION,
    SignatureInvalid: grpc.StatusCode.FAILED_PRECONDITION,
    StaleControlPlane: grpc.StatusCode.FAILED_PRECONDITION,
    TokenizerUnavailable: grpc.StatusCode.FAILED_PRECONDITION,
    EtagMismatch: grpc.StatusCode.ABORTED,
    DigestMismatch: grpc.StatusCode.DATA_LOSS,
    PathNotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    NotFinite: grpc.StatusCode.ABORTED,
    ConstraintFailed: grpc.StatusCode.ABORTED,
    PoisonedRequest: grpc.StatusCode.ABORTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    MotetError: grpc.StatusCode.INTERNAL,
}


def status_of(error: MotetError) -> grpc.StatusCode:
    """The gRPC status code for `error`."""
    return next(STATUS_BY_ERROR[cls] for cls in type(error).__mro__ if cls in STATUS_BY_ERROR)


def correlation_id_of(error: BaseException) -> str:
    """The id under which the log and the client know a mistake of ours: the same one at every call."""
    if not hasattr(error, _CORRELATION_ID):
        setattr(error, _CORRELATION_ID, secrets.token_hex(8))
    correlation_id: str = getattr(error, _CORRELATION_ID)
    return correlation_id


_CORRELATION_ID = "motet_correlation_id"
