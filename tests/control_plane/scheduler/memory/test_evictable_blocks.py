"""Which cached blocks are given up: the oldest, but none of an account that has less than its part."""

from __future__ import annotations

import pytest

from control_plane.scheduler.memory.evictable_blocks import NUM_TURNS, EvictableBlocks
from tests.control_plane.scheduler.factories import Bench, make_request


def test_blocks_of_one_account_go_the_oldest_first() -> None:
    blocks = EvictableBlocks(10)
    for block_id in (4, 2, 9):
        blocks.add(block_id, "a")
    blocks.remove(2)
    blocks.add(2, "a")
    assert [blocks.evict() for _ in range(3)] == [4, 9, 2] and len(blocks) == 0


def test_an_account_keeps_its_part_while_another_fills_the_cache() -> None:
    blocks = EvictableBlocks(100)
    for block_id in range(10):
        blocks.add(block_id, "modest")
    for block_id in range(10, 100):
        blocks.add(block_id, "flood")
    evicted = [blocks.evict() for _ in range(80)]
    assert evicted == list(range(10, 90)), "the oldest are modest's, the flood evicts its own"
    blocks.check_invariants()
    assert [blocks.evict() for _ in range(4)] == [0, 90, 1, 91], "both had ten, which is their part"


def test_what_is_out_of_use_is_given_up_whoever_has_little_else() -> None:
    blocks = EvictableBlocks(3)
    blocks.add(0, "gone")
    blocks.add(1, "back")
    blocks.add(2, "flood")
    evicted = []
    for number in range(60):
        blocks.add(10 + number, "flood")
        if number == 7:
            blocks.remove(1)
            blocks.add(1, "back")
        evicted.append(blocks.evict())
        blocks.check_invariants()
    assert evicted.index(0) == NUM_TURNS * 3
    assert evicted.index(1) == NUM_TURNS * 3 + 7


@pytest.mark.parametrize("charged_to", ["flood", ""])
def test_a_flood_of_prompts_evicts_its_own_prompts_first(charged_to: str) -> None:
    """Invented names of one account count as one, and cannot share the cache into small parts."""
    bench = Bench(num_blocks=40, max_rows=2)
    prompt = list(range(13))
    bench.add(make_request(1, prompt, max_tokens=1, tenant="modest"))
    bench.run()
    for number in range(2, 30):
        tenant = f"invented {number}" if charged_to else "flood"
        bench.add(make_request(number, 20, max_tokens=1, tenant=tenant, charged_to=charged_to))
        bench.run()
    assert bench.scheduler.stats().num_blocks_cached > 30, "the cache is full"
    bench.add(make_request(50, prompt, max_tokens=1, tenant="modest"))
    bench.run()
    assert bench.ends[50].num_cached_tokens == 12
