"""Idempotency: a repeated call with the same request id gets the response of the first call, for a day.

Request ids of different tenants, or of different principals of a tenant, are different ids.

The cache is in memory, so a restart empties it. It is bounded in entries and in bytes: when it is full, the oldest
finished entries are forgotten.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from google.protobuf.message import Message

from control_plane.caller import current_caller
from control_plane.checks import refuse
from control_plane.errors import Exhausted

T = TypeVar("T", bound=Message)
TTL_S = 24 * 3600.0
_ENTRY_BYTES = 1024  # about what an entry takes beside its response


class _Key(NamedTuple):
    tenant: str
    principal: str  # its name
    method: str
    request_id: str


@dataclass(slots=True)
class _Entry:
    fingerprint: bytes  # SHA-256 of the request; the same id with other content is refused
    expires_s: float
    done: asyncio.Event
    response: bytes = b""  # encoded, because a message object takes several times as much memory

    @property
    def num_bytes(self) -> int:
        return len(self.response) + _ENTRY_BYTES


class IdempotencyCache:
    """Responses by (tenant, principal, method, request id). Used from one event loop."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_entries: int = 10_000,
        max_bytes: int = 64 * 2**20,
    ) -> None:
        self._clock = clock
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self.num_bytes = 0  # of all entries
        # Invariant: in order of expiry.
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    async def once(
        self,
        method: str,
        request_id: str,
        request: Message,
        call: Callable[[], Awaitable[T]],
        response_type: type[T],
        *,
        field: str = "request_id",
    ) -> T:
        """The response of `call`, or of the earlier call with this id. A call that failed is not remembered.

        Raises InvalidRequest on `field` if the id was used for another request.
        """
        if not request_id:
            return await call()
        self._expire()
        fingerprint = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        caller = current_caller()
        key = _Key(caller.tenant, caller.principal.name, method, request_id)
        while (entry := self._entries.get(key)) is not None:
            if entry.fingerprint != fingerprint:
                raise refuse(field, "was used for another request; use a new id for a new request")
            if entry.done.is_set():
                return response_type.FromString(entry.response)
            await entry.done.wait()  # the first call still runs; if it fails, its entry is removed and this call runs
        entry = self._entries[key] = _Entry(fingerprint, self._clock() + TTL_S, asyncio.Event())
        self.num_bytes += entry.num_bytes
        try:
            self._make_room()
            response = await call()
        except BaseException:
            self._forget(key)
            raise
        else:
            entry.response = response.SerializeToString()
            self.num_bytes += len(entry.response)
            return response
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
        """Forget the oldest finished entries above the limits. The new entry is counted already."""
        while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
            oldest = next((key for key, entry in self._entries.items() if entry.done.is_set()), None)
            if oldest is None:
                raise Exhausted("too many calls with a request_id are running; try again")
            self._forget(oldest)

    def _forget(self, key: _Key) -> None:
        self.num_bytes -= self._entries.pop(key).num_bytes
