"""Keeps the pins of the tiers equal to what the registry says: the active version of every pinned name, for its owner.

The registry is the durable truth; what is pinned in the host cache and in the workers' slots is derived from it, again
at every start.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from control_plane.errors import AdapterNotActive, MotetError, QuotaExceeded
from control_plane.fleet.fleet import Fleet
from control_plane.host_cache.weights import AdapterWeights
from control_plane.registry.keyed_locks import KeyedLocks
from control_plane.registry.records import AdapterRecord
from control_plane.registry.registry import Registry
from control_plane.scheduler.types import AdapterRef

logger = logging.getLogger(__name__)

QUOTA = "max_pinned_bytes"
RETRY_AFTER_S = 60.0


class _Pin(NamedTuple):
    """One pin of the host cache. All names of a holder that point to the digest have it together."""

    digest: str
    holder: str  # the tenant that owns the names; empty: no tenant


class Pins:
    """Pins of host cache and fleet by adapter name."""

    def __init__(
        self,
        registry: Registry,
        weights: AdapterWeights,
        fleet: Fleet,
        max_pinned_bytes: Callable[[str], int | None] = lambda _tenant: None,
    ) -> None:
        """`max_pinned_bytes`: what each tenant may pin; None: no limit. What is no tenant's has none."""
        self._max_pinned_bytes = max_pinned_bytes
        self._registry = registry
        self._weights = weights
        self._fleet = fleet
        # Invariants: _num_names[pin] names have this pin, and the host cache has it if that is not 0.
        # _num_holders[digest] tenants pin the digest, and the fleet has it pinned if that is not 0.
        # Each tenant pays for its pins, also of weights that others have pinned: so nobody learns what others have.
        self._pin_by_id: dict[str, _Pin] = {}
        self._num_names: Counter[_Pin] = Counter()
        self._num_holders: Counter[str] = Counter()
        # Bytes of every pin that is there or under way, and their sums by holder.
        self._num_bytes: dict[_Pin, int] = {}
        self._held_bytes: Counter[str] = Counter()
        # A name's lock is taken before a digest's. A store that hangs holds up the names that wait for it, no others.
        self._name_locks = KeyedLocks()
        self._digest_locks = KeyedLocks()

    async def pin(self, adapter_id: str) -> AdapterRecord:
        """Pin the active version. Raises PinBudgetExceeded or QuotaExceeded and changes nothing if it does not fit."""
        async with self._name_locks.hold(adapter_id):
            had_pin = adapter_id in self._pin_by_id
            await self._hold(self._registry.changeable(adapter_id))
            try:
                record = await self._registry.set_pinned(adapter_id)
            except BaseException:
                if not had_pin:
                    await self._release(adapter_id)
                raise
            await self._move(record)  # the active version may have changed before the name was pinned
            return record

    async def unpin(self, adapter_id: str) -> AdapterRecord:
        """Take the pin back; not pinned is not an error."""
        async with self._name_locks.hold(adapter_id):
            record = await self._registry.clear_pinned(adapter_id)
            await self._release(adapter_id)
            return record

    async def follow(self, adapter_id: str) -> None:
        """After the active version or the owner changed: move the pin of a pinned name.

        Where the new version does not fit the pin budget, or its owner's quota, the name stays pinned in the registry
        and this says so in the log: the version is served all the same.
        """
        async with self._name_locks.hold(adapter_id):
            # Read under the name's lock: others may have pinned, unpinned, updated or deleted it since the change.
            record = self._registry.find(adapter_id)
            if record is not None and record.is_pinned:
                await self._move(record)

    async def forget(self, adapter_id: str) -> None:
        """The name is being deleted."""
        async with self._name_locks.hold(adapter_id):
            await self._release(adapter_id)

    async def restore(self) -> None:
        """Pin again what the registry says is pinned; run at start, beside serving."""
        after = ""
        while True:
            records, after = self._registry.list_part(after)
            for record in records:
                if record.is_pinned:
                    await self.follow(record.adapter_id)
            if not after:
                return
            await asyncio.sleep(0)

    async def _move(self, record: AdapterRecord) -> None:
        try:
            await self._hold(record)
        except MotetError as error:
            await self._release(record.adapter_id)
            logger.warning("pin not moved adapter_id=%s reason=%s", record.adapter_id, error.reason)

    async def _hold(self, record: AdapterRecord) -> None:
        if not record.active_digest:
            raise AdapterNotActive(f"adapter {record.adapter_id!r} cannot be pinned: {record.state_reason}")
        pin = _Pin(record.active_digest, record.ownership.owner)
        before = self._pin_by_id.get(record.adapter_id)
        if before == pin:
            return
        async with self._digest_locks.hold(pin.digest):
            if self._num_names[pin] == 0:
                self._charge(pin, record)
                try:
                    await self._weights.pin(pin.digest, pin.holder)
                except BaseException:
                    self._discharge(pin)
                    await self._weights.unpin(pin.digest, pin.holder)  # it may have counted before it failed
                    raise
                version = record.version(pin.digest)
                if self._num_holders[pin.digest] == 0 and version is not None:
                    self._fleet.pin(AdapterRef(version.digest, version.arena_bytes), pin.holder)
                self._num_holders[pin.digest] += 1
            self._num_names[pin] += 1
        self._pin_by_id[record.adapter_id] = pin
        if before is not None:
            await self._drop_one(before)

    def _charge(self, pin: _Pin, record: AdapterRecord) -> None:
        """Count a new pin for its tenant. Raises QuotaExceeded."""
        version = record.version(pin.digest)
        num_bytes = 0 if version is None else version.size_bytes  # a record that cannot be read has no versions
        held_bytes = self._held_bytes[pin.holder]
        limit = self._max_pinned_bytes(pin.holder) if pin.holder else None
        if limit is not None and held_bytes + num_bytes > limit:
            raise QuotaExceeded(
                f"tenant {pin.holder}: {held_bytes} bytes are pinned, and {num_bytes} more would exceed {QUOTA}, which "
                f"is {limit}; unpin another adapter",
                tenant=pin.holder,
                quota=QUOTA,
                limit=limit,
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_bytes[pin] = num_bytes
        self._held_bytes[pin.holder] += num_bytes

    def _discharge(self, pin: _Pin) -> None:
        self._held_bytes[pin.holder] -= self._num_bytes.pop(pin)
        if self._held_bytes[pin.holder] == 0:
            del self._held_bytes[pin.holder]

    async def _release(self, adapter_id: str) -> None:
        pin = self._pin_by_id.pop(adapter_id, None)
        if pin is not None:
            await self._drop_one(pin)

    async def _drop_one(self, pin: _Pin) -> None:
        async with self._digest_locks.hold(pin.digest):
            self._num_names[pin] -= 1
            assert self._num_names[pin] >= 0, f"pins of {pin} do not balance"
            if self._num_names[pin] == 0:
                del self._num_names[pin]
                self._discharge(pin)
                self._num_holders[pin.digest] -= 1
                if self._num_holders[pin.digest] == 0:
                    del self._num_holders[pin.digest]
                    self._fleet.unpin(pin.digest)
                await self._weights.unpin(pin.digest, pin.holder)
