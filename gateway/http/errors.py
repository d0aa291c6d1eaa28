"""What a caller is refused with: an HTTP status, a sentence, headers. The one table from gRPC's statuses to HTTP's.

A protocol gives a refusal the body that its clients read.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from motet import MotetError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

CLIENT_CLOSED = 499  # nobody reads it, the metrics count it
MAX_MESSAGE_CHARS = 2000  # of a message, which may repeat what the caller sent

_STATUS_BY_CODE: Mapping[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# Clients repeat 409, 429 and every 5xx by themselves. Where a repetition cannot help, a header says so.
_NO_RETRY = {"x-should-retry": "false"}
_WITHOUT_RETRY = frozenset({409, 413, 500, 501, 504})


# What an open request gets when --drain-timeout-s has passed, with status 503.
STOPPING = "the gateway is stopping, and this request took longer than it waits; send it again"


class Refusal(Exception):
    """A request that is not served."""

    def __init__(self, status: int, message: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE_CHARS]
        self.headers: Mapping[str, str] = dict(headers or {})


def refusal_from(error: MotetError) -> Refusal:
    """What an error of the SDK is over HTTP. An unknown one is 500."""
    status = _STATUS_BY_CODE.get(error.code, 500)
    message = error.message
    if any(violation.field == "api_key" for violation in error.field_violations):
        status = 401  # no key has this form
    # Not one of Motet's own: gRPC refuses a message by its size.
    if status == 429 and not error.reason and error.retry_after_s is None:
        status, message = 413, f"the request is larger than Motet takes in one message; shorten it ({message})"
    headers = dict(_NO_RETRY) if status in _WITHOUT_RETRY else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after-ms"] = str(round(error.retry_after_s * 1000))
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return Refusal(status, message, headers=headers)


def is_callers_mistake(error: MotetError) -> bool:
    """Whether the caller has to change something: the request, the key, or the adapter."""
    return _STATUS_BY_CODE.get(error.code, 500) < 429


def closing_response(status: int, message: str, kind: str = "invalid_request_error") -> JSONResponse:
    """The refusal of a request that no protocol's handler gets. The connection is closed behind it."""
    error = {"message": message, "type": kind, "param": None, "code": None}
    headers = {"retry-after": "1"} if status == 503 else {}
    return JSONResponse({"error": error}, status, headers={"connection": "close", **headers})


async def client_gone(_request: Request, _error: Exception) -> Response:
    """The end of a request whose client left before its body was there, or before the response."""
    return Response(status_code=CLIENT_CLOSED)
