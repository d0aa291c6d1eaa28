"""Requests that combine adapters: all of a set at once, and no two sets that wait for each other for ever."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.scheduler.errors import AdapterNeverFits
from control_plane.scheduler.memory.slot_placement import STARVATION_ADMISSIONS
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.types import (
    AdapterRef,
    AdapterUse,
    Combination,
    Composition,
    FinishReason,
    LoadSlot,
    Request,
    SlotLoadFailed,
    SlotReady,
)
from tests.control_plane.scheduler.factories import Bench, make_adapter, make_request

A, B, C, D = (make_adapter(name) for name in "ABCD")


def combined(request_id: int, *refs: AdapterRef, scale: float = 0.5, **changes: Any) -> Request:
    composition = Composition(tuple(AdapterUse(ref, scale) for ref in refs), Combination.CAT)
    return make_request(request_id, adapter=refs[0], composition=composition, **changes)


@pytest.mark.parametrize("policy", Policy)
def test_sets_that_fit_one_at_a_time_all_end(policy: Policy) -> None:
    """The arena holds two adapters; the loads of two accounts take turns, so both sets begin to be loaded."""
    bench = Bench(SchedulerSettings(policy=policy))
    bench.add(
        combined(1, A, B, tenant="one"),
        combined(2, C, D, tenant="two"),
        combined(3, D, A, tenant="one"),
        combined(4, B, C, tenant="two"),
    )
    bench.run()
    assert {end.finish_reason for end in bench.ends.values()} == {FinishReason.LENGTH}


def test_a_row_leases_every_adapter_of_its_set() -> None:
    bench = Bench()
    bench.add(combined(1, A, B, max_tokens=8))
    bench.step()
    new = bench.plans[0].new_rows[0]
    assert [use.scale for use in new.adapters] == [0.5, 0.5] and new.slot_idx == new.adapters[0].slot_idx
    assert len({use.slot_idx for use in new.adapters}) == 2
    bench.add(make_request(2, adapter=C))
    for _ in range(3):
        bench.step()
    assert 2 not in bench.running_ids(), "an adapter in use was evicted"
    bench.run()


def test_requests_with_one_adapter_do_not_starve_a_set() -> None:
    bench = Bench(max_rows=2)
    bench.add(*(make_request(i, adapter=A, max_tokens=2) for i in range(1, 4)))
    bench.step()
    bench.add(combined(1000, B, C))
    for request_id in range(4, 10 + 3 * STARVATION_ADMISSIONS):
        bench.add(make_request(request_id, adapter=A, max_tokens=2))
        bench.step()
        if 1000 in bench.ends:
            break
    assert 1000 in bench.ends
    assert len(bench.ends) < 3 * STARVATION_ADMISSIONS


def test_a_set_does_not_keep_an_adapter_that_another_request_needs() -> None:
    """While a request with A runs, the set waits with B for A's place, and another request needs no more than B."""
    bench = Bench()
    bench.add(make_request(1, adapter=A, max_tokens=30))
    bench.step()
    bench.add(combined(2, B, C), make_request(3, adapter=B))
    for _ in range(8):
        bench.step()
    assert 3 in bench.ends and 2 not in bench.ends
    bench.run()


def test_a_set_that_pinned_adapters_leave_no_room_for_ends_with_the_reason() -> None:
    bench = Bench()
    bench.scheduler.set_pinned({A.digest})
    bench.add(make_request(1, adapter=A))
    bench.run()
    bench.add(combined(2, B, C), combined(3, A, B))
    bench.run()
    assert bench.ends[2].finish_reason is FinishReason.ADAPTER_FAILED and "pinned" in bench.ends[2].message
    assert bench.ends[3].finish_reason is FinishReason.LENGTH


def test_a_set_that_exceeds_the_arena_is_refused() -> None:
    bench = Bench()
    with pytest.raises(AdapterNeverFits, match=r"the 3 adapters take 150 bytes, the worker's arena has 100 in 2 slots"):
        bench.add(combined(1, A, B, C))


def test_a_failed_load_ends_requests_that_combine_the_adapter() -> None:
    bench = Bench(num_slots=3, arena_bytes=150)
    bench.add(combined(1, A, B), make_request(2, adapter=A))
    for command in bench.scheduler.slot_commands():
        assert isinstance(command, LoadSlot)
        if command.digest == B.digest:
            failed = SlotLoadFailed(command.slot_idx, command.generation, "broken", is_retryable=False)
            bench.keep(bench.scheduler.apply_slot_report(failed, 0.0))
        else:
            bench.worker.obey(command)
            bench.keep(bench.scheduler.apply_slot_report(SlotReady(command.slot_idx, command.generation), 0.0))
    assert bench.ends[1].finish_reason is FinishReason.ADAPTER_FAILED
    bench.run()
    assert bench.ends[2].finish_reason is FinishReason.LENGTH


def test_purging_an_adapter_takes_the_blocks_of_its_combinations() -> None:
    """A stale prefix cache after a deletion: the blocks are under the set's name, not the adapter's."""
    bench = Bench()
    bench.add(combined(1, A, B, prompt=12))
    bench.run()
    assert bench.scheduler.adapter_use(B.digest).is_held and bench.probe.num_cache_blocks() > 0
    assert bench.scheduler.purge_digest(B.digest)
    bench.obey()
    assert bench.probe.num_cache_blocks() == 0 and not bench.scheduler.adapter_use(B.digest).is_held


def test_cached_blocks_are_shared_by_equal_combinations_only() -> None:
    bench = Bench()
    prompt = list(range(12))
    bench.add(combined(1, A, B, prompt=prompt))
    bench.run()
    others = [
        combined(2, A, B, prompt=prompt),
        combined(3, A, B, prompt=prompt, scale=0.25),
        combined(4, A, prompt=prompt),
        make_request(5, prompt, adapter=A),
        make_request(6, prompt),
    ]
    for request in others:
        bench.add(request)
        bench.run()
    cached = {request_id: end.num_cached_tokens for request_id, end in bench.ends.items()}
    assert cached == {1: 0, 2: 8, 3: 0, 4: 0, 5: 0, 6: 0}


def test_an_activated_adapter_shares_the_blocks_before_its_activation() -> None:
    bench = Bench()
    prompt = list(range(20))
    bench.add(make_request(1, prompt))
    bench.run()
    bench.add(make_request(2, prompt, adapter=A, active_from=13))
    bench.run()
    bench.add(make_request(3, prompt, adapter=B, active_from=9), make_request(4, prompt, adapter=A, active_from=13))
    bench.run()
    bench.add(make_request(5, prompt, adapter=A, active_from=14), make_request(6, prompt, adapter=A))
    bench.run()
    cached = {request_id: end.num_cached_tokens for request_id, end in bench.ends.items()}
    # Blocks of 4: 12 tokens of the base before token 13, 8 before token 9; 4 repeats 2 up to the last whole block.
    assert cached == {1: 0, 2: 12, 3: 8, 4: 16, 5: 12, 6: 0}


def test_purging_an_activated_adapter_leaves_the_blocks_of_the_base() -> None:
    bench = Bench()
    bench.add(make_request(1, prompt=20, adapter=A, active_from=13))
    bench.run()
    num_blocks = bench.probe.num_cache_blocks()
    bench.scheduler.purge_digest(A.digest)
    bench.obey()
    assert bench.probe.num_cache_blocks() == 3 < num_blocks
