"""What the server deletes by itself: adapters whose time is over, and versions beyond those that a name keeps.

Deletes in the same way as a client does, with lines of the audit log that name the server. What cannot be deleted at
present, because a request uses it or the store does not respond, is tried again.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Awaitable, Callable

from control_plane.adapters.life_cycle import AdapterLifeCycle
from control_plane.caller import THE_SERVER, acting_as
from control_plane.errors import MotetError
from control_plane.registry.records import AdapterRecord, AdapterState
from control_plane.registry.registry import Registry
from control_plane.waits import is_set_within

logger = logging.getLogger(__name__)

# Until what could not be deleted is tried again. Also how late an expiry comes after a jump of the clock.
RETRY_S = 5.0
_MAX_STALE = 1000  # entries of expiries that were changed since, before they are cleared away


class Keeper:
    """Watches the registry, and deletes. Used from one event loop."""

    def __init__(
        self,
        registry: Registry,
        life_cycle: AdapterLifeCycle,
        has_requests: Callable[[str], bool],
        *,
        clock: Callable[[], float] = time.time,
        wait: Callable[[asyncio.Event, float], Awaitable[object]] | None = None,
    ) -> None:
        """`has_requests`: whether a request uses the version of this digest. `wait`: waits for an event, for a time."""
        self._registry = registry
        self._life_cycle = life_cycle
        self._has_requests = has_requests
        self._clock = clock  # wall clock, seconds
        self._wait = wait or is_set_within
        self._wake = asyncio.Event()
        # By adapter id. Every entry of the heap that is not stale has its time here.
        self._expire_times_s: dict[str, float] = {}
        self._expiries: list[tuple[float, str]] = []
        self._crowded: set[str] = set()  # names that may have more versions than they keep
        registry.when_changed.append(self._on_change)

    def __repr__(self) -> str:
        return f"Keeper(expiring={len(self._expire_times_s)}, crowded={len(self._crowded)})"

    async def run(self) -> None:
        """Look at all names, then delete what is due, for ever."""
        after = ""
        while True:
            with acting_as(THE_SERVER):
                records, after = self._registry.list_part(after)
            for record in records:
                self._on_change(None, record)
            await asyncio.sleep(0)
            if not after:
                break
        while True:
            self._wake.clear()
            try:
                await self.tick()
            except Exception:  # the loop's edge: the next look must come
                logger.exception("the keeper failed")
            due_s = self._expiries[0][0] - self._clock() if self._expiries else RETRY_S
            await self._wait(self._wake, min(max(due_s, 0.0), RETRY_S))

    async def tick(self) -> None:
        """Delete what is due."""
        with acting_as(THE_SERVER):
            await self._expire()
            for adapter_id in sorted(self._crowded):
                await self._make_room(adapter_id)

    def _on_change(self, _old: AdapterRecord | None, record: AdapterRecord | None) -> None:
        if record is None:
            return
        rollout, adapter_id = record.rollout, record.adapter_id
        is_kept = record.state is not AdapterState.DELETING
        expire_time_s = rollout.expire_time_s if is_kept else None
        if expire_time_s is None:
            self._expire_times_s.pop(adapter_id, None)
        elif self._expire_times_s.get(adapter_id) != expire_time_s:
            self._expire_times_s[adapter_id] = expire_time_s
            heapq.heappush(self._expiries, (expire_time_s, adapter_id))
            self._wake.set()
            if len(self._expiries) > 2 * len(self._expire_times_s) + _MAX_STALE:
                self._expiries = [(time_s, name) for name, time_s in self._expire_times_s.items()]
                heapq.heapify(self._expiries)
        if is_kept and 0 < rollout.keep_versions < len(record.versions):
            self._crowded.add(adapter_id)
            self._wake.set()

    async def _expire(self) -> None:
        now_s = self._clock()
        while self._expiries and self._expiries[0][0] <= now_s:
            time_s, adapter_id = heapq.heappop(self._expiries)
            if self._expire_times_s.get(adapter_id) != time_s:
                continue  # stale
            del self._expire_times_s[adapter_id]
            record = self._registry.find(adapter_id)
            expire_time_s = None if record is None else record.rollout.expire_time_s
            if record is None or expire_time_s is None or expire_time_s > now_s:
                self._on_change(None, record)  # it was changed while an earlier deletion failed
                continue
            logger.info("adapter has expired adapter_id=%s", adapter_id)
            try:
                await self._life_cycle.delete(adapter_id, record.etag)
            except MotetError as error:
                logger.warning("expired adapter not deleted yet adapter_id=%s reason=%s", adapter_id, error.reason)
                self._expire_times_s[adapter_id] = now_s + RETRY_S
                heapq.heappush(self._expiries, (now_s + RETRY_S, adapter_id))

    async def _make_room(self, adapter_id: str) -> None:
        """Delete the versions that the name does not keep, the oldest first. It stays crowded until they are gone."""
        record = self._registry.find(adapter_id)
        excess: list[str] = []
        if record is not None and record.state is not AdapterState.DELETING:
            digests = [version.digest for version in record.versions]
            excess = record.rollout.excess(digests, record.active_digest)
        is_done = True
        for digest in excess:
            if self._has_requests(digest):
                is_done = False
                continue
            try:
                await self._life_cycle.delete_version(adapter_id, digest)
            except MotetError as error:
                logger.warning(
                    "version not deleted yet adapter_id=%s digest=%s reason=%s", adapter_id, digest, error.reason
                )
                is_done = False
        if is_done:
            self._crowded.discard(adapter_id)
