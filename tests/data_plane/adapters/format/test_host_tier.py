"""Adapters in host memory: reloads without the source, within the budget, and each digest its own bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from data_plane.adapters.format.chunk_memory import ChunkMemory, taken_bytes
from data_plane.adapters.format.host_tier import HostTier
from data_plane.errors import AdapterCorrupt, AdapterUnavailable
from tests.data_plane.adapters.factories import DictSource, Packed, make_arena, pack, run_step


class CountedSource(DictSource):
    """Notes what is opened; may end before the last chunk."""

    def __init__(self, *adapters: Packed, num_chunks: int | None = None) -> None:
        super().__init__()
        self.add(*adapters)
        self.opened: list[str] = []
        self.num_chunks = num_chunks

    def open(self, digest: str) -> tuple[bytes, Iterator[bytes]]:
        self.opened.append(digest)
        manifest, chunks = super().open(digest)
        return manifest, self._cut(chunks)

    def _cut(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for index, chunk in enumerate(chunks):
            if index == self.num_chunks:
                raise AdapterUnavailable("the source is gone")
            yield chunk


def size(packed: Packed) -> int:
    return len(packed.manifest) + sum(map(len, packed.chunks))


def size_in_memory(packed: Packed) -> int:
    return sum(taken_bytes(len(chunk)) for chunk in packed.chunks)


def read(tier: HostTier, source: CountedSource, packed: Packed) -> list[bytes]:
    manifest, chunks = tier.over(source).open(packed.digest)
    assert manifest == packed.manifest
    return [bytes(chunk) for chunk in chunks]


def test_a_reload_after_an_eviction_reads_no_source() -> None:
    packed, other = pack(8), pack(5, seed=1)
    source, arena = CountedSource(packed, other), make_arena()
    tier = HostTier(1 << 20)
    for generation in (1, 2, 3):
        arena.load(0, generation, packed.digest, tier.over(source))
        run_step(arena, [0, -1], {0: packed})
        arena.evict(0, generation)
    arena.load(0, 4, other.digest, tier.over(source))  # the slot is used again, for another digest
    arena.load(1, 5, packed.digest, tier.over(source))
    run_step(arena, [0, 1, -1], {0: other, 1: packed})
    assert source.opened == [packed.digest, other.digest]
    stats = tier.stats()
    assert (stats.num_hits, stats.num_misses, stats.num_adapters) == (3, 2, 2)
    assert stats.used_bytes == size(packed) + size(other)


def test_the_least_recently_loaded_adapter_leaves_first() -> None:
    first, second, third = (pack(8, seed=seed) for seed in range(3))
    source, tier = CountedSource(first, second, third), HostTier(2 * size(pack(8)) + 200)
    for packed in (first, second, first, third, first, second):
        assert read(tier, source, packed) == packed.chunks
        assert tier.stats().used_bytes <= tier.stats().budget_bytes
    assert source.opened == [first.digest, second.digest, third.digest, second.digest]
    assert tier.stats().num_adapters == 2


def test_an_adapter_above_the_budget_passes_and_evicts_nothing() -> None:
    small, large = pack(8), pack(64, seed=1)
    source, tier = CountedSource(small, large), HostTier(size(small))
    for packed in (small, large, large, small):
        assert read(tier, source, packed) == packed.chunks
    assert source.opened == [small.digest, large.digest, large.digest]


def test_what_other_loads_have_reserved_is_not_waited_for_by_evictions() -> None:
    small, first, second = pack(8), pack(64, seed=1), pack(64, seed=2)
    source, tier = CountedSource(small, first, second), HostTier(size(small) + size(first) + size(small) // 2)
    read(tier, source, small)
    _, chunks = tier.over(source).open(first.digest)
    next(chunks)  # reserved
    assert read(tier, source, second) == second.chunks
    assert read(tier, source, small) == small.chunks and source.opened.count(small.digest) == 1, "it stayed"
    assert tier.stats().num_adapters == 1


def test_a_source_that_ends_early_leaves_nothing() -> None:
    packed = pack(8)
    tier = HostTier(1 << 20)
    with pytest.raises(AdapterUnavailable, match="is gone"):
        read(tier, CountedSource(packed, num_chunks=1), packed)
    assert (tier.stats().used_bytes, tier.stats().num_adapters) == (0, 0)
    _, chunks = tier.over(CountedSource(packed)).open(packed.digest)
    next(chunks)
    assert tier.stats().used_bytes == size(packed)  # reserved
    del chunks  # the load was cancelled
    assert tier.stats().used_bytes == 0


def test_wrong_bytes_are_not_kept() -> None:
    packed = pack(8)
    source = CountedSource(Packed(packed.digest, packed.manifest, [packed.chunks[0], packed.chunks[0]], {}))
    tier = HostTier(1 << 20)
    with pytest.raises(AdapterCorrupt, match=r"layers\.1 hashes to"):
        read(tier, source, packed)
    assert tier.stats().num_adapters == 0


def test_two_loads_of_one_adapter_at_once_are_counted_once() -> None:
    packed = pack(8)
    tier, source = HostTier(1 << 20), CountedSource(packed)
    both = [tier.over(source).open(packed.digest)[1] for _ in range(2)]
    for chunk, other, expected in zip(*both, packed.chunks, strict=True):
        assert bytes(chunk) == bytes(other) == expected
    assert (tier.stats().num_adapters, tier.stats().used_bytes) == (1, size(packed))


def test_chunks_lie_in_the_memory_and_stay_there_while_they_are_read() -> None:
    packed, other, third = pack(8), pack(8, seed=1), pack(8, seed=2)
    source, whole = CountedSource(packed, other, third), np.zeros(2 * size_in_memory(packed), dtype=np.uint8)
    tier = HostTier(len(packed.manifest) + size_in_memory(packed), ChunkMemory(whole))  # one fits
    arena = make_arena()
    arena.load(0, 1, packed.digest, tier.over(source))
    assert bytes(whole).find(packed.chunks[0]) == 0, "it lies there"
    _, chunks = tier.over(source).open(packed.digest)
    arena.load(1, 1, other.digest, tier.over(source))  # takes its place in the tier
    arena.load(2, 1, third.digest, tier.over(source))
    assert tier.stats().num_adapters == 1
    assert [bytes(chunk) for chunk in chunks] == packed.chunks
    run_step(arena, [0, 1, 2, -1], {0: packed, 1: other, 2: third})
    del chunks
    for each in (packed, other, third, packed):
        assert read(tier, source, each) == read(tier, source, each) == each.chunks


def test_adapters_of_other_sizes_take_the_memory_of_those_that_left() -> None:
    """What is kept never takes more than the memory, whatever sizes came before."""
    few, many = [pack(8, seed=seed) for seed in range(6)], [pack(64, seed=seed) for seed in range(6, 9)]
    budget = 3 * size_in_memory(many[0])
    source, tier = CountedSource(*few, *many), HostTier(budget, ChunkMemory(np.zeros(budget, dtype=np.uint8)))
    for packed in [*few, *many, *few, many[0], few[0], many[1], few[1], many[1], few[1]]:
        assert read(tier, source, packed) == packed.chunks
        assert tier.stats().used_bytes <= budget and tier.stats().num_adapters > 0
    assert source.opened[-4:] != [many[1].digest, few[1].digest] * 2, "the last two were there"


def test_memory_without_a_gap_that_is_wide_enough_is_done_without() -> None:
    packed = pack(8)
    source, tier = CountedSource(packed), HostTier(1 << 20, ChunkMemory(np.zeros(300, dtype=np.uint8)))
    assert read(tier, source, packed) == read(tier, source, packed) == packed.chunks
    assert len(source.opened) == 2 and tier.stats().used_bytes == 0
