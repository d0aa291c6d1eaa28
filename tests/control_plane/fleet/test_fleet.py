"""The fleet with workers in memory and a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tracemalloc
from collections.abc import Coroutine
from dataclasses import replace

import grpc
import pytest

from contract.v1 import plan_pb2
from control_plane.errors import (
    AdapterDamaged,
    AdapterLoadFailed,
    AdapterNotServed,
    AdapterTooLarge,
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    MotetError,
    NoWorker,
    QueueFull,
    QuotaExceeded,
    QuotaTooSmall,
    SlowConsumer,
    StaleControlPlane,
    Unavailable,
    WorkerIdTaken,
    WorkerLost,
    status_of,
)
from control_plane.fleet.endings import EndCause
from control_plane.fleet.hello import BOUNDS
from control_plane.fleet.jobs import MAX_UNREAD_TOKENS, Job, JobStream
from control_plane.fleet.settings import PlacementCosts
from control_plane.fleet.tenants import TenantLimits, TenantTable
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.memory.prefix_cache import PrefixCache
from control_plane.scheduler.probe import SchedulerProbe
from control_plane.scheduler.requests.sequence import Sequence
from control_plane.scheduler.types import AdapterRef, BeamSearch, FinishReason, StepPlan
from data_plane.errors import AdapterMismatch
from data_plane.wire import encode_hello
from tests.fakes.fleet_rig import (
    CAPACITIES,
    FakeClock,
    InspectedFleet,
    LoopbackWorker,
    expected,
    let_time_pass,
    make_fleet,
    make_request,
    read_all,
)


async def run_all(worker: LoopbackWorker, streams: list[JobStream]) -> list[list[int]]:
    """Turn the worker until every stream has ended; their tokens."""
    readers = [asyncio.create_task(read_all(stream)) for stream in streams]
    await worker.run(lambda: all(reader.done() for reader in readers))
    return [await reader for reader in readers]


def assert_nothing_held(worker: LoopbackWorker) -> None:
    snapshot = worker.session.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.num_blocks_held) == (0, 0, 0)
    assert snapshot.num_plans_in_flight == 0
    check_scheduler(worker.session.scheduler)


async def pass_time(clock: FakeClock, fleet: InspectedFleet, workers: list[LoopbackWorker], seconds: float) -> None:
    """Let time pass in ticks, with workers that are alive."""
    for _ in range(round(seconds / 0.1)):
        clock.advance(0.1)
        for worker in workers:
            worker.session.receive(heartbeat())
            await worker.turn()
        fleet.tick()
    await asyncio.sleep(0)


# ---- tokens ----


async def test_mixed_adapters_in_one_batch_give_the_oracles_tokens(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapters = [None, *(fleet.weights.add(f"a{i}") for i in range(6))]  # more than the four slots
    requests = [make_request(fleet, [i, 5], 20 + i, adapters[i % 7]) for i in range(28)]
    answers = await run_all(worker, [fleet.submit(request) for request in requests])
    assert answers == [expected(request) for request in requests]
    assert_nothing_held(worker)
    assert sorted(set(fleet.weights.cached)) == sorted(adapter.digest for adapter in adapters if adapter)


async def test_adapters_share_no_prefix_and_one_adapter_does(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapter = fleet.weights.add("a")
    prompt = list(range(1, 30))
    for ref in (None, adapter, adapter, None):
        request = make_request(fleet, prompt, 6, ref)
        assert await run_all(worker, [fleet.submit(request)]) == [expected(request)]
    snapshot = worker.session.snapshot()
    assert snapshot.prefix_hit_tokens == 2 * 28


async def test_preempted_requests_still_give_the_oracles_tokens(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, num_blocks=24))
    requests = [make_request(fleet, [i, 2, 3], 60) for i in range(6)]
    answers = await run_all(worker, [fleet.submit(request) for request in requests])
    assert answers == [expected(request) for request in requests]
    assert worker.session.snapshot().num_preemptions > 0
    assert_nothing_held(worker)


async def test_a_plan_is_sent_before_the_result_of_the_one_before(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    fleet.submit(make_request(fleet, [1, 2], 50))
    await worker.receive()
    assert [plan.step_id for plan in worker.plans] == [1, 2]
    for step_id in range(1, 20):
        worker.answer(1)  # result n arrives after plan n + 1 was sent, and brings plan n + 2
        assert worker.session.snapshot().num_plans_in_flight == 2
        await worker.receive()
        assert worker.plans[-1].step_id == step_id + 2


async def test_a_long_way_lets_plans_stand_for_several_steps(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    requests = [make_request(fleet, [i, 2], 100 + i) for i in range(4)]
    streams = [fleet.submit(request) for request in requests]
    readers = [asyncio.create_task(read_all(stream)) for stream in streams]
    for _ in range(10):
        await worker.turn()
    assert all(plan.num_steps == 0 for plan in worker.plans)  # the first pong came at once
    for _ in range(8):
        clock.advance(0.5)
        worker.session.receive(heartbeat())
        fleet.tick()
        await worker.receive()
        clock.advance(0.05)  # the way of the pong
        worker.answer()
    snapshot = worker.session.snapshot()
    assert (snapshot.max_plan_steps, round(snapshot.round_trip_ms)) == (4, 50)
    await worker.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    assert max(plan.num_steps for plan in worker.plans) == 4
    assert len(worker.plans) < worker.session.snapshot().num_steps
    assert_nothing_held(worker)


async def test_a_worker_lost_amid_a_repeated_plan_loses_and_repeats_no_token(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet, "w0")
    requests = [make_request(fleet, [i, 2], 100) for i in range(4)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    while not (worker.plans and worker.plans[-1].num_steps == 4):
        clock.advance(0.5)
        worker.session.receive(heartbeat())
        fleet.tick()
        await worker.receive()
        clock.advance(0.05)
        worker.answer()
    await worker.receive()
    worker.answer(2)  # of the four steps
    worker.lose()
    other = LoopbackWorker(fleet, "w1")
    await other.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]


async def test_a_burst_of_requests_makes_one_plan(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    for i in range(10):
        fleet.submit(make_request(fleet, [i], 5))
    await worker.receive()
    assert len(worker.plans[0].new_rows) == 10


async def test_events_coalesce_what_is_pending_and_say_why_they_end(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    request = make_request(fleet, [1, 2], 12)
    stop = replace(request, request_id=fleet.next_request_id(), stop_token_ids=frozenset([expected(request)[4]]))
    clock.advance(0.25)
    streams = [fleet.submit(request), fleet.submit(stop)]
    await worker.run(lambda: fleet.queue_snapshot().num_requests == 0)
    for stream, num_tokens, reason in zip(
        streams, (12, 5), (FinishReason.LENGTH, FinishReason.STOP_TOKEN), strict=True
    ):
        events = [event async for event in stream]
        assert [(event.token_ids, event.finish_reason) for event in events] == [
            (expected(request)[:num_tokens], reason)
        ]
        assert events[0].queue_time_s == 0.25


# ---- losing workers ----


async def test_requests_of_a_lost_worker_go_on_elsewhere_without_losing_or_repeating_a_token(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    first, second = LoopbackWorker(fleet, "w0"), LoopbackWorker(fleet, "w1")
    adapter = fleet.weights.add("a")
    requests = [make_request(fleet, [i, 9], 50, adapter if i % 2 else None) for i in range(12)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    for _ in range(15):
        await first.turn()
        await second.turn()
    await first.receive()  # executed and never answered
    first.lose()
    await second.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    assert fleet.queue_snapshot().num_migrated == 6
    assert_nothing_held(second)


async def test_requests_wait_for_a_worker_after_the_last_one_is_lost(clock: FakeClock) -> None:
    fleet = make_fleet(clock, worker_grace_s=30)
    workers = [LoopbackWorker(fleet, "w0"), LoopbackWorker(fleet, "w1")]
    requests = [make_request(fleet, [i, 4], 40) for i in range(8)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    for _ in range(10):
        for worker in workers:
            await worker.turn()
    for worker in workers:
        worker.lose()
    clock.advance(29)
    fleet.tick()
    assert fleet.queue_snapshot().num_waiting == 8
    again = LoopbackWorker(fleet, "w1")
    await again.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    assert again.session.epoch > workers[1].session.epoch > 1 << 32


async def test_grace_without_workers_ends_in_no_worker_or_worker_lost(clock: FakeClock) -> None:
    fleet = make_fleet(clock, worker_grace_s=5)
    worker = LoopbackWorker(fleet)
    running = fleet.submit(make_request(fleet, [1], 40))
    for _ in range(3):
        await worker.turn()
    worker.lose()
    waiting = fleet.submit(make_request(fleet, [1], 40))
    let_time_pass(clock, fleet, 5.1)
    with pytest.raises(WorkerLost):
        await read_all(running)
    with pytest.raises(NoWorker):
        await read_all(waiting)
    with pytest.raises(NoWorker):
        fleet.submit(make_request(fleet, [1], 40))


async def test_silent_worker_is_dead_after_two_seconds_and_its_late_result_is_dropped(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    silent, other = LoopbackWorker(fleet, "w0"), LoopbackWorker(fleet, "w1")
    request = make_request(fleet, [3], 20)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await silent.turn()
    await silent.receive()
    for _ in range(20):
        assert fleet.num_workers == 2
        clock.advance(0.1)
        await other.turn()
        other.session.receive(heartbeat())
        fleet.tick()
    assert fleet.num_workers == 1
    silent.answer()
    await other.run(reader.done)
    assert await reader == expected(request)
    # The stopped worker comes back with an answer of its old epoch: it is dropped.
    back = LoopbackWorker(fleet, "w0")
    stale = encode_stale_result(silent)
    back.session.receive(stale)
    assert fleet.num_workers == 2
    assert back.session.snapshot().num_steps == 0


async def test_a_sleep_of_the_control_plane_is_not_taken_for_its_workers_silence(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    LoopbackWorker(fleet)
    let_time_pass(clock, fleet, 1.5)
    clock.advance(60)  # its process is stopped
    let_time_pass(clock, fleet, 0.3)
    assert fleet.num_workers == 1
    let_time_pass(clock, fleet, 0.4)
    assert fleet.num_workers == 0


async def test_a_sleep_of_the_control_plane_is_not_held_against_readers(clock: FakeClock) -> None:
    fleet = make_fleet(clock, slow_reader_timeout_s=4.0)
    worker = LoopbackWorker(fleet)
    request = make_request(fleet, [1], 700)
    stream = fleet.submit(request)
    for _ in range(400):
        await worker.turn()
    assert worker.session.scheduler.stats().num_paused == 1
    clock.advance(10)
    fleet.tick()
    assert not stream.has_ended
    assert await run_all(worker, [stream]) == [expected(request)]


async def test_a_sleep_of_the_control_plane_does_not_use_up_the_time_to_wait_for_a_worker(clock: FakeClock) -> None:
    fleet = make_fleet(clock, worker_grace_s=5)
    request = make_request(fleet, [1], 20)
    stream = fleet.submit(request)
    clock.advance(60)
    fleet.tick()
    assert not stream.has_ended
    assert await run_all(LoopbackWorker(fleet), [stream]) == [expected(request)]


async def test_a_sleep_of_the_control_plane_does_not_move_a_clients_deadline(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    streams = [fleet.submit(make_request(fleet, [1], 500, deadline_s=clock() + 5))]
    await worker.turn()
    worker.lose()
    streams.append(fleet.submit(make_request(fleet, [2], 500, deadline_s=clock() + 5)))
    clock.advance(60)
    fleet.tick()
    for stream in streams:
        assert stream.has_ended
        with pytest.raises(DeadlineExceeded):
            await read_all(stream)


@pytest.mark.parametrize("dead_after_ms", [1000, 2000, 60_000])
async def test_workers_wait_much_longer_for_a_control_plane_than_it_waits_for_them(
    clock: FakeClock, dead_after_ms: int
) -> None:
    """A loop that is busy for some seconds must cost no session."""
    fleet = make_fleet(clock, dead_after_ms=dead_after_ms)
    [welcome] = [
        message.welcome
        for message in LoopbackWorker(fleet).session.take_outgoing()
        if message.WhichOneof("message") == "welcome"
    ]
    assert welcome.dead_after_ms == dead_after_ms
    assert welcome.leave_after_ms >= max(10_000, 5 * dead_after_ms)


async def test_pings_go_out_at_once_and_every_interval(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    for _ in range(30):
        clock.advance(0.1)
        worker.session.receive(heartbeat())
        fleet.tick()
    pings = [m.ping.sequence for m in worker.session.take_outgoing() if m.WhichOneof("message") == "ping"]
    assert pings == list(range(1, len(pings) + 1))
    assert 6 <= len(pings) <= 7  # the first came with the welcome


async def test_a_second_worker_of_one_id_waits_while_the_first_is_alive(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    first = LoopbackWorker(fleet, "w0")
    request = make_request(fleet, [3], 20)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await first.turn()
    for last_epoch in (0, first.session.epoch - 1):  # a new process, and one with a session before
        with pytest.raises(WorkerIdTaken, match=r"attached as w0 and alive.*--worker-id of its own"):
            LoopbackWorker(fleet, "w0", last_epoch=last_epoch)
    assert not first.session.ended.is_set()
    await first.run(reader.done)
    assert await reader == expected(request)
    let_time_pass(clock, fleet, 2.1)  # nothing is heard of the first any more
    second = LoopbackWorker(fleet, "w0")
    assert fleet.num_workers == 1 and first.session.ended.is_set() and not second.session.ended.is_set()


async def test_a_process_that_attaches_anew_takes_the_place_of_its_own_session(clock: FakeClock) -> None:
    """Its old stream was cut on its side alone."""
    fleet = make_fleet(clock)
    before = LoopbackWorker(fleet, "w0")
    request = make_request(fleet, [3], 20)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await before.turn()
    again = LoopbackWorker(fleet, "w0", last_epoch=before.session.epoch)
    assert before.session.end_cause is EndCause.CLOSED
    await again.run(reader.done)
    assert await reader == expected(request)
    assert fleet.num_workers == 1


async def test_a_worker_that_served_a_later_epoch_is_refused_before_it_is_given_a_request(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    request = make_request(fleet, [3], 20)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    with pytest.raises(StaleControlPlane, match="its store was replaced; restart the worker") as caught:
        LoopbackWorker(fleet, "w0", last_epoch=(7 << 32) | 1)
    assert status_of(caught.value) is grpc.StatusCode.FAILED_PRECONDITION  # which the worker does not try again
    assert fleet.num_workers == 0 and fleet.queue_snapshot().num_waiting == 1
    await LoopbackWorker(fleet, "w0").run(reader.done)
    assert await reader == expected(request)


async def test_a_worker_that_leaves_is_no_death_and_one_that_breaks_off_is(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    fleet.submit(make_request(fleet, [3], 20))
    [job] = fleet.parts.jobs.by_id.values()
    for num_deaths in (0, 1):
        worker = LoopbackWorker(fleet)
        await worker.turn()
        if num_deaths:
            worker.lose()
        else:
            worker.leave()
        assert len(job.deaths) == num_deaths


async def test_a_worker_that_sends_garbage_is_quarantined_and_its_requests_move_on(clock: FakeClock) -> None:
    fleet = make_fleet(clock, quarantine_s=5)
    bad = LoopbackWorker(fleet, "bad")
    request = make_request(fleet, [3], 20)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await bad.turn()
    await bad.receive()
    bad.answers[0].step_result.token_ids = (256).to_bytes(4, "little")  # outside the vocabulary
    bad.answer(1)
    assert fleet.num_workers == 0
    with pytest.raises(Unavailable, match="garbage"):
        LoopbackWorker(fleet, "bad")
    good = LoopbackWorker(fleet, "good")
    await good.run(reader.done)
    assert await reader == expected(request)
    clock.advance(5)
    LoopbackWorker(fleet, "bad")
    assert fleet.num_workers == 2


async def test_books_that_break_end_one_session_and_its_requests_move_on(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock)
    broken, other = LoopbackWorker(fleet, "w0"), LoopbackWorker(fleet, "w1")
    requests = [make_request(fleet, [i], 20) for i in range(4)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    await broken.turn()

    def fail(_now_s: float) -> None:
        raise AssertionError("the books do not balance")

    monkeypatch.setattr(broken.session.scheduler, "plan", fail)
    await broken.turn()
    assert broken.session.ended.is_set()
    await other.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]


async def test_tokens_accepted_before_the_books_broke_reach_their_streams(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock)
    broken = LoopbackWorker(fleet, "w0")
    requests = [make_request(fleet, [i], 20) for i in range(4)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    await broken.turn()
    register, calls = PrefixCache.register, []

    def break_at_the_third(cache: PrefixCache, sequence: Sequence, *, keep: bool) -> None:
        calls.append(sequence)
        assert len(calls) < 3, "the books do not balance"
        register(cache, sequence, keep=keep)

    monkeypatch.setattr(PrefixCache, "register", break_at_the_third)
    await broken.run(broken.session.ended.is_set)
    assert len(calls) == 3 and len({id(sequence.group) for sequence in calls}) == 3  # within one result
    monkeypatch.undo()
    other = LoopbackWorker(fleet, "w1")
    await other.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]


async def test_an_end_that_was_not_told_when_the_worker_was_lost_is_told_then(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    stream = fleet.submit(make_request(fleet, [1], 20, deadline_s=clock.now_s + 1))
    other = make_request(fleet, [2], 20)
    reader = asyncio.create_task(read_all(fleet.submit(other)))
    await worker.turn()
    clock.advance(1.5)
    worker.session.scheduler.plan(clock.now_s, max_steps=4)  # it ends the request; the fleet is told after it
    worker.lose()
    with pytest.raises(DeadlineExceeded):
        await read_all(stream)
    await LoopbackWorker(fleet, "w1").run(reader.done)
    assert await reader == expected(other)


# ---- readers ----


async def test_slow_reader_is_paused_and_goes_on_without_loss(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    request = make_request(fleet, [1], 700)
    stream = fleet.submit(request)
    for _ in range(400):
        await worker.turn()
    num_unread = stream.num_unread_tokens
    assert MAX_UNREAD_TOKENS <= num_unread <= MAX_UNREAD_TOKENS + 2
    assert worker.session.scheduler.stats().num_paused == 1
    tokens: list[int] = []
    while len(tokens) < 700:
        tokens += (await anext(stream)).token_ids
        for _ in range(400):
            await worker.turn()
    assert tokens == expected(request)
    assert_nothing_held(worker)


async def test_reader_that_never_reads_is_ended_and_frees_everything(clock: FakeClock) -> None:
    fleet = make_fleet(clock, slow_reader_timeout_s=30)
    worker = LoopbackWorker(fleet)
    stream = fleet.submit(make_request(fleet, [1], 700))
    other = make_request(fleet, [2], 40)
    assert (await run_all(worker, [fleet.submit(other)])) == [expected(other)]
    for _ in range(400):
        await worker.turn()
    for _ in range(30):
        clock.advance(1)
        worker.session.receive(heartbeat())
        fleet.tick()
    for _ in range(3):
        await worker.turn()
    assert_nothing_held(worker)
    with pytest.raises(SlowConsumer):
        await read_all(stream)


async def test_full_stream_stays_paused_on_the_worker_it_moves_to(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    first = LoopbackWorker(fleet, "w0")
    request = make_request(fleet, [1], 400)
    stream = fleet.submit(request)
    for _ in range(300):
        await first.turn()
    num_unread = stream.num_unread_tokens
    first.lose()
    second = LoopbackWorker(fleet, "w1")
    for _ in range(10):
        await second.turn()
    assert stream.num_unread_tokens == num_unread
    assert await run_all(second, [stream]) == [expected(request)]


async def test_cancelled_requests_free_blocks_and_slots(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapter = fleet.weights.add("a")
    streams = [fleet.submit(make_request(fleet, [i], 500, adapter)) for i in range(20)]  # 16 rows: 4 wait
    for _ in range(10):
        await worker.turn()
    for stream in streams:
        stream.cancel()
        stream.cancel()
        assert await read_all(stream) == []
    for _ in range(4):
        await worker.turn()
    assert_nothing_held(worker)
    await asyncio.wait_for(run_with(worker, fleet.retire(adapter.digest)), 10)
    assert worker.engine.slots.used_bytes() == 0
    assert fleet.placements(adapter.digest) == []


async def run_with(worker: LoopbackWorker, awaitable: Coroutine[None, None, None]) -> None:
    """Turn the worker until the coroutine is done."""
    task = asyncio.create_task(awaitable)
    await worker.run(task.done)
    await task


async def test_retire_waits_for_requests_that_use_the_adapter(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapter = fleet.weights.add("a")
    request = make_request(fleet, [1], 30, adapter)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    for _ in range(8):
        await worker.turn()
    assert fleet.placements(adapter.digest) == ["w0"]
    retired = asyncio.create_task(fleet.retire(adapter.digest))
    await worker.run(lambda: len(reader_tokens(reader)) == 30)
    await worker.run(retired.done)
    assert await reader == expected(request)
    assert not worker.session.scheduler.adapter_use(adapter.digest).is_held


async def test_retire_ends_when_another_name_wants_the_adapter(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapter = fleet.weights.add("a")
    request = make_request(fleet, [1], 30, adapter)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await worker.turn()
    retired = asyncio.create_task(fleet.retire(adapter.digest))
    await worker.turn()
    assert not retired.done()
    fleet.keep(adapter.digest)
    await asyncio.wait_for(retired, 5)
    assert not reader.done()
    await worker.run(reader.done)
    assert await reader == expected(request)


def reader_tokens(reader: asyncio.Task[list[int]]) -> list[int]:
    return reader.result() if reader.done() else []


# ---- bounds ----


async def test_full_queue_refuses_and_the_next_request_works(clock: FakeClock) -> None:
    fleet = make_fleet(clock, max_waiting_requests=3)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, max_rows=2))
    requests = [make_request(fleet, [i], 10) for i in range(5)]
    streams = [fleet.submit(request) for request in requests]  # 2 run, 3 wait
    with pytest.raises(QueueFull, match="3 requests wait"):
        fleet.submit(make_request(fleet, [9], 10))
    assert fleet.queue_snapshot().num_rejected == 1
    assert await run_all(worker, streams) == [expected(request) for request in requests]
    again = make_request(fleet, [9], 10)
    assert await run_all(worker, [fleet.submit(again)]) == [expected(again)]


async def test_a_refused_request_plans_nothing(clock: FakeClock) -> None:
    """A full queue that is asked time and again costs no session a look at its books."""
    fleet = make_fleet(clock, max_waiting_requests=3)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, max_rows=2))
    for index in range(5):
        fleet.submit(make_request(fleet, [index], 10))
    with pytest.raises(QueueFull):
        fleet.submit(make_request(fleet, [9], 10))  # plans those that came in this turn
    num_plans = 0
    plan = worker.session.scheduler.plan

    def counted(now_s: float, max_steps: int = 1) -> StepPlan | None:
        nonlocal num_plans
        num_plans += 1
        return plan(now_s, max_steps)

    worker.session.scheduler.plan = counted  # type: ignore[method-assign]  # to see whether it is asked
    for _ in range(10):
        with pytest.raises(QueueFull):
            fleet.submit(make_request(fleet, [9], 10))
    assert num_plans == 0


async def test_room_is_refused_as_a_request_would_be_and_takes_nothing(clock: FakeClock) -> None:
    limits = TenantLimits(max_running_requests=2, tokens_per_minute=60)
    fleet = make_fleet(clock, max_waiting_requests=3, tenants=TenantTable(default=limits))
    for _ in range(5):
        fleet.check_room("a", 50)
    with pytest.raises(QuotaTooSmall, match="tokens_per_minute 60"):
        fleet.check_room("a", 60)
    for _ in range(2):
        fleet.submit(make_request(fleet, [1], 5, tenant="a"))
    with pytest.raises(QuotaExceeded, match="max_running_requests"):
        fleet.check_room("a", 1)
    fleet.submit(make_request(fleet, [1], 5, tenant="b"))
    with pytest.raises(QueueFull):
        fleet.check_room("a", 1)
    fleet.check_room("c", 1)
    assert (fleet.queue_snapshot().num_requests, fleet.queue_snapshot().num_accepted) == (3, 3)
    await fleet.drain(0)
    with pytest.raises(Draining):
        fleet.check_room("c", 1)
    with pytest.raises(NoWorker):
        make_fleet(clock, worker_grace_s=0.0).check_room("a", 1)


async def test_a_request_that_placing_breaks_on_leaves_nothing_behind(clock: FakeClock) -> None:
    fleet = make_fleet(clock, tenants=TenantTable(default=TenantLimits(max_queued_tokens=10)))
    worker = LoopbackWorker(fleet)
    with pytest.raises(AssertionError, match="is over"):
        fleet.submit(make_request(fleet, [1] * 8, 1, generated_token_ids=(1,)))
    assert fleet.queue_snapshot().num_requests == 0
    (use,) = fleet.tenant_use()
    assert (use.num_requests, use.num_queued_tokens) == (0, 0)
    request = make_request(fleet, [1] * 8, 3)
    assert await run_all(worker, [fleet.submit(request)]) == [expected(request)]


@pytest.mark.parametrize("has_worker", [True, False])
async def test_a_tenant_that_keeps_the_queue_full_shuts_nobody_out(clock: FakeClock, *, has_worker: bool) -> None:
    fleet = make_fleet(clock, max_waiting_requests=12)
    if has_worker:
        LoopbackWorker(fleet, capacities=replace(CAPACITIES, max_rows=2))

    def flood(tenant: str) -> int:
        for num_taken in range(100):
            try:
                fleet.submit(make_request(fleet, [num_taken], 10, tenant=tenant))
            except QueueFull:
                return num_taken
        raise AssertionError("nobody is refused")

    assert flood("flooding") == 12 + 2 * has_worker
    assert flood("modest") == 6
    assert flood("third") == 4
    assert flood("flooding") == flood("modest") == 0
    for idx in range(20):
        flood(f"name {idx}")
    assert flood("one too many") == 0, "names have no end, the queue has"
    with pytest.raises(QueueFull, match=r"12 requests wait already.*6 of them are tenant modest's, whose share is 1"):
        fleet.submit(make_request(fleet, [1], 10, tenant="modest"))


@pytest.mark.parametrize("num_names", [1, 30])
async def test_invented_tenants_together_get_no_more_of_a_full_queue_than_one(clock: FakeClock, num_names: int) -> None:
    fleet = make_fleet(clock, max_waiting_requests=12, tenants=TenantTable({"named": TenantLimits()}))
    num_taken = dict.fromkeys(("ipv4:6.6.6.6", "ipv4:10.0.0.7", "named"), 0)
    for number in range(60):
        for host, tenant in (
            ("ipv4:6.6.6.6", f"invented {number % num_names}"),
            ("ipv4:10.0.0.7", "default"),
            ("ipv4:6.6.6.6", "named"),
        ):
            account = fleet.account_of(tenant, host)
            with contextlib.suppress(QueueFull):
                fleet.submit(make_request(fleet, [number], 10, tenant=tenant, charged_to=account))
                num_taken[account] += 1
    assert num_taken == dict.fromkeys(num_taken, 4)


@pytest.mark.parametrize("has_worker", [True, False])
async def test_the_queue_is_bounded_by_prompt_tokens_too(clock: FakeClock, *, has_worker: bool) -> None:
    fleet = make_fleet(clock, max_waiting_tokens=100)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, max_rows=2)) if has_worker else None
    streams = []

    def fill(tenant: str) -> int:
        for num_taken in range(100):
            try:
                streams.append(fleet.submit(make_request(fleet, [1] * 30, 10, tenant=tenant)))
            except QueueFull as error:
                assert "100 prompt tokens wait already" in str(error) and error.retry_after_s > 0
                return num_taken
        raise AssertionError("nobody is refused")

    assert fill("long") == 4
    assert fill("modest") == 2, "50 are its share: 30 are less, 60 are not"
    assert fill("third") == 2
    if worker is not None:
        await run_all(worker, streams)
        assert fill("long") == 4, "what runs or ran does not wait"


async def test_request_that_never_fits_names_the_numbers(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    waiting = fleet.submit(make_request(fleet, [1] * 100, 1000))
    LoopbackWorker(fleet, capacities=replace(CAPACITIES, num_blocks=100))
    with pytest.raises(ContextTooLong, match=r"100 tokens and max_tokens 1000.*275 KV blocks.*100") as caught:
        await read_all(waiting)
    assert caught.value.violations[0].field == "stopping.max_tokens"
    with pytest.raises(ContextTooLong):
        fleet.submit(make_request(fleet, [1] * 100, 1000))
    large = LoopbackWorker(fleet, "large", capacities=replace(CAPACITIES, num_blocks=1000))
    request = make_request(fleet, [1] * 100, 1000)
    assert await run_all(large, [fleet.submit(request)]) == [expected(request)]


async def test_request_runs_where_its_context_fits_and_is_never_cut(clock: FakeClock) -> None:
    """Of workers with different contexts the short one would have ended it early."""
    fleet = make_fleet(clock)
    short = LoopbackWorker(fleet, "a-short", capacities=replace(CAPACITIES, max_model_len=32))
    with pytest.raises(ContextTooLong, match=r"5 tokens and max_tokens 40: together .* context of 32 tokens"):
        fleet.submit(make_request(fleet, [1] * 5, 40))
    long = LoopbackWorker(fleet, "b-long", capacities=replace(CAPACITIES, max_model_len=64))
    assert [report.max_model_len for report in fleet.reports()] == [32, 64]
    assert [worker.max_model_len for worker in fleet.worker_snapshots()] == [32, 64]
    requests = [make_request(fleet, [1] * 5, 40), make_request(fleet, [2] * 5, 27)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    assert fleet.parts.jobs.by_id[requests[0].request_id].session is long.session
    await pass_time(clock, fleet, [short, long], 1.0)
    assert [reader.result() for reader in readers] == [expected(request) for request in requests]


async def test_adapter_that_does_not_fit_the_model_fails_for_good_with_the_reason(clock: FakeClock) -> None:
    """Not as "try again": no try will help. Waiting requests were admitted before a worker could tell."""
    fleet = make_fleet(clock)
    adapter = fleet.weights.add("a")
    waiting = fleet.submit(make_request(fleet, [1, 2], 5, adapter))
    workers = [LoopbackWorker(fleet, f"w{i}") for i in range(2)]
    for worker in workers:
        worker.engine.hash_slots.failing[adapter.digest] = AdapterMismatch("the model has no linear layers.9.up")
    reader = asyncio.create_task(read_all(waiting))
    await pass_time(clock, fleet, workers, 2.0)
    with pytest.raises(AdapterNotServed, match=f"adapter {adapter.digest[:12]}: the model has no linear layers.9.up"):
        await reader
    workers[1].engine.hash_slots.failing.clear()
    request = make_request(fleet, [1, 2], 5, adapter)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await pass_time(clock, fleet, workers, 2.0)
    assert reader.result() == expected(request)  # one of them can


async def test_adapter_larger_than_every_arena_is_refused(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    LoopbackWorker(fleet, capacities=replace(CAPACITIES, arena_bytes=100))
    adapter = fleet.weights.add("a")
    with pytest.raises(AdapterTooLarge, match=f"takes {adapter.arena_bytes} bytes, more than") as caught:
        fleet.submit(make_request(fleet, [1], 5, adapter))
    assert status_of(caught.value) is grpc.StatusCode.FAILED_PRECONDITION  # which no client tries again


async def test_deadline_ends_running_and_waiting_requests(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    unplaced = fleet.submit(make_request(fleet, [1], 500, deadline_s=clock() + 0.5))
    clock.advance(0.5)
    fleet.tick()
    assert unplaced.has_ended and fleet.queue_snapshot().num_requests == 0, "without a worker, too"
    with pytest.raises(DeadlineExceeded):
        await read_all(unplaced)
    worker = LoopbackWorker(fleet)
    stream = fleet.submit(make_request(fleet, [1], 500, deadline_s=clock() + 1))
    for _ in range(5):
        await worker.turn()
    clock.advance(1)
    fleet.tick()
    for _ in range(3):
        await worker.turn()
    with pytest.raises(DeadlineExceeded):
        await read_all(stream)
    assert_nothing_held(worker)


@pytest.mark.parametrize("has_run", [False, True])
async def test_a_scheduler_that_stalls_ends_its_session_and_its_requests_move_on(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_run: bool
) -> None:
    fleet = make_fleet(clock)
    stalled = LoopbackWorker(fleet, "w0")
    adapter = fleet.weights.add("a")
    stalled.engine.hash_slots.failing[adapter.digest] = True
    waiting = fleet.submit(make_request(fleet, [1], 3, adapter))
    await pass_time(clock, fleet, [stalled], 7.0)
    assert fleet.num_workers == 1  # loads that back off are under way
    waiting.cancel()
    request = make_request(fleet, [1, 2], 50)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    for _ in range(3 * has_run):
        await stalled.turn()
    monkeypatch.setattr(stalled.session.scheduler, "plan", lambda _now_s, _max_steps: None)  # the mistake
    while stalled.session.scheduler.stats().num_plans_in_flight:
        await stalled.turn()
    other = LoopbackWorker(fleet, "w1", capacities=replace(CAPACITIES, max_rows=1))
    for i in range(2):  # it is not idle: nothing is moved there before the session ends
        other.session.add(make_request(fleet, [i], 300))
    await pass_time(clock, fleet, [stalled, other], 4.9)
    assert fleet.num_workers == 2
    seen: list[bool] = []
    fleet.on_workers_changed(lambda: seen.append(fleet.num_workers > 0))
    await pass_time(clock, fleet, [stalled, other], 0.3)
    assert stalled.session.end_cause is EndCause.BROKEN_BOOKS and seen == [True], "another worker serves"
    [error] = [record for record in caplog.records if record.levelname == "ERROR"]
    told = "num_running=1" if has_run else "num_waiting=1"
    assert "stalled worker_id=w0" in error.getMessage() and told in error.getMessage()
    await other.run(reader.done)
    assert reader.result() == expected(request)
    other.leave()
    assert fleet.num_workers == 0


async def hang(clock: FakeClock, fleet: InspectedFleet, worker: LoopbackWorker, others: list[LoopbackWorker]) -> float:
    """Seconds until the session of a worker ends that computes for ever; its heartbeats go on."""
    start_s = clock()
    while not worker.session.ended.is_set():
        beat = plan_pb2.Heartbeat(step_id=worker.num_answered + 1, step_age_ms=int((clock() - start_s) * 1000))
        worker.session.receive(plan_pb2.AttachRequest(heartbeat=beat))
        await pass_time(clock, fleet, others, 0.1)
        assert clock() - start_s < 3600, "nobody notices"
    return clock() - start_s


async def test_a_step_that_hangs_while_heartbeats_go_on_ends_the_session_and_its_requests_move_on(
    clock: FakeClock,
) -> None:
    fleet = make_fleet(clock)
    hanging, other = LoopbackWorker(fleet, "w0"), LoopbackWorker(fleet, "w1")
    requests = [make_request(fleet, [i], 60) for i in range(6)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    for _ in range(10):
        await hanging.turn()
        await other.turn()
    await hanging.receive()
    assert await hang(clock, fleet, hanging, [other]) == pytest.approx(30.0, abs=0.2)
    assert hanging.session.end_cause is EndCause.HUNG_STEP
    assert "hangs: no result for 30" in hanging.session.end_reason
    await other.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]


async def test_the_first_steps_of_a_worker_may_take_longer(clock: FakeClock) -> None:
    fleet = make_fleet(clock, step_timeout_s=5.0, first_step_timeout_s=120.0)
    hanging = LoopbackWorker(fleet)
    fleet.submit(make_request(fleet, [1], 20))
    await hanging.receive()
    assert await hang(clock, fleet, hanging, []) == pytest.approx(120.0, abs=0.2)
    assert [len(job.deaths) for job in fleet.parts.jobs.by_id.values()] == [1]


async def test_a_load_that_hangs_ends_the_session_and_blames_no_request_that_runs(clock: FakeClock) -> None:
    fleet = make_fleet(clock, load_timeout_s=20.0)
    adapter = fleet.weights.add("a")
    hanging = LoopbackWorker(fleet, "w0")
    running = make_request(fleet, [1], MAX_UNREAD_TOKENS - 10)
    cold = make_request(fleet, [2], 20, adapter)
    streams = [fleet.submit(request) for request in (running, cold)]
    await asyncio.sleep(0)
    [load] = [m.load_adapter for m in hanging.session.take_outgoing() if m.HasField("load_adapter")]
    start_s = clock()
    while not hanging.session.ended.is_set():
        beat = plan_pb2.Heartbeat(step_id=1)
        age_ms = int((clock() - start_s) * 1000)
        beat.loads.add(slot=load.slot, generation=load.generation, age_ms=age_ms)
        hanging.session.receive(plan_pb2.AttachRequest(heartbeat=beat))
        let_time_pass(clock, fleet, 0.1)
    assert clock() - start_s == pytest.approx(20.0, abs=0.3)
    assert hanging.session.end_cause is EndCause.HUNG_LOAD
    assert not any(job.deaths for job in fleet.parts.jobs.by_id.values())
    other = LoopbackWorker(fleet, "w1")
    assert await run_all(other, streams) == [expected(running), expected(cold)]


async def test_an_adapter_whose_load_hangs_everywhere_is_given_up(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    adapter = fleet.weights.add("a")
    cold = fleet.submit(make_request(fleet, [2], 20, adapter))
    other = fleet.submit(make_request(fleet, [3], 20))
    for number in range(4):
        assert not cold.has_ended
        session = LoopbackWorker(fleet, f"w{number}").session
        session.hung_digest = adapter.digest
        session.end(EndCause.HUNG_LOAD, "the load hangs")
    with pytest.raises(AdapterLoadFailed):
        await read_all(cold)
    assert not other.has_ended


# ---- mistakes of ours ----


def break_stream(stream: JobStream, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    """Let these methods of a stream raise: the mistake of one request's own books."""

    def fail(*_: object) -> None:
        raise AssertionError("the stream's books do not balance")

    for name in names:
        monkeypatch.setattr(stream, name, fail)


@pytest.mark.parametrize("names", [("push_token",), ("push",), ("push", "push_token", "fail")])
async def test_a_mistake_at_one_requests_tokens_loses_no_others(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    requests = [make_request(fleet, [i], 30) for i in range(5)]
    streams = [fleet.submit(request) for request in requests]
    readers = [asyncio.create_task(read_all(stream)) for stream in streams]
    break_stream(streams[2], monkeypatch, names)
    others = readers[:2] + readers[3:]
    await worker.run(lambda: all(reader.done() for reader in others))
    assert [await reader for reader in others] == [expected(r) for r in requests[:2] + requests[3:]]
    assert fleet.queue_snapshot().num_requests == 0 and fleet.num_workers == 1
    for _ in range(3):
        await worker.turn()
    assert_nothing_held(worker)
    if "fail" in names:
        readers[2].cancel()
    else:
        with pytest.raises(MotetError, match="internal error") as caught:
            await readers[2]
        assert status_of(caught.value) is grpc.StatusCode.INTERNAL


async def test_a_mistake_in_one_part_of_a_tick_skips_no_other(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock, slow_reader_timeout_s=2.0)
    worker = LoopbackWorker(fleet)
    slow = fleet.submit(make_request(fleet, [1], 700))
    for _ in range(400):
        await worker.turn()
    large = [3] * 3000  # fits no worker that is attached, and waits for one
    monkeypatch.setattr(fleet.parts.dispatcher, "place", lambda _job: None)
    streams = [fleet.submit(make_request(fleet, large, 10, deadline_s=clock() + 1)) for _ in range(3)]
    break_stream(streams[0], monkeypatch, ("fail",))

    def fail() -> None:
        raise AssertionError("a mistake")

    for owner, name in (
        (fleet.parts.dispatcher, "clear_survivors"),
        (fleet.parts.rebalancer, "rebalance"),
        (worker.session, "tick"),
    ):
        monkeypatch.setattr(owner, name, fail)
    drained = asyncio.create_task(fleet.drain(3.0))
    let_time_pass(clock, fleet, 1.1)
    assert [stream.has_ended for stream in streams[1:]] == [True, True]
    let_time_pass(clock, fleet, 1.5)
    assert slow.has_ended
    await asyncio.wait_for(drained, 30)
    assert fleet.queue_snapshot().num_requests == 0


async def test_a_mistake_at_placing_one_request_loses_none_behind_it(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock)
    requests = [make_request(fleet, [i], 20) for i in range(4)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    place = fleet.parts.dispatcher.place

    def break_at_the_second(job: Job) -> MotetError | None:
        assert job.request is not requests[1], "a mistake"
        return place(job)

    monkeypatch.setattr(fleet.parts.dispatcher, "place", break_at_the_second)
    worker = LoopbackWorker(fleet)
    await worker.run(lambda: all(reader.done() for reader in readers))
    with pytest.raises(MotetError, match="internal error"):
        await readers[1]
    rest = [(requests[i], readers[i]) for i in (0, 2, 3)]
    assert [await reader for _, reader in rest] == [expected(request) for request, _ in rest]


async def test_a_mistake_when_a_session_ends_leaves_no_request_waiting_for_ever(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    readers = [asyncio.create_task(read_all(fleet.submit(make_request(fleet, [i], 20)))) for i in range(3)]
    await worker.turn()

    def fail() -> None:
        raise AssertionError("the books do not balance")

    monkeypatch.setattr(worker.session.scheduler, "drain_requests", fail)
    worker.lose()
    for reader in readers:
        with pytest.raises(MotetError, match="internal error"):
            await reader
    assert fleet.queue_snapshot().num_requests == 0 and fleet.num_workers == 0


async def test_a_mistake_at_ending_one_request_of_a_lost_worker_leaves_no_other_waiting_for_ever(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    readers = [asyncio.create_task(read_all(fleet.submit(make_request(fleet, [i], 20)))) for i in range(3)]
    await worker.turn()
    monkeypatch.setattr(worker.session.scheduler, "drain_requests", list)  # so none of them can go on
    num_calls = 0

    def fail(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        raise AssertionError("a mistake")

    monkeypatch.setattr(fleet.parts.jobs, "fail", fail)
    worker.lose()
    assert num_calls == 1
    for reader in readers:
        with pytest.raises(MotetError, match="internal error"):
            await reader
    assert fleet.queue_snapshot().num_requests == 0 and fleet.num_workers == 0


async def test_a_mistake_at_judging_suspects_keeps_no_request_of_a_lost_worker(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    requests = [make_request(fleet, [i], 20) for i in range(3)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    await worker.turn()

    def fail() -> None:
        raise AssertionError("a mistake")

    monkeypatch.setattr(fleet.parts.dispatcher, "clear_survivors", fail)
    worker.lose()
    other = LoopbackWorker(fleet, "w1")
    await other.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    assert fleet.num_workers == 1, "the mistake is not that session's"


async def test_what_a_worker_says_stands_in_one_line_of_the_log_and_is_cut_off(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fleet = make_fleet(clock)
    text = "it broke\nERROR forged line \x1b[31m" + "x" * 10_000
    for kind in ("fault", "leave"):
        worker = LoopbackWorker(fleet, kind)
        message = plan_pb2.AttachRequest()
        getattr(message, kind).reason = text
        worker.session.receive(message)
    loader = LoopbackWorker(fleet, "loader")
    stream = fleet.submit(make_request(fleet, [1], 3, fleet.weights.add("a")))
    loader.session.pump()
    [load] = [m.load_adapter for m in loader.session.take_outgoing() if m.WhichOneof("message") == "load_adapter"]
    failed = loader.slot_state(load.slot, load.generation, plan_pb2.SlotState.STATE_FAILED)
    failed.slot_state.reason, failed.slot_state.mismatch = text, True
    loader.session.receive(failed)
    with pytest.raises(AdapterNotServed) as caught:
        await read_all(stream)
    lines = [record.getMessage() for record in caplog.records]
    for told in ("fault in step 0", "the worker left", "adapter load failed"):
        assert any(told in line and "it broke\\nERROR forged line \\x1b[31mxxx" in line for line in lines), told
    assert all("\n" not in line and len(line) < 600 for line in [*lines, str(caught.value)])


async def test_pin_holds_on_every_worker_until_it_is_taken_back(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    small = replace(CAPACITIES, num_slots=2)
    workers = [LoopbackWorker(fleet, "w0", capacities=small)]
    pinned, *others = (fleet.weights.add(name) for name in "abc")
    fleet.pin(pinned.digest)
    workers.append(LoopbackWorker(fleet, "w1", capacities=small))  # attached after the pin

    async def use(adapter: AdapterRef) -> None:
        """One request with the adapter on each worker."""
        for worker in workers:
            worker.session.add(make_request(fleet, [1], 1, adapter))
            await worker.run(lambda: len(worker.session.scheduler.request_ids) == 0)  # noqa: B023 - awaited here

    for adapter in (pinned, *others):
        await use(adapter)
    assert fleet.placements(pinned.digest) == ["w0", "w1"]
    fleet.unpin(pinned.digest)  # no request with the adapter follows
    for adapter in others:
        await use(adapter)
    assert fleet.placements(pinned.digest) == []


async def test_what_pinned_adapters_leave_no_room_for_is_told_at_once(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, num_slots=1))
    pinned, other = (fleet.weights.add(name) for name in "ab")
    fleet.pin(pinned.digest)
    await run_all(worker, [fleet.submit(make_request(fleet, [1], 2, pinned))])
    stream = fleet.submit(make_request(fleet, [1], 2, other))
    await asyncio.sleep(0)  # the pump: nothing is sent, nothing will be answered
    with pytest.raises(AdapterLoadFailed):
        async with asyncio.timeout(10):
            await read_all(stream)


async def test_store_that_is_away_for_five_seconds_only_delays(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapter = fleet.weights.add("a")
    worker.engine.hash_slots.failing[adapter.digest] = True
    request = make_request(fleet, [1, 2], 5, adapter)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await pass_time(clock, fleet, [worker], 5.0)
    assert not reader.done()
    assert worker.num_answered == 5  # loads, at 0, 0.25, 0.75, 1.75 and 3.75 s
    worker.engine.hash_slots.failing.clear()
    await pass_time(clock, fleet, [worker], 2.0)
    assert reader.done() and reader.result() == expected(request)


async def test_adapter_that_one_worker_cannot_load_is_tried_on_another(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    workers = [LoopbackWorker(fleet, f"w{i}") for i in range(3)]
    adapter = fleet.weights.add("a")
    for worker in workers[:2]:
        worker.engine.hash_slots.failing[adapter.digest] = False
    request = make_request(fleet, [1, 2], 5, adapter)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await pass_time(clock, fleet, workers, 1.5)
    assert reader.done() and reader.result() == expected(request)
    assert fleet.placements(adapter.digest) == ["w2"]
    assert fleet.queue_snapshot().num_requests == 0


async def test_adapter_that_no_worker_can_load_fails_after_one_try_on_each(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    workers = [LoopbackWorker(fleet, f"w{i}") for i in range(6)]
    adapter = fleet.weights.add("a")
    for worker in workers:
        worker.engine.hash_slots.failing[adapter.digest] = False
    for num_attached in (6, 2):  # the limit of migrations first, then too few workers
        for worker in workers[num_attached:]:
            worker.lose()
        before = sum(worker.num_answered for worker in workers)
        reader = asyncio.create_task(read_all(fleet.submit(make_request(fleet, [1, 2], 5, adapter))))
        await pass_time(clock, fleet, workers[:num_attached], 2.0)
        with pytest.raises(AdapterLoadFailed):
            await reader
        assert sum(worker.num_answered for worker in workers) - before == min(num_attached, 4)


async def test_damaged_weights_are_told_as_what_they_are_without_a_wait(clock: FakeClock) -> None:
    """A worker is told that nothing helps, and the client what does: it took 47 s to be told to try again."""
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapter = fleet.weights.add("a")
    fleet.weights.damaged.add(adapter.digest)
    worker.engine.hash_slots.failing[adapter.digest] = False  # as FetchAdapter's DATA_LOSS makes it
    before_s = clock.now_s
    reader = asyncio.create_task(read_all(fleet.submit(make_request(fleet, [1, 2], 5, adapter))))
    await worker.run(reader.done)
    assert clock.now_s == before_s and worker.num_answered == 1
    with pytest.raises(AdapterDamaged):
        await reader


async def test_levelling_passes_over_what_failed_on_the_idle_worker(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    small = replace(CAPACITIES, max_rows=1)
    first = LoopbackWorker(fleet, "w0", capacities=small)
    adapter = fleet.weights.add("a")
    requests = [make_request(fleet, [i], 200) for i in range(6)] + [make_request(fleet, [99], 200, adapter)]
    for request in requests:
        fleet.submit(request)
    await first.turn()
    idle = LoopbackWorker(fleet, "w1", capacities=small)
    fleet.parts.jobs.by_id[requests[-1].request_id].failed_load_epochs.add(idle.session.epoch)
    fleet.tick()
    assert requests[-1].request_id in first.session.scheduler.request_ids
    assert set(idle.session.scheduler.request_ids) == {requests[-2].request_id}


async def test_tokens_from_before_a_failed_reload_are_kept_elsewhere(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    first = LoopbackWorker(fleet, "w0", capacities=replace(CAPACITIES, num_slots=1))
    adapter, other = (fleet.weights.add(name) for name in "ab")
    request = make_request(fleet, [1, 2], MAX_UNREAD_TOKENS + 50, adapter)
    stream = fleet.submit(request)
    await first.run(lambda: first.session.scheduler.stats().num_paused == 1)  # nobody reads
    assert await run_all(first, [fleet.submit(make_request(fleet, [3], 2, other))])  # takes the slot away
    assert fleet.placements(adapter.digest) == []
    second = LoopbackWorker(fleet, "w1")
    first.engine.hash_slots.failing[adapter.digest] = False
    reader = asyncio.create_task(read_all(stream))
    await first.run(lambda: len(first.session.scheduler.request_ids) == 0)
    await second.run(reader.done)
    assert reader.result() == expected(request)


async def test_drain_lets_requests_finish_and_takes_no_more(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    request = make_request(fleet, [1], 30)
    stream = fleet.submit(request)
    drained = asyncio.create_task(fleet.drain(10))
    await asyncio.sleep(0)
    with pytest.raises(Draining):
        fleet.submit(make_request(fleet, [1], 5))
    assert await run_all(worker, [stream]) == [expected(request)]
    await drained


async def test_drain_ends_what_is_left_after_its_time(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    stream = fleet.submit(make_request(fleet, [1], 900))
    drained = asyncio.create_task(fleet.drain(10))
    for _ in range(5):
        await worker.turn()
    clock.advance(10)
    worker.session.receive(heartbeat())
    fleet.tick()
    await drained
    with pytest.raises(Draining):
        await read_all(stream)
    await fleet.close()
    assert worker.session.end_cause is EndCause.CLOSED


async def test_requests_go_to_the_worker_that_holds_the_adapter_unless_it_is_busier(clock: FakeClock) -> None:
    fleet = make_fleet(clock, placement=PlacementCosts(load_ms=10.0))
    workers = {name: LoopbackWorker(fleet, name) for name in ("w0", "w1")}
    adapter = fleet.weights.add("a")
    first = fleet.submit(make_request(fleet, [0], 5))  # w0: equal cost goes to the lower id
    request = make_request(fleet, [1], 5, adapter)
    assert await run_all(workers["w1"], [fleet.submit(request)]) == [expected(request)]
    assert fleet.placements(adapter.digest) == ["w1"]
    await run_all(workers["w0"], [first])
    for i in range(8):
        fleet.submit(make_request(fleet, [i], 50, adapter))
    unfinished = {name: len(worker.session.scheduler.request_ids) for name, worker in workers.items()}
    # A request of 50 steps of 1 ms is 3.1 ms to the next one on 16 rows: the load is worth a little more than three.
    assert unfinished == {"w0": 2, "w1": 6}


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("model_fingerprint", "0" * 64, "checkpoint"),
        ("dtype", "bfloat16", "dtype"),
        ("vocab_size", 255, "logits"),
        ("num_blocks", 0, "num_blocks"),
        ("num_blocks", 2**24 + 1, "16777217 is not in 1..16777216"),
        ("max_rows", 2**16 + 1, "65537 is not in 1..65536"),
        ("max_step_tokens", 2**20 + 1, "1048577 is not in 1..1048576"),
        ("num_slots", 2**16 + 1, "65537 is not in 1..65536"),
        ("num_host_blocks", 2**21 + 1, "2097153 is not in 0..2097152"),
        ("device", "x" * 129, "129 characters; at most 128"),
        ("protocol_min", 3, "protocol"),
        ("worker_id", "../w", "worker_id"),
    ],
)
async def test_worker_that_does_not_match_is_refused(clock: FakeClock, field: str, value: object, match: str) -> None:
    fleet = make_fleet(clock)
    hello = encode_hello(CAPACITIES, "w0").hello
    setattr(hello, field, value)
    if field == "protocol_min":
        hello.protocol_max = 3
    with pytest.raises(MotetError, match=match):
        fleet.attach(hello)
    assert fleet.num_workers == 0


async def test_a_session_takes_no_memory_for_what_its_worker_only_claims(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    hello = encode_hello(CAPACITIES, "w0").hello
    for name, (_, highest) in BOUNDS.items():
        setattr(hello, name, highest)
    hello.vocab_size = CAPACITIES.vocab_size
    tracemalloc.start()
    try:
        fleet.attach(hello)
        size = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size < 300_000


def heartbeat() -> plan_pb2.AttachRequest:
    return plan_pb2.AttachRequest(heartbeat=plan_pb2.Heartbeat(num_steps=1))


def encode_stale_result(worker: LoopbackWorker) -> plan_pb2.AttachRequest:
    return plan_pb2.AttachRequest(step_result=plan_pb2.StepResult(step_id=1, epoch=worker.session.epoch))


async def test_quotas_are_charged_at_submit_and_given_back_at_every_end(clock: FakeClock) -> None:
    table = TenantTable({"a": TenantLimits(weight=2.0, max_running_requests=2, max_queued_tokens=6)})
    fleet = make_fleet(clock, tenants=table)
    worker = LoopbackWorker(fleet)
    with pytest.raises(ContextTooLong):
        fleet.submit(make_request(fleet, [1] * 5, 10_000, tenant="a"))
    first = fleet.submit(make_request(fleet, [1, 2, 3], 4, tenant="a"))
    second = fleet.submit(make_request(fleet, [1, 2, 4], 4, tenant="a"))
    with pytest.raises(QuotaExceeded) as caught:
        fleet.submit(make_request(fleet, [1], 4, tenant="a"))
    assert (caught.value.quota, status_of(caught.value)) == (
        "max_running_requests",
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
    assert fleet.tenant_use()[0].num_queued_tokens == 6
    await run_all(worker, [first])
    second.cancel()
    (use,) = fleet.tenant_use()
    assert (use.tenant, use.num_requests, use.num_queued_tokens) == ("a", 0, 0)
    assert (use.num_accepted, use.num_rejected, use.num_input_tokens) == (2, 1, 6)
    assert 4 <= use.num_generated_tokens <= 8
    probes = [SchedulerProbe(w.session.scheduler) for w in (worker, LoopbackWorker(fleet, "w1"))]
    assert probes[0].service_of("a") == probes[1].service_of("a") > 0, "one account of a tenant over all workers"


@pytest.mark.parametrize("num_turns", [None, 0, 4])
async def test_a_cancelled_request_gives_its_quota_back(clock: FakeClock, num_turns: int | None) -> None:
    """Without a worker, before its first plan, and while it runs."""
    limits = TenantLimits(max_running_requests=1, max_queued_tokens=3, tokens_per_minute=103)
    table = TenantTable({"a": limits})
    fleet = make_fleet(clock, tenants=table)
    worker = None if num_turns is None else LoopbackWorker(fleet)
    stream = fleet.submit(make_request(fleet, [1, 2, 3], 100, tenant="a"))
    for _ in range(num_turns or 0):
        assert worker is not None
        await worker.turn()
    with pytest.raises(QuotaExceeded):
        fleet.submit(make_request(fleet, [1], 1, tenant="a"))
    stream.cancel()
    (use,) = fleet.tenant_use()
    assert (use.num_requests, use.num_queued_tokens) == (0, 0)
    assert use.tokens_left == 100 - use.num_generated_tokens, "what it may still have generated"
    assert (use.num_generated_tokens > 0) == bool(num_turns)
    clock.advance(60.0)
    fleet.submit(make_request(fleet, [1, 2, 3], 100, tenant="a"))


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"num_samples": 17}, "decoding.best_of"), ({"beam": BeamSearch(17)}, "decoding.beam_search.width")],
)
async def test_more_answers_than_a_worker_has_rows_are_refused(
    clock: FakeClock, fields: dict[str, object], field: str
) -> None:
    fleet = make_fleet(clock)
    LoopbackWorker(fleet)
    with pytest.raises(InvalidRequest) as caught:
        fleet.submit(make_request(fleet, [1, 2], 4, **fields))
    assert caught.value.violations[0].field == field
    assert all(part in str(caught.value) for part in ("17 sequences", "16 rows", "--max-rows"))
    assert fleet.queue_snapshot().num_requests == 0 and fleet.tenant_use()[0].num_requests == 0
