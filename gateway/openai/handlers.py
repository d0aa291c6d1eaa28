"""What handlers of requests have in common: how a body is decoded, and what an error becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from motet import MotetError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from gateway.http.bodies import Bodies, decoded_as
from gateway.http.errors import Refusal, client_gone
from gateway.openai.errors import error_body, refusal_of, renamed, undecodable
from gateway.openai.responses import ClientGone

T = TypeVar("T")
MAX_FOR_NULLS = 512 << 10  # bytes of a body in which fields that are not known may be null: 80 ms of fields at most


async def decoded(bodies: Bodies, request: Request, kind: type[T]) -> T:
    """The body as a message. Raises Refusal, with the name of the field."""
    data = await bodies.read(request)
    try:
        return _decoded(data, kind)
    except ValueError as error:
        raise undecodable(error) from error


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return decoded_as(data, kind)
    except ValueError as error:
        if not str(error).startswith("Object contains unknown field") or len(data) > MAX_FOR_NULLS:
            raise
        return decoded_as(_without_nulls(data), kind)


def _without_nulls(data: bytes) -> bytes:
    """The body without the fields that are null: they count as left out, also where they are not known."""
    fields = decoded_as(data, dict[str, msgspec.Raw])
    return msgspec.json.encode({name: value for name, value in fields.items() if bytes(value) != b"null"})


def name_fields(request: Request, names: Mapping[str, str]) -> None:
    """Let a refusal of this request call fields by other names: those that the body has for them."""
    request.state.names_of_fields = names


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, (Refusal, MotetError))
    refusal = refusal_of(error)
    names: Mapping[str, str] = getattr(request.state, "names_of_fields", {})
    if (name := names.get(getattr(refusal, "param", None) or "")) is not None:
        refusal = renamed(refusal, name)
    return JSONResponse(error_body(refusal), status_code=refusal.status, headers=dict(refusal.headers))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal = Refusal(error.status_code, f"{request.method} {request.url.path[:200]} is not served")
    headers = {name: value for name, value in (error.headers or {}).items() if name.lower() == "allow"}
    return JSONResponse(error_body(refusal), status_code=refusal.status, headers=headers)


EXCEPTION_HANDLERS: Mapping[Any, Callable[[Request, Exception], Any]] = {
    Refusal: _refused,
    MotetError: _refused,
    HTTPException: _no_route,
    ClientGone: client_gone,
    ClientDisconnect: client_gone,  # before the whole body was there
}
