"""Refusals as the Tinker SDK reads them: `{"detail": message}`."""

from __future__ import annotations

import msgspec
from motet import MotetError
from starlette.responses import JSONResponse, Response

from gateway.http.errors import Refusal, refusal_from


class DetailBody(msgspec.Struct):
    """The body of every refusal."""

    detail: str


_CONFLICT = 409
_BAD_REQUEST = 400


def response_to(error: Refusal | MotetError) -> Response:
    """What a request is refused with. The SDK repeats 409 for minutes, so that it is 400."""
    refusal = refusal_from(error) if isinstance(error, MotetError) else error
    status = _BAD_REQUEST if refusal.status == _CONFLICT else refusal.status
    headers = {} if status != refusal.status else dict(refusal.headers)
    return JSONResponse(msgspec.to_builtins(DetailBody(refusal.message)), status_code=status, headers=headers)
