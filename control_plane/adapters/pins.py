"""Keeps the pins of the tiers equal to what the registry says: the active version of every pinned name.

The registry is the durable truth; what is pinned in the host cache and in the workers' slots is derived from it, again
at every start.
"""

from __future__ import annotations

import logging
from collections import Counter

from control_plane.errors import MotetError
from control_plane.fleet.fleet import Fleet
from control_plane.host_cache.weights import AdapterWeights
from control_plane.registry.keyed_locks import KeyedLocks
from control_plane.registry.records import AdapterRecord
from control_plane.registry.registry import Registry

logger = logging.getLogger(__name__)


class Pins:
    """Pins of host cache and fleet by adapter name."""

    def __init__(self, registry: Registry, weights: AdapterWeights, fleet: Fleet) -> None:
        self._registry = registry
        self._weights = weights
        self._fleet = fleet
        # Invariant: _num_names[digest] names hold a pin on the digest, and the tiers have it pinned if that is not 0.
        self._digest_by_id: dict[str, str] = {}
        self._num_names: Counter[str] = Counter()
        # A name's lock is taken before a digest's. A store that hangs holds up the names that wait for it, no others.
        self._name_locks = KeyedLocks()
        self._digest_locks = KeyedLocks()

    async def pin(self, adapter_id: str) -> AdapterRecord:
        """Pin the active version. Raises PinBudgetExceeded and changes nothing where it does not fit."""
        async with self._name_locks.hold(adapter_id):
            had_pin = adapter_id in self._digest_by_id
            await self._hold(adapter_id, self._registry.changeable(adapter_id).active_digest)
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
        """After the active version changed: move the pin of a pinned name.

        Where the new version does not fit the pin budget the name stays pinned in the registry and this says so in
        the log: the version is served all the same.
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
                await self.follow(record.adapter_id)
            if not after:
                return

    async def _move(self, record: AdapterRecord) -> None:
        try:
            await self._hold(record.adapter_id, record.active_digest)
        except MotetError as error:
            await self._release(record.adapter_id)
            logger.warning("pin not moved adapter_id=%s reason=%s", record.adapter_id, error.reason)

    async def _hold(self, adapter_id: str, digest: str) -> None:
        before = self._digest_by_id.get(adapter_id)
        if before == digest:
            return
        async with self._digest_locks.hold(digest):
            if self._num_names[digest] == 0:
                try:
                    await self._weights.pin(digest)
                except BaseException:
                    await self._weights.unpin(digest)  # it may have counted before it failed
                    raise
                self._fleet.pin(digest)
            self._num_names[digest] += 1
        self._digest_by_id[adapter_id] = digest
        if before is not None:
            await self._drop_one(before)

    async def _release(self, adapter_id: str) -> None:
        digest = self._digest_by_id.pop(adapter_id, None)
        if digest is not None:
            await self._drop_one(digest)

    async def _drop_one(self, digest: str) -> None:
        async with self._digest_locks.hold(digest):
            self._num_names[digest] -= 1
            assert self._num_names[digest] >= 0, f"pins of {digest} do not balance"
            if self._num_names[digest] == 0:
                del self._num_names[digest]
                self._fleet.unpin(digest)
                await self._weights.unpin(digest)
