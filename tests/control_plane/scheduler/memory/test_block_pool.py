"""Reference counts, eviction order and refusals of the block pool; a state machine against a plain model."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from control_plane.scheduler.memory.block_pool import MANY_BLOCKS, BlockPool
from control_plane.scheduler.memory.host_blocks import HostBlockPool


def test_releasing_a_block_that_nobody_holds_is_a_bug() -> None:
    pool = BlockPool(2)
    block_id = pool.take_one()
    assert block_id is not None
    pool.release([block_id])
    with pytest.raises(AssertionError, match="no table holds"):
        pool.release([block_id])


def test_an_empty_pool_gives_nothing() -> None:
    pool = BlockPool(1)
    assert pool.take_one() == 0
    assert pool.take_one() is None


def test_cached_blocks_are_taken_last_and_the_cache_is_notified() -> None:
    pool = BlockPool(3)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    blocks = pool.take(2)
    pool.mark_cached(blocks[0], "a")
    pool.release(blocks)
    taken = pool.take(3)
    assert evicted == [blocks[0]] == [taken[-1]]


def test_a_block_that_is_neither_held_nor_cached_cannot_be_shared() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="nor in the prefix cache"):
        pool.share(0)
    pool.take(1)
    pool.share(0)
    pool.release([0])
    assert pool.num_held == 1, "the other table holds it"


def test_large_tables_are_counted_as_small_ones_are() -> None:
    """Two pools through the same moves, one with tables that numpy counts, one block by block."""
    large, small = BlockPool(4 * MANY_BLOCKS), BlockPool(4 * MANY_BLOCKS)
    first = large.take(2 * MANY_BLOCKS)
    assert small.take(2 * MANY_BLOCKS) == first
    shared = first[: MANY_BLOCKS + 3]
    for pool in (large, small):
        for block_id in first[::2]:
            pool.mark_cached(block_id, "a")

    def same() -> bool:
        ours, theirs = (
            (list(pool.ref_counts), list(pool.evictable), list(pool.free), pool.num_available)
            for pool in (large, small)
        )
        return ours == theirs

    large.share_all(shared)
    for block_id in shared:
        small.share(block_id)
    assert same()
    large.release(first)
    for block_id in reversed(first):
        small.release([block_id])
    assert same() and len(large.evictable) > 0
    large.release(shared)
    for block_id in reversed(shared):
        small.release([block_id])
    assert same() and large.num_held == 0
    cached = first[::2]
    assert len(cached) == MANY_BLOCKS, "enough for numpy"
    large.share_all(cached)
    for block_id in cached:
        small.share(block_id)
    assert same() and large.num_held == len(cached)


def test_a_large_table_is_refused_like_a_small_one() -> None:
    pool = BlockPool(2 * MANY_BLOCKS)
    table = pool.take(MANY_BLOCKS)
    pool.release(table[:1])
    with pytest.raises(AssertionError, match=f"block {table[0]} is released but no table holds it"):
        pool.release(table)
    with pytest.raises(AssertionError, match=f"block {table[0]} is shared but neither held"):
        pool.share_all(table)


def test_a_pool_takes_memory_for_the_blocks_that_were_held() -> None:
    tracemalloc.start()
    try:
        pool, host = BlockPool(1 << 24), HostBlockPool(1 << 24)
        taken = pool.take(1000)
        host.take()
        size = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size < 200_000 and taken == list(range(1000))
    assert (pool.num_available, pool.num_held, host.num_free) == ((1 << 24) - 1000, 1000, (1 << 24) - 1)


class PoolMachine(RuleBasedStateMachine):
    """Tables that take, share, cache and release blocks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.pool.on_evict = lambda block_id: self.cached.remove(block_id)
        self.tables: list[list[int]] = []
        self.cached: set[int] = set()

    @rule(num_blocks=st.integers(0, 3))
    def take(self, num_blocks: int) -> None:
        if num_blocks <= self.pool.num_available:
            self.tables.append(self.pool.take(num_blocks))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted({block_id for table in self.tables for block_id in table})))
        self.pool.mark_cached(block_id, "ab"[block_id % 2])
        self.cached.add(block_id)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.share(block_id)
        self.tables.append([block_id])

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.unmark_cached(block_id)
        self.cached.discard(block_id)

    @invariant()
    def state_is_consistent(self) -> None:
        holders = Counter(block_id for table in self.tables for block_id in table)
        assert list(self.pool.ref_counts) == [holders[block_id] for block_id in range(len(self.pool.ref_counts))]
        assert set(self.pool.evictable) == self.cached - set(holders)
        assert sorted(self.pool.free) == sorted(set(range(7)) - self.cached - set(holders))
        assert self.pool.num_held == len(holders)
        self.pool.evictable.check_invariants()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=30)
