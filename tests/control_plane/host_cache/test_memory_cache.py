"""The cache without Redis keeps the same promises."""

from __future__ import annotations

import pytest

from control_plane.errors import AdapterDamaged
from control_plane.host_cache.base import CacheAddress
from control_plane.host_cache.memory_cache import MemoryHostCache
from tests.control_plane.host_cache.rig import FakeStore, make_weights, read_all


async def test_adapters_are_kept_evicted_and_read_again(store: FakeStore) -> None:
    weights = make_weights(MemoryHostCache(budget_bytes=12_000), store)
    first, second, third = (store.add(seed, (5000,)) for seed in range(3))
    for digest in (first, second, third):
        assert await read_all(await weights.open_packed(digest)) == store.content(digest)
    assert [weights.is_cached(digest) for digest in (first, second, third)] == [False, True, True]
    reads = store.num_chunk_reads
    assert await read_all(await weights.open_packed(third)) == store.content(third)
    assert store.num_chunk_reads == reads
    await weights.drop(third)
    assert not weights.is_cached(third)
    assert weights.worker_address == CacheAddress()


async def test_a_failed_fill_leaves_the_budget_whole(store: FakeStore) -> None:
    weights = make_weights(MemoryHostCache(budget_bytes=12_000), store)
    digest = store.add(1)
    store.blobs[digest][1][0] = b"damaged"
    with pytest.raises(AdapterDamaged):
        await weights.ensure_cached(digest)
    assert weights.stats().used_bytes == 0


async def test_pinned_adapter_outlives_a_drop(store: FakeStore) -> None:
    """Another name with the same weights pinned it while the first name was being deleted."""
    weights = make_weights(MemoryHostCache(budget_bytes=12_000), store)
    digest = store.add(1, (5000,))
    await weights.pin(digest)
    await weights.drop(digest)
    assert weights.is_cached(digest)
    for seed in range(2, 5):
        await weights.ensure_cached(store.add(seed, (5000,)))
    assert weights.is_cached(digest)
