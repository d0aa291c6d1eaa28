"""Prefetch, leases, eviction, retries, pins and the starvation bound."""

from __future__ import annotations

import pytest

from control_plane.scheduler.errors import SlotReportMismatch
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.memory.adapter_demands import MAX_LOAD_ATTEMPTS
from control_plane.scheduler.requests.sequence import SequenceGroup
from control_plane.scheduler.types import (
    EvictSlot,
    FinishReason,
    LoadSlot,
    RequestId,
    RequestOutput,
    SlotEmptied,
    SlotLoadFailed,
    SlotReady,
)
from tests.control_plane.scheduler.factories import Bench, make_adapter, make_request
from tests.fakes.model_worker import oracle

ONE, TWO, THREE = make_adapter("one"), make_adapter("two"), make_adapter("three")


def test_an_adapter_is_demanded_when_its_request_is_queued() -> None:
    bench = Bench()
    bench.add(make_request(1, adapter=ONE))
    assert bench.scheduler.slot_commands() == [LoadSlot(0, 1, ONE.digest)]
    assert bench.scheduler.slot_commands() == []


def test_a_request_whose_adapter_loads_does_not_block_those_behind_it() -> None:
    bench = Bench()
    bench.add(make_request(1, adapter=ONE), make_request(2))
    bench.scheduler.slot_commands()
    plan = bench.plan()
    assert plan is not None and [new.request_id for new in plan.new_rows] == [2]


def test_adapters_and_base_run_in_one_step_each_with_its_own_slot() -> None:
    bench = Bench()
    requests = [make_request(1, [5, 5]), make_request(2, [5, 5], adapter=ONE), make_request(3, [5, 5], adapter=TWO)]
    bench.add(*requests)
    bench.obey()
    plan = bench.plan()
    assert plan is not None
    assert [(new.slot_idx, new.slot_generation) for new in plan.new_rows] == [(None, 0), (0, 1), (1, 1)]
    bench.run()
    assert [bench.tokens[i] for i in (1, 2, 3)] == [oracle(request, 64) for request in requests]
    assert len({tuple(bench.tokens[i]) for i in (1, 2, 3)}) == 3


def test_the_least_recently_used_idle_adapter_is_evicted() -> None:
    bench = Bench()
    for request_id, adapter in enumerate([ONE, TWO, ONE], start=1):
        bench.add(make_request(request_id, adapter=adapter))
        bench.run()
    bench.add(make_request(4, adapter=THREE))
    assert bench.obey() == [EvictSlot(1, 1, TWO.digest), LoadSlot(1, 2, THREE.digest)]
    assert bench.probe.ready_digests() == {ONE.digest, THREE.digest}


def test_a_slot_is_not_reused_before_the_worker_says_that_it_is_empty() -> None:
    bench = Bench(num_slots=1)
    bench.add(make_request(1, adapter=ONE))
    bench.run()
    bench.add(make_request(2, adapter=TWO))
    assert bench.scheduler.slot_commands() == [EvictSlot(0, 1, ONE.digest)]
    assert bench.scheduler.slot_commands() == []
    bench.scheduler.apply_slot_report(SlotEmptied(0, 1), 0.0)
    assert bench.scheduler.slot_commands() == [LoadSlot(0, 2, TWO.digest)]


def test_a_slot_that_a_plan_in_flight_names_is_not_evicted() -> None:
    bench = Bench(num_slots=1, plan_depth=2)
    bench.add(make_request(1, adapter=ONE, max_tokens=20))
    bench.obey()
    bench.plan()
    bench.plan()
    bench.scheduler.cancel(RequestId(1))
    bench.add(make_request(2, adapter=TWO))
    bench.return_result()
    assert bench.scheduler.slot_commands() == []
    bench.return_result()
    assert bench.scheduler.slot_commands() == [EvictSlot(0, 1, ONE.digest)]


def test_bytes_are_a_limit_as_slots_are() -> None:
    bench = Bench(num_slots=3)
    small = make_adapter("small", 20)
    bench.add(make_request(1, adapter=ONE), make_request(2, adapter=TWO), make_request(3, adapter=small))
    assert [command.digest for command in bench.obey()] == [ONE.digest, TWO.digest]
    bench.run()
    assert len(bench.ends) == 3


def test_a_large_adapter_lets_small_ones_pass_but_gets_in() -> None:
    bench = Bench(num_slots=3)
    big, small = make_adapter("big", 100), make_adapter("small", 10)
    bench.add(make_request(1, adapter=ONE, max_tokens=8), make_request(2, adapter=big), make_request(3, adapter=small))
    assert [command.digest for command in bench.scheduler.slot_commands()] == [ONE.digest, small.digest]
    bench.scheduler.apply_slot_report(SlotReady(0, 1), 0.0)
    bench.scheduler.apply_slot_report(SlotReady(1, 1), 0.0)
    bench.worker.slots = {0: (1, ONE.digest), 1: (1, small.digest)}
    bench.run()
    assert len(bench.ends) == 3


def test_a_pinned_adapter_survives_eviction() -> None:
    bench = Bench()
    pinned = make_adapter("pinned")
    bench.scheduler.set_pinned({pinned.digest})  # before it lies in a slot
    for request_id, adapter in enumerate([pinned, ONE, TWO, THREE], start=1):
        bench.add(make_request(request_id, adapter=adapter))
        bench.run()
    assert pinned.digest in bench.probe.ready_digests()
    bench.scheduler.set_pinned(set())
    for request_id, adapter in enumerate([ONE, TWO], start=5):
        bench.add(make_request(request_id, adapter=adapter))
        bench.run()
    assert pinned.digest not in bench.probe.ready_digests()


def test_a_request_that_pinned_adapters_leave_no_room_for_ends_at_once() -> None:
    bench = Bench()
    for request_id, name in enumerate("ab", start=1):
        bench.scheduler.set_pinned({make_adapter(pinned).digest for pinned in "ab"[:request_id]})
        bench.add(make_request(request_id, adapter=make_adapter(name)))
    bench.run()
    bench.add(make_request(3, adapter=ONE))
    bench.obey()
    (output,) = bench.scheduler.expire(0.0)
    assert output.finish_reason is FinishReason.ADAPTER_FAILED and "pinned" in output.message
    bench.scheduler.set_pinned({make_adapter("b").digest})
    bench.add(make_request(4, adapter=ONE))
    bench.run()
    assert len(bench.tokens[4]) == 4


def test_a_retryable_load_failure_is_tried_again_after_growing_pauses_and_then_given_up() -> None:
    bench = Bench()
    bench.add(make_request(1, adapter=ONE), make_request(2, adapter=ONE))
    outputs: list[RequestOutput] = []
    now_s = 100.0
    for attempt, pause_s in enumerate([0.0, 0.25, 0.5, 1.0, 2.0, 2.0, 2.0], start=1):
        assert outputs == []
        assert list(bench.scheduler.expire(now_s + pause_s - 0.01)) == []
        assert pause_s == 0.0 or bench.scheduler.slot_commands() == []
        now_s += pause_s
        assert list(bench.scheduler.expire(now_s)) == []
        (command,) = bench.scheduler.slot_commands()
        assert command == LoadSlot(0, attempt, ONE.digest)
        outputs = list(
            bench.scheduler.apply_slot_report(SlotLoadFailed(0, attempt, "bytes are gone", is_retryable=True), now_s)
        )
        check_scheduler(bench.scheduler)
    assert attempt == MAX_LOAD_ATTEMPTS
    assert [(o.request_id, o.finish_reason, o.message) for o in outputs] == [
        (1, FinishReason.ADAPTER_FAILED, "bytes are gone"),
        (2, FinishReason.ADAPTER_FAILED, "bytes are gone"),
    ]
    assert bench.scheduler.slot_commands() == []


def test_a_load_that_backs_off_keeps_no_other_adapter_from_its_slot() -> None:
    bench = Bench(num_slots=1)
    bench.add(make_request(1, adapter=ONE), make_request(2, adapter=TWO))
    bench.scheduler.slot_commands()
    bench.scheduler.apply_slot_report(SlotLoadFailed(0, 1, "the store is away", is_retryable=True), 0.0)
    bench.add(make_request(3, adapter=ONE))  # joins the wait, which it does not shorten
    bench.run_until_idle()
    assert set(bench.ends) == {2}
    bench.scheduler.cancel(RequestId(1))
    check_scheduler(bench.scheduler)
    bench.scheduler.expire(0.25)
    bench.run()
    assert len(bench.tokens[3]) == 4


def test_a_load_failure_that_is_not_retryable_ends_the_requests_at_once() -> None:
    bench = Bench()
    bench.add(make_request(1, adapter=ONE), make_request(2))
    bench.scheduler.slot_commands()
    outputs = list(bench.scheduler.apply_slot_report(SlotLoadFailed(0, 1, "other modules", is_retryable=False), 0.0))
    assert [output.request_id for output in outputs] == [1]
    bench.run()
    assert len(bench.tokens[2]) == 4


def test_a_report_that_contradicts_the_slot_is_refused() -> None:
    bench = Bench()
    with pytest.raises(SlotReportMismatch, match="slot 9"):
        bench.scheduler.apply_slot_report(SlotReady(9, 1), 0.0)
    bench.add(make_request(1, adapter=ONE))
    bench.scheduler.slot_commands()
    with pytest.raises(SlotReportMismatch, match="generation 2"):
        bench.scheduler.apply_slot_report(SlotReady(0, 2), 0.0)
    with pytest.raises(SlotReportMismatch):
        bench.scheduler.apply_slot_report(SlotEmptied(0, 1), 0.0)


def test_a_paused_reader_does_not_keep_a_slot_from_others() -> None:
    bench = Bench(num_slots=1)
    first = make_request(1, adapter=ONE, max_tokens=8)
    bench.add(first)
    bench.step()
    bench.step()
    bench.scheduler.pause(RequestId(1))
    bench.add(make_request(2, adapter=TWO))
    for _ in range(8):
        bench.step()
    assert 2 in bench.ends
    bench.scheduler.resume(RequestId(1))
    bench.run()
    assert bench.tokens[1] == oracle(first, 64)


def test_purging_forgets_blocks_at_once_and_the_slot_once_unused() -> None:
    bench = Bench()
    bench.add(make_request(1, prompt=9, adapter=ONE), make_request(2, prompt=9, adapter=ONE, max_tokens=8))
    while 1 not in bench.ends:
        bench.step()
    bench.scheduler.purge_digest(ONE.digest)
    assert bench.scheduler.adapter_use(ONE.digest).is_held
    assert not bench.probe.has_cached_blocks(ONE.digest)
    bench.run()
    bench.obey()
    assert len(bench.tokens[2]) == 8
    assert not bench.scheduler.adapter_use(ONE.digest).is_held
    bench.add(make_request(3, adapter=ONE))
    bench.run()
    assert bench.probe.ready_digests() == {ONE.digest}


def test_purging_is_not_undone_by_a_preemption() -> None:
    bench = Bench(num_blocks=8)
    bench.add(make_request(1, prompt=12, max_tokens=18), make_request(2, prompt=12, max_tokens=14, adapter=ONE))
    bench.step()
    bench.scheduler.purge_digest(ONE.digest)
    bench.run()
    bench.obey()
    assert bench.scheduler.stats().num_preemptions > 0
    assert not bench.scheduler.adapter_use(ONE.digest).is_held


def test_ends_look_at_no_other_request_while_adapters_are_purged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step costs the same however many wait and however many adapters were deleted under waiting requests."""
    bench = Bench(max_rows=1)
    bench.add(*(make_request(i, adapter=make_adapter(f"deleted {i}", 5)) for i in range(1, 5)), make_request(5))
    for i in range(1, 5):
        assert bench.scheduler.purge_digest(make_adapter(f"deleted {i}", 5).digest)
        assert not bench.scheduler.purge_digest(make_adapter(f"deleted {i}", 5).digest), "it is under way"
    looked_at: list[int] = []
    digest_of = vars(SequenceGroup)["digest"].fget

    def spied(group: SequenceGroup) -> str | None:
        looked_at.append(group.request.request_id)
        return digest_of(group)

    monkeypatch.setattr(SequenceGroup, "digest", property(spied))
    bench.scheduler.cancel(RequestId(5))
    assert set(looked_at) == {5}
    monkeypatch.undo()
    bench.run()
    bench.obey()
    assert not any(bench.scheduler.adapter_use(make_adapter(f"deleted {i}", 5).digest).is_held for i in range(1, 5))
    assert not bench.scheduler.purge_digest(ONE.digest), "there is nothing of it"
