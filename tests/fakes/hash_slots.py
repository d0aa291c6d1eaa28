"""Adapter slots of the hash engine: a digest per slot, each adapter read and hashed from end to end."""

from __future__ import annotations

import hashlib
import json
import threading

from data_plane.adapters.format.manifest import read_manifest
from data_plane.errors import AdapterCorrupt, AdapterLoadError, ArenaFull, StaleSlot
from data_plane.plan import AdapterSource

_sha256 = hashlib.sha256


class HashSlots:
    """Adapter slots that keep a digest per slot. Reads the whole adapter through its source, and checks every hash."""

    def __init__(self, num_slots: int, arena_bytes: int) -> None:
        self._num_slots = num_slots
        self._arena_bytes = arena_bytes
        self._lock = threading.Lock()
        self._slots: dict[int, tuple[int, str, int]] = {}  # slot -> generation, digest, bytes
        # Digests whose load fails: with this error, or with one that is retryable or not.
        self.failing: dict[str, bool | AdapterLoadError] = {}
        self.num_loads = 0

    def load(self, slot: int, generation: int, digest: str, source: AdapterSource) -> None:
        """Read the adapter and take the slot."""
        failure = self.failing.get(digest)
        if isinstance(failure, AdapterLoadError):
            raise failure
        if failure is not None:
            error = AdapterLoadError(f"adapter {digest} is set to fail")
            error.is_retryable = failure
            raise error
        size = _read_whole(digest, source)
        with self._lock:
            if not 0 <= slot < self._num_slots or slot in self._slots:
                raise AdapterLoadError(f"slot {slot} is not an empty one of {self._num_slots}")
            if self._used() + size > self._arena_bytes:
                raise ArenaFull(f"{size} bytes beside {self._used()} of {self._arena_bytes}")
            self._slots[slot] = (generation, digest, size)
            self.num_loads += 1

    def evict(self, slot: int, generation: int) -> None:
        """Empty the slot."""
        with self._lock:
            self._check(slot, generation)
            del self._slots[slot]

    def digest_of(self, slot: int, generation: int) -> str:
        """What the slot holds. Raises StaleSlot if it holds another generation."""
        with self._lock:
            return self._check(slot, generation)

    def used_bytes(self) -> int:
        """Bytes of the arena in use."""
        with self._lock:
            return self._used()

    def clear(self) -> None:
        """Empty every slot."""
        with self._lock:
            self._slots.clear()

    def _check(self, slot: int, generation: int) -> str:
        held = self._slots.get(slot)
        if held is None or held[0] != generation:
            raise StaleSlot(f"slot {slot}: generation {generation} requested, {held[0] if held else 'none'} held")
        return held[1]

    def _used(self) -> int:
        return sum(size for _, _, size in self._slots.values())


def _read_whole(digest: str, source: AdapterSource) -> int:
    """Arena bytes of the adapter, all of whose bytes were read and hashed. Raises AdapterCorrupt."""
    data, chunks = source.open(digest)
    if _sha256(data).hexdigest() != digest:
        raise AdapterCorrupt(f"adapter {digest}: its manifest hashes to {_sha256(data).hexdigest()}")
    for entry, chunk in zip(json.loads(data)["chunks"], chunks, strict=True):
        if _sha256(chunk).hexdigest() != entry["sha256"]:
            raise AdapterCorrupt(f"adapter {digest}: chunk {entry['name']} is not what the manifest says")
    return read_manifest(data, digest).arena_bytes(heads=())
