"""Reads a request's body within the limit and decodes it strictly: unknown fields and wrong types are refused."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request

from gateway.http.errors import Refusal

T = TypeVar("T")


class Bodies:
    """Bodies of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    async def read(self, request: Request) -> bytes:
        """The whole body. Raises Refusal as soon as it is too long."""
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise self._too_long()
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_bytes:
                raise self._too_long()
            parts.append(part)
        return b"".join(parts)

    async def decode(self, request: Request, kind: type[T]) -> T:
        """The body as a message. Raises Refusal."""
        body = await self.read(request)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # a ValidationError is a DecodeError
            raise Refusal(400, f"the body is not a valid {kind.__name__}: {error}") from error

    def _too_long(self) -> Refusal:
        return Refusal(413, f"the body is longer than {self._max_bytes} bytes, which --max-body-bytes sets")
