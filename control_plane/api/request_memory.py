"""Idempotency: a repeated call with the same request id gets the first one's answer, for a day.

Bounded: beyond `max_entries` the oldest finished answers are forgotten.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from control_plane.api.validation import refuse
from control_plane.errors import Exhausted

T = TypeVar("T")
TTL_S = 24 * 3600.0


@dataclass(slots=True)
class _Entry:
    fingerprint: bytes  # what was asked; the same id with other content is refused
    expires_s: float
    done: asyncio.Event
    answer: object = None


class RequestMemory:
    """Answers by (method, request id). Used from one event loop."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, ttl_s: float = TTL_S, max_entries: int = 10_000
    ) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        # Invariant: in order of expiry.
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    async def once(
        self,
        method: str,
        request_id: str,
        fingerprint: bytes,
        call: Callable[[], Awaitable[T]],
        *,
        field: str = "request_id",
    ) -> T:
        """The answer of `call`, or that of the earlier call with this id. A call that failed is not remembered.

        Raises InvalidRequest on `field` if the id was used for something else.
        """
        if not request_id:
            return await call()
        self._expire()
        key = (method, request_id)
        while (entry := self._entries.get(key)) is not None:
            if entry.fingerprint != fingerprint:
                raise refuse(field, "was used for another request; take a fresh one")
            if entry.done.is_set():
                return cast("T", entry.answer)
            await entry.done.wait()  # the first is still at work; if it fails, its entry is gone and this one calls
        entry = self._entries[key] = _Entry(fingerprint, self._clock() + self._ttl_s, asyncio.Event())
        try:
            self._make_room()
            answer = await call()
        except BaseException:
            del self._entries[key]
            raise
        else:
            entry.answer = answer
            return answer
        finally:
            entry.done.set()

    def _expire(self) -> None:
        now_s = self._clock()
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.expires_s > now_s or not entry.done.is_set():
                return
            del self._entries[key]

    def _make_room(self) -> None:
        if len(self._entries) <= self._max_entries:
            return
        oldest = next((key for key, entry in self._entries.items() if entry.done.is_set()), None)
        if oldest is None:
            raise Exhausted("too many calls with a request_id are running; try again")
        del self._entries[oldest]
