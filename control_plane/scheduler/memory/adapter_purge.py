"""Adapters that are to leave the worker: their cached blocks are dropped, and their slot is evicted once unused."""

from __future__ import annotations

from collections import Counter

from control_plane.scheduler.memory.adapter_slots import AdapterSlots
from control_plane.scheduler.memory.prefix_cache import PrefixCache
from control_plane.scheduler.memory.slot_placement import SlotPlacement
from control_plane.scheduler.types import Request, digests_of


class AdapterPurge:
    """Which adapters are being purged, and how many requests have each adapter."""

    def __init__(self, cache: PrefixCache, slots: AdapterSlots, placement: SlotPlacement) -> None:
        self._cache = cache
        self._slots = slots
        self._placement = placement
        # Requests that are live or still hold rows, by adapter; no zeros.
        self.num_requests_by_digest: Counter[str] = Counter()
        self._purged: set[str] = set()  # digests whose blocks stay out of the cache until nothing of them is left

    def add_request(self, request: Request) -> None:
        """A request comes. This ends purges of its adapters."""
        for ref in request.adapters:
            self.num_requests_by_digest[ref.digest] += 1
            if ref.digest in self._purged:
                self._purged.discard(ref.digest)
                self._placement.cancel_unload(ref.digest)

    def remove_request(self, request: Request) -> None:
        """A request is over and holds nothing any more."""
        for ref in request.adapters:
            self.num_requests_by_digest[ref.digest] -= 1
            if not self.num_requests_by_digest[ref.digest]:
                del self.num_requests_by_digest[ref.digest]
                self.close(ref.digest)

    def begin(self, digest: str) -> bool:
        """Forget the adapter's cached blocks, cache none of its live requests', and evict its slot once unused.

        Returns False, and changes nothing, if that is under way or the worker has nothing of the adapter.
        """
        if digest in self._purged or not self.has_digest(digest):
            return False
        self._cache.purge(digest)
        self._placement.start_unload(digest)
        self._purged.add(digest)
        self.close(digest)
        return True

    def close(self, digest: str) -> None:
        """End the purge if nothing of the adapter is left; called when its last request or its slot went."""
        if digest in self._purged and not self._is_in_use(digest):
            self._purged.discard(digest)
            self._placement.cancel_unload(digest)

    def is_purged(self, digest: str) -> bool:
        """Whether a purge of the adapter is under way."""
        return digest in self._purged

    def may_cache(self, name: str | None) -> bool:
        """Whether blocks of the adapter, or of this set of adapters, may enter the prefix cache."""
        return not self._purged or name is None or self._purged.isdisjoint(digests_of(name))

    def has_digest(self, digest: str) -> bool:
        """Whether a live or leaving request, a slot or a cached block has this adapter."""
        return self._is_in_use(digest) or self._cache.has_digest(digest)

    def _is_in_use(self, digest: str) -> bool:
        return digest in self.num_requests_by_digest or self._slots.has_digest(digest)
