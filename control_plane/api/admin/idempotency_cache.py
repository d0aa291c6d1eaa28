"""Idempotency: a repeated call with the same request id gets the first one's answer, for a day.

In memory: a restart forgets all of it. Bounded in answers and in their bytes: the oldest finished ones are forgotten.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from control_plane.api.validation import refuse
from control_plane.errors import Exhausted

T = TypeVar("T", bound=Message)
TTL_S = 24 * 3600.0
_ENTRY_BYTES = 1024  # of an entry beside its answer, about


@dataclass(slots=True)
class _Entry:
    fingerprint: bytes  # SHA-256 of what was asked; the same id with other content is refused
    expires_s: float
    done: asyncio.Event
    answer: bytes = b""  # encoded: a message takes several times as much

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + _ENTRY_BYTES


class RequestMemory:
    """Answers by (method, request id). Used from one event loop."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float = TTL_S,
        max_entries: int = 10_000,
        max_bytes: int = 64 * 2**20,
    ) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self.num_bytes = 0  # of all entries
        # Invariant: in order of expiry.
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    async def once(
        self,
        method: str,
        request_id: str,
        request: Message,
        call: Callable[[], Awaitable[T]],
        answer_type: type[T],
        *,
        field: str = "request_id",
    ) -> T:
        """The answer of `call`, or that of the earlier call with this id. A call that failed is not remembered.

        Raises InvalidRequest on `field` if the id was used for another request.
        """
        if not request_id:
            return await call()
        self._expire()
        fingerprint = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        key = (method, request_id)
        while (entry := self._entries.get(key)) is not None:
            if entry.fingerprint != fingerprint:
                raise refuse(field, "was used for another request; take a fresh one")
            if entry.done.is_set():
                return answer_type.FromString(entry.answer)
            await entry.done.wait()  # the first is still at work; if it fails, its entry is gone and this one calls
        entry = self._entries[key] = _Entry(fingerprint, self._clock() + self._ttl_s, asyncio.Event())
        self.num_bytes += entry.num_bytes
        try:
            self._make_room()
            answer = await call()
        except BaseException:
            self._forget(key)
            raise
        else:
            entry.answer = answer.SerializeToString()
            self.num_bytes += len(entry.answer)
            return answer
        finally:
            entry.done.set()

    def _expire(self) -> None:
        now_s = self._clock()
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.expires_s > now_s or not entry.done.is_set():
                return
            self._forget(key)

    def _make_room(self) -> None:
        """Forget the oldest finished answers beyond the limits; the entry that is new counts already."""
        while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
            oldest = next((key for key, entry in self._entries.items() if entry.done.is_set()), None)
            if oldest is None:
                raise Exhausted("too many calls with a request_id are running; try again")
            self._forget(oldest)

    def _forget(self, key: tuple[str, str]) -> None:
        self.num_bytes -= self._entries.pop(key).num_bytes
