"""Reads a request's body within the limits and decodes it strictly: unknown fields and wrong types are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request

from gateway.http.errors import Refusal

T = TypeVar("T")
# The gateway reads a body for GRACE_S, and a second longer for every LEAST_BYTES_PER_S of it.
GRACE_S = 30.0
LEAST_BYTES_PER_S = 64 << 10
NUM_LONGEST = 8  # bodies of the longest length that are read at once, in bytes together
_LATER = {"retry-after": "1", "retry-after-ms": "1000"}


def decoded_as(body: bytes, kind: type[T]) -> T:
    """A body as a message. Raises ValueError if it is none, whatever is wrong with it."""
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error
    # msgspec's errors are ValueErrors.


def decoded_or_refused(body: bytes, kind: type[T]) -> T:
    """A body as a message. Raises Refusal."""
    try:
        return decoded_as(body, kind)
    except ValueError as error:
        raise Refusal(400, f"the body is not a valid {kind.__name__}: {error}") from error


class Bodies:
    """Bodies of at most `max_bytes`."""

    def __init__(
        self, max_bytes: int, check_caller: Callable[[], Awaitable[None]] | None = None, *, grace_s: float = GRACE_S
    ) -> None:
        """`check_caller` raises if nothing is to be read of the caller of the current request."""
        self._max_bytes = max_bytes
        self._check_caller = check_caller
        self._grace_s = grace_s
        self._held_bytes = 0  # of bodies that are being read

    async def read(self, request: Request) -> bytes:
        """The whole body. Raises Refusal as soon as it is too long or too slow, and what `check_caller` raises."""
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise self._too_long()
        if self._check_caller is not None:
            await self._check_caller()
        parts, size = [], 0
        begun_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(begun_s + self._grace_s) as limit:
                async for part in request.stream():
                    size += len(part)
                    self._held_bytes += len(part)
                    if size > self._max_bytes:
                        raise self._too_long()
                    if self._held_bytes > NUM_LONGEST * self._max_bytes:
                        raise Refusal(503, "too many long bodies at present; send it again", headers=_LATER)
                    parts.append(part)
                    limit.reschedule(begun_s + self._grace_s + size / LEAST_BYTES_PER_S)
        except TimeoutError:
            raise Refusal(
                408,
                f"{size} bytes of the body came in {self._grace_s:g} s and longer; send it again over a faster "
                "connection",
                headers={"connection": "close"},
            ) from None
        finally:
            self._held_bytes -= size
        return b"".join(parts)

    async def decode(self, request: Request, kind: type[T]) -> T:
        """The body as a message. Raises Refusal."""
        return decoded_or_refused(await self.read(request), kind)

    def _too_long(self) -> Refusal:
        return Refusal(413, f"the body is longer than {self._max_bytes} bytes, which --max-body-bytes sets")
