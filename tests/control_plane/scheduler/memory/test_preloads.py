"""Adapters that are loaded before a request needs them."""

from __future__ import annotations

from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.memory.adapter_demands import MAX_LOAD_ATTEMPTS
from control_plane.scheduler.types import EvictSlot, LoadSlot, SlotLoadFailed, SlotReady
from tests.control_plane.scheduler.factories import Bench, make_adapter, make_request

ONE, TWO, THREE = make_adapter("one"), make_adapter("two"), make_adapter("three")


def test_preloaded_adapter_is_ready_for_its_first_request() -> None:
    bench = Bench()
    bench.scheduler.preloads.begin(ONE, "tenant")
    check_scheduler(bench.scheduler)
    assert bench.scheduler.slot_commands() == [LoadSlot(0, 1, ONE.digest)]
    assert bench.scheduler.preloads.is_open(ONE.digest)
    bench.scheduler.apply_slot_report(SlotReady(0, 1, 0), 0.0)
    assert not bench.scheduler.preloads.is_open(ONE.digest)
    check_scheduler(bench.scheduler)
    bench.add(make_request(1, adapter=ONE))
    assert bench.scheduler.slot_commands() == []
    plan = bench.plan()
    assert plan is not None and [new.slot_idx for new in plan.new_rows] == [0]


def test_requests_and_preload_share_one_load_and_the_preload_ends_alone() -> None:
    bench = Bench()
    request = make_request(1, adapter=ONE)
    bench.add(request)
    bench.scheduler.preloads.begin(ONE, request.account)
    bench.scheduler.preloads.begin(ONE, "other")
    bench.scheduler.preloads.end(ONE.digest)
    check_scheduler(bench.scheduler)
    assert bench.obey() == [LoadSlot(0, 1, ONE.digest)]
    bench.run()
    check_scheduler(bench.scheduler)


def test_preload_evicts_what_is_idle_and_waits_for_what_is_in_use() -> None:
    bench = Bench(num_slots=1)
    bench.add(make_request(1, adapter=ONE, max_tokens=20))
    bench.obey()
    bench.plan()
    bench.scheduler.preloads.begin(TWO, "tenant")
    assert bench.scheduler.slot_commands() == []
    check_scheduler(bench.scheduler)
    bench.run()
    while bench.scheduler.preloads.is_open(TWO.digest):
        assert bench.obey()
    assert bench.probe.ready_digests() == {TWO.digest}
    bench.scheduler.preloads.begin(THREE, "tenant")
    assert bench.scheduler.slot_commands() == [EvictSlot(0, 2, TWO.digest)]
    bench.scheduler.preloads.end(THREE.digest)
    bench.obey()
    assert not bench.scheduler.preloads.is_open(THREE.digest)
    check_scheduler(bench.scheduler)


def test_preload_that_fails_for_good_ends() -> None:
    bench = Bench()
    for is_retryable, num_attempts in ((False, 1), (True, MAX_LOAD_ATTEMPTS)):
        now_s = 0.0
        bench.scheduler.preloads.begin(ONE, "tenant")
        for _ in range(num_attempts):
            assert bench.scheduler.preloads.is_open(ONE.digest)
            (command,) = bench.scheduler.slot_commands()
            assert isinstance(command, LoadSlot)
            report = SlotLoadFailed(command.slot_idx, command.generation, "gone", is_retryable=is_retryable)
            bench.scheduler.apply_slot_report(report, now_s)
            now_s += 10.0
            bench.scheduler.expire(now_s)
        assert not bench.scheduler.preloads.is_open(ONE.digest)
        assert bench.scheduler.slot_commands() == []
        check_scheduler(bench.scheduler)


def test_adapter_in_a_slot_or_above_the_arena_is_not_preloaded() -> None:
    bench = Bench()
    bench.add(make_request(1, adapter=ONE))
    bench.run()
    huge = make_adapter("huge", arena_bytes=bench.scheduler.limits.arena_bytes + 1)
    for ref in (ONE, huge):
        bench.scheduler.preloads.begin(ref, "tenant")
        assert not bench.scheduler.preloads.is_open(ref.digest)
    assert bench.scheduler.slot_commands() == []
