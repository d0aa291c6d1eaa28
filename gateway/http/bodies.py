"""Reads a request's body within the limits and decodes it strictly: unknown fields and wrong types are refused."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.requests import Request

from gateway.http.errors import Refusal
from gateway.http.keys import current_owner

T = TypeVar("T")
# The gateway reads a body for GRACE_S, and a second longer for every LEAST_BYTES_PER_S of it.
GRACE_S = 30.0
LEAST_BYTES_PER_S = 64 << 10
NUM_LONGEST = 8  # bodies of the longest length that are read at once, in bytes together
# Of one body. Decoding keeps the event loop from everybody else: 31 MiB of empty lists took 2.3 s, 250,000 of them
# 20 ms, and 2,000,000 short texts 0.1 s. Characters of texts count, too: so many are in no text that fits a context.
MAX_CONTAINERS = 250_000
MAX_VALUES = 2_000_000
# msgspec calls a body with half of a surrogate pair malformed, or cut off.
_HALF = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u(?:d[89ab][0-9a-f]{2}(?!\\ud[c-f][0-9a-f]{2})|(?<!\\ud[89ab][0-9a-f]{2}\\u)d[c-f][0-9a-f]{2}))",
    re.IGNORECASE,
)
MOST_SEARCHED = 1 << 20  # bytes of a body; no text that is served is longer
_LATER = {"retry-after": "1", "retry-after-ms": "1000"}


def decoded_as(body: bytes, kind: type[T]) -> T:
    """A body as a message. Raises ValueError if it is not one, whatever is wrong with it."""
    if not body or body.isspace():
        raise ValueError("it is empty; send a JSON object, {} if no field is to be set")
    if len(body) > MAX_CONTAINERS:
        if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
            raise ValueError(f"JSON has more than {MAX_CONTAINERS} lists and objects; send less in one request")
        if body.count(b",") >= MAX_VALUES:
            raise ValueError(f"JSON has more than {MAX_VALUES} values; send less in one request")
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ValueError("JSON is not valid UTF-8; encode it as UTF-8") from error
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        if (half := _HALF.search(body, 0, MOST_SEARCHED)) is not None:
            place = half.start(1)
            raise ValueError(f"a text has half of a surrogate pair at byte {place}; send whole characters") from error
        raise
    # msgspec's errors are ValueErrors.


def decoded_or_refused(body: bytes, kind: type[T]) -> T:
    """A body as a message. Raises Refusal."""
    try:
        return decoded_as(body, kind)
    except ValueError as error:
        raise Refusal(400, f"the body is not a valid {kind.__name__}: {error}") from error


@dataclass(slots=True, eq=False)
class _Reading:
    """A body that is being read."""

    owner: str
    limit: asyncio.Timeout
    size_bytes: int = 0
    is_given_up: bool = False  # another key needs its room; it ends with its next turn


class Bodies:
    """Bodies of at most `max_bytes`."""

    def __init__(
        self, max_bytes: int, check_caller: Callable[[], Awaitable[None]] | None = None, *, grace_s: float = GRACE_S
    ) -> None:
        """`check_caller` raises if nothing is to be read of the caller of the current request."""
        self._max_bytes = max_bytes
        self._check_caller = check_caller
        self._grace_s = grace_s
        self._readings: set[_Reading] = set()
        # Invariant: the sum of size_bytes over the _readings that are not given up.
        self._held_bytes = 0

    async def read(self, request: Request) -> bytes:
        """The whole body. Raises Refusal as soon as it is too long or too slow, and what `check_caller` raises."""
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise self._too_long()
        if self._check_caller is not None:
            await self._check_caller()
        parts: list[bytes] = []
        begun_s = asyncio.get_running_loop().time()
        reading: _Reading | None = None
        try:
            async with asyncio.timeout_at(begun_s + self._grace_s) as limit:
                reading = _Reading(current_owner(), limit)
                self._readings.add(reading)
                async for part in request.stream():
                    reading.size_bytes += len(part)
                    self._held_bytes += 0 if reading.is_given_up else len(part)
                    if reading.size_bytes > self._max_bytes:
                        raise self._too_long()
                    self._make_room(reading)
                    parts.append(part)
                    if not reading.is_given_up:
                        limit.reschedule(begun_s + self._grace_s + reading.size_bytes / LEAST_BYTES_PER_S)
        except TimeoutError:
            assert reading is not None, "nothing was awaited before"
            if reading.is_given_up:
                raise _too_many() from None
            raise Refusal(
                408,
                f"{reading.size_bytes} bytes of the body came in {self._grace_s:g} s and longer; send it again over a "
                "faster connection",
                headers={"connection": "close"},
            ) from None
        finally:
            if reading is not None:
                self._readings.discard(reading)
                self._held_bytes -= 0 if reading.is_given_up else reading.size_bytes
        return b"".join(parts)

    def _make_room(self, newest: _Reading) -> None:
        """Give up bodies of the key that holds the most, until all fit. Raises Refusal where that key sends `newest`.

        So no key shuts the others out, however many long bodies it sends, and however slowly.
        """
        while self._held_bytes > NUM_LONGEST * self._max_bytes and not newest.is_given_up:
            held: Counter[str] = Counter()
            for reading in self._readings:
                held[reading.owner] += 0 if reading.is_given_up else reading.size_bytes
            owner = max(held, key=lambda owner: held[owner])
            if held[owner] == held[newest.owner]:
                raise _too_many()
            longest = max(
                (reading for reading in self._readings if reading.owner == owner and not reading.is_given_up),
                key=lambda reading: reading.size_bytes,
            )
            longest.is_given_up = True
            self._held_bytes -= longest.size_bytes
            longest.limit.reschedule(asyncio.get_running_loop().time())

    async def decode(self, request: Request, kind: type[T]) -> T:
        """The body as a message. Raises Refusal."""
        return decoded_or_refused(await self.read(request), kind)

    def _too_long(self) -> Refusal:
        return Refusal(413, f"the body is longer than {self._max_bytes} bytes, which --max-body-bytes sets")


def _too_many() -> Refusal:
    return Refusal(503, "too many long bodies at present; send it again", headers=_LATER)
