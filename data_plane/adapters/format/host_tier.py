"""Packed adapters that were loaded lately, in the worker's own memory: loading one again reads no host cache.

A bytes budget, the least recently loaded adapter leaves first. What is kept was verified when it was read, and is not
hashed again. Beside a GPU the chunks lie in pinned memory, from where they go over the bus. No torch here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from data_plane.adapters.format.chunk_memory import ChunkMemory, taken_bytes
from data_plane.adapters.format.manifest import Manifest, read_manifest
from data_plane.plan import AdapterSource, ChunkBytes


@dataclass(frozen=True, slots=True)
class HostTierStats:
    """Counts since the start, and sizes."""

    num_hits: int
    num_misses: int
    num_adapters: int
    used_bytes: int  # those of loads under way included
    budget_bytes: int


@dataclass(eq=False)
class _Kept:
    """One adapter."""

    manifest: bytes
    size_bytes: int  # that count against the budget
    places: list[memoryview] | None  # one for each chunk; None: the chunks stay where the source put them
    chunks: list[ChunkBytes] = field(default_factory=list)  # those that were read


class _Chunks:
    """Iterates over an adapter's chunks. Whoever has this keeps their memory: copies from it may be under way."""

    def __init__(self, kept: _Kept) -> None:
        self._kept = kept
        self._next = 0

    def __iter__(self) -> _Chunks:
        return self

    def __next__(self) -> ChunkBytes:
        if self._next == len(self._kept.chunks):
            raise StopIteration
        self._next += 1
        return self._kept.chunks[self._next - 1]


class HostTier:
    """The adapters that are kept, for all sessions of a worker. Any thread may use it."""

    def __init__(self, budget_bytes: int, memory: ChunkMemory | None = None) -> None:
        """`memory`: where chunks are kept; None: as the source gave them."""
        self._budget_bytes = budget_bytes
        self._memory = memory
        self._lock = threading.Lock()
        # Invariant: _used_bytes is the sum of what is in _kept and of what loads have reserved, and at most the budget.
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by digest, the least recently loaded first
        self._used_bytes = 0
        self._num_hits = 0
        self._num_misses = 0

    def over(self, source: AdapterSource) -> AdapterSource:
        """A source that gives what is kept, and reads and keeps what is not."""
        return _TieredSource(self, source)

    def stats(self) -> HostTierStats:
        with self._lock:
            return HostTierStats(
                self._num_hits, self._num_misses, len(self._kept), self._used_bytes, self._budget_bytes
            )

    def find(self, digest: str) -> _Kept | None:
        """What is kept of an adapter, which counts as loaded just now."""
        with self._lock:
            kept = self._kept.get(digest)
            if kept is None:
                self._num_misses += 1
            else:
                self._num_hits += 1
                self._kept.move_to_end(digest)
            return kept

    def reserve(self, data: bytes, manifest: Manifest) -> _Kept | None:
        """Make room for an adapter that is being read. None if it is larger than what others can make room for."""
        sizes = [chunk.size_bytes for chunk in manifest.chunks]
        taken = len(data) + sum(sizes if self._memory is None else map(taken_bytes, sizes))
        with self._lock:
            reserved = self._used_bytes - sum(kept.size_bytes for kept in self._kept.values())
            if reserved + taken > self._budget_bytes:
                return None
            while self._used_bytes + taken > self._budget_bytes:
                self._evict_oldest()
            places = None
            if self._memory is not None and (places := self._places(self._memory, sizes)) is None:
                return None
            self._used_bytes += taken
            return _Kept(data, taken, places)

    def _places(self, memory: ChunkMemory, sizes: Sequence[int]) -> list[memoryview] | None:
        """One for each size. Where no gap is wide enough, older adapters leave; None if that does not help."""
        places: list[memoryview] = []
        for size in sizes:
            while (place := memory.take(size)) is None and self._kept:
                self._evict_oldest()
            if place is None:
                return None
            places.append(place)
        return places

    def _evict_oldest(self) -> None:
        _, oldest = self._kept.popitem(last=False)
        self._used_bytes -= oldest.size_bytes

    def keep(self, digest: str, kept: _Kept) -> None:
        """All chunks of a reservation have been read."""
        with self._lock:
            other = self._kept.pop(digest, None)  # of another load of the same adapter
            if other is not None:
                self._used_bytes -= other.size_bytes
            self._kept[digest] = kept

    def release(self, kept: _Kept) -> None:
        """End a reservation whose chunks were not all read."""
        with self._lock:
            self._used_bytes -= kept.size_bytes


class _TieredSource:
    """See HostTier.over."""

    def __init__(self, tier: HostTier, source: AdapterSource) -> None:
        self._tier = tier
        self._source = source

    def open(self, digest: str) -> tuple[bytes, Iterator[ChunkBytes]]:
        """See AdapterSource."""
        kept = self._tier.find(digest)
        if kept is not None:
            return kept.manifest, _Chunks(kept)
        data, chunks = self._source.open(digest)
        manifest = read_manifest(data, digest)
        return data, self._read(data, manifest, chunks)

    def _read(self, data: bytes, manifest: Manifest, chunks: Iterator[ChunkBytes]) -> Iterator[ChunkBytes]:
        kept = self._tier.reserve(data, manifest)
        if kept is None:
            yield from chunks
            return
        is_whole = False
        try:
            for chunk in chunks:
                if kept.places is not None:
                    place = kept.places[len(kept.chunks)]
                    place[:] = chunk
                    chunk = place
                kept.chunks.append(chunk)
                # The last one is kept before it is given: whoever gets it may never request another.
                if len(kept.chunks) == len(manifest.chunks):
                    self._tier.keep(manifest.digest, kept)
                    is_whole = True
                yield kept.chunks[-1]
        finally:
            if not is_whole:
                self._tier.release(kept)
