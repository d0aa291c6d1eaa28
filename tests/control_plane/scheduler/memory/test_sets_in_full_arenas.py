"""Sets of adapters where pins, other sets or other requests take the slots: nothing waits for ever."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from control_plane.scheduler.memory.slot_placement import STARVATION_ADMISSIONS
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.types import (
    AdapterRef,
    AdapterUse,
    Combination,
    Composition,
    FinishReason,
    Request,
    SlotReady,
)
from tests.control_plane.scheduler.factories import Bench, make_adapter, make_request

A, B, C, D, E, F = (make_adapter(name, 10) for name in "ABCDEF")
P, Q = make_adapter("P", 10), make_adapter("Q", 10)


def combined(request_id: int, *refs: AdapterRef, **changes: Any) -> Request:
    composition = Composition(tuple(AdapterUse(ref, 0.5) for ref in refs), Combination.CAT)
    return make_request(request_id, adapter=refs[0], composition=composition, **changes)


def make_bench(num_slots: int = 3, policy: Policy = Policy.CHUNKED_PREFILL, **limits: Any) -> Bench:
    return Bench(SchedulerSettings(policy=policy), num_slots=num_slots, arena_bytes=10 * num_slots, **limits)


def pass_by(bench: Bench, first_id: int) -> None:
    """Admit as many requests of the base model as an adapter lets pass before slots are closed for it."""
    for request_id in range(first_id, first_id + STARVATION_ADMISSIONS + 1):
        bench.add(make_request(request_id, max_tokens=1))
        bench.step()


def with_pins(policy: Policy = Policy.CHUNKED_PREFILL, **limits: Any) -> Bench:
    """Three slots; P and Q are pinned in two of them, and A is in the third."""
    bench = make_bench(policy=policy, **limits)
    bench.scheduler.set_pinned({P.digest, Q.digest})
    bench.add(*(make_request(1000 + number, adapter=ref) for number, ref in enumerate((P, Q, A))))
    bench.run()
    assert bench.probe.ready_digests() == {P.digest, Q.digest, A.digest}
    return bench


@pytest.mark.parametrize("policy", Policy)
def test_a_set_without_room_beside_pins_ends_with_the_numbers_and_blocks_nobody(policy: Policy) -> None:
    bench = with_pins(policy)
    bench.add(combined(1, B, A), combined(2, A, P), make_request(3, adapter=C), combined(4, C, D))
    bench.run()
    for request_id in (1, 4):
        assert bench.ends[request_id].finish_reason is FinishReason.ADAPTER_FAILED
        assert "2 adapters take 40 bytes in 4 slots, the worker's arena has 30 in 3" in bench.ends[request_id].message
    assert bench.ends[2].finish_reason is bench.ends[3].finish_reason is FinishReason.LENGTH


def test_a_slot_that_is_closed_for_an_adapter_is_not_lost_when_a_set_with_both_comes_next() -> None:
    """The slot of A is closed for X, whose request is cancelled. B starves then, and is needed with A alone."""
    bench = with_pins(num_blocks=64, max_model_len=200)
    bench.add(make_request(1, adapter=A, max_tokens=100))
    bench.step()
    bench.add(make_request(2, adapter=make_adapter("X", 10)))
    pass_by(bench, 100)
    bench.add(combined(3, B, A), make_request(4, adapter=C))
    pass_by(bench, 200)
    bench.scheduler.cancel(make_request(2).request_id)
    del bench.tokens[2]
    bench.run()
    assert bench.ends[4].finish_reason is FinishReason.LENGTH
    assert bench.ends[3].finish_reason is FinishReason.ADAPTER_FAILED and "pinned" in bench.ends[3].message


def test_pins_made_while_a_set_waits_end_it_and_pins_taken_back_do_not() -> None:
    bench = make_bench()
    bench.add(make_request(1, adapter=P, max_tokens=30), make_request(2, adapter=Q, max_tokens=30))
    bench.step()
    bench.add(combined(3, A, B), combined(4, A, C))
    bench.step()
    bench.scheduler.set_pinned({P.digest, Q.digest})
    bench.scheduler.set_pinned({P.digest})
    bench.step()
    assert not {3, 4} & bench.ends.keys(), "P, A and B have room"
    bench.scheduler.set_pinned({P.digest, Q.digest})
    bench.run()
    assert {bench.ends[number].finish_reason for number in (3, 4)} == {FinishReason.ADAPTER_FAILED}
    assert {bench.ends[number].finish_reason for number in (1, 2)} == {FinishReason.LENGTH}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("policy", Policy)
def test_sets_that_overlap_in_an_arena_for_one_of_them_all_end(policy: Policy, size: int) -> None:
    bench = make_bench(size, policy)
    sets = list(itertools.permutations((A, B, C, D, E, F), size))[:: 7 * size]
    bench.add(*(combined(number, *refs, tenant="abc"[number % 3]) for number, refs in enumerate(sets, start=1)))
    bench.add(*(make_request(100 + number, adapter=ref) for number, ref in enumerate((A, C, F))))
    bench.run(2000)
    assert len(bench.ends) == len(sets) + 3
    assert {end.finish_reason for end in bench.ends.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("size", [2, 3])
def test_a_flood_of_adapters_that_starve_leaves_a_set_its_turn(size: int) -> None:
    """When a set is whole, its slots are as safe from the next adapter that starves as those of a fresh load."""
    bench = make_bench(3, max_rows=2)
    flood = [make_adapter(f"flood {number}", 10) for number in range(12)]
    bench.add(*(make_request(number, adapter=flood[number % 12], max_tokens=2) for number in range(1, 40)))
    for _ in range(60):
        bench.step()
    bench.add(combined(5000, *(A, B, C)[:size], tenant="waits"))
    next_id = 40
    for _ in range(1500):
        while bench.scheduler.num_waiting < 40:
            bench.add(make_request(next_id, adapter=flood[next_id % 12], max_tokens=2))
            next_id += 1
        bench.step()
        if 5000 in bench.ends:
            break
    assert bench.ends[5000].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("size", [2, 3])
def test_a_flood_of_sets_leaves_a_request_with_one_adapter_its_turn(size: int) -> None:
    bench = make_bench(3, max_rows=2)
    refs = [make_adapter(f"flood {number}", 10) for number in range(8)]
    sets = itertools.cycle(itertools.combinations(refs, size))
    next_id = 1
    for _ in range(1500):
        while bench.scheduler.num_waiting < 30:
            bench.add(combined(next_id, *next(sets), max_tokens=2))
            next_id += 1
            if next_id == 100:
                bench.add(make_request(5000, adapter=make_adapter("large", 30), tenant="waits"))
        bench.step()
        if 5000 in bench.ends:
            break
    assert bench.ends[5000].finish_reason is FinishReason.LENGTH


def test_a_set_that_is_preempted_and_swapped_out_gets_all_its_slots_again() -> None:
    bench = Bench(
        SchedulerSettings(swap_us_per_block=0.0), num_slots=2, arena_bytes=20, num_host_blocks=16, num_blocks=64
    )
    bench.add(combined(1, A, B, max_tokens=20))
    for _ in range(4):
        bench.step()
    bench.scheduler.pause(bench.running_ids()[0])  # type: ignore[arg-type]
    bench.add(combined(2, C, D), combined(3, B, C))
    for _ in range(20):
        bench.step()
    assert {2, 3} <= bench.ends.keys(), "a paused request gives its slots to others"
    bench.scheduler.resume(combined(1, A).request_id)
    bench.run()
    assert bench.ends[1].finish_reason is FinishReason.LENGTH


def test_a_set_is_not_closed_between_its_last_load_and_its_first_row() -> None:
    """A was used before and is old; B comes at last, and at this moment another adapter starves."""
    bench = make_bench(2, max_rows=1)
    bench.add(make_request(1, adapter=A, max_tokens=2))
    bench.run()
    bench.add(combined(2, A, B), make_request(3, adapter=make_adapter("large", 20), tenant="other"))
    commands = bench.scheduler.slot_commands()
    assert [command.digest for command in commands] == [B.digest]
    for request_id in range(10, 12 + STARVATION_ADMISSIONS):
        bench.add(make_request(request_id, prompt=2, max_tokens=1))
        bench.plan()
        bench.return_result()
        assert not bench.scheduler.slot_commands(), "the set that is being assembled keeps A"
    (load,) = commands
    bench.worker.obey(load)
    bench.keep(bench.scheduler.apply_slot_report(SlotReady(load.slot_idx, load.generation), 0.0))
    assert not bench.scheduler.slot_commands()
    assert bench.plan() is not None and 2 in bench.running_ids()
    bench.return_result()
    bench.run()
    assert {end.finish_reason for end in bench.ends.values()} == {FinishReason.LENGTH}
