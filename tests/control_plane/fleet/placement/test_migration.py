"""Requests of a worker that is lost, leaves or fails go on at another one without losing or repeating a token."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.errors import (
    DeadlineExceeded,
    NoWorker,
    Unavailable,
    WorkerLost,
)
from control_plane.scheduler.memory.prefix_cache import PrefixCache
from control_plane.scheduler.requests.sequence import Row
from tests.fakes.fleet_rig import (
    FakeClock,
    LoopbackWorker,
    expected,
    let_time_pass,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.fleet_steps import assert_nothing_held


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
    bad.results[0].step_result.token_ids = (256).to_bytes(4, "little")  # outside the vocabulary
    bad.reply(1)
    assert fleet.num_workers == 0
    with pytest.raises(Unavailable, match="garbage"):
        LoopbackWorker(fleet, "bad")
    good = LoopbackWorker(fleet, "good")
    await good.run(reader.done)
    assert await reader == expected(request)
    clock.advance(5)
    LoopbackWorker(fleet, "bad")
    assert fleet.num_workers == 2


async def test_an_inconsistent_scheduler_ends_one_session_and_its_requests_move_on(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock)
    broken, other = LoopbackWorker(fleet, "w0"), LoopbackWorker(fleet, "w1")
    requests = [make_request(fleet, [i], 20) for i in range(4)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    await broken.turn()

    def fail(_now_s: float) -> None:
        raise AssertionError("the state is inconsistent")

    monkeypatch.setattr(broken.session.scheduler, "plan", fail)
    await broken.turn()
    assert broken.session.ended.is_set()
    await other.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]


async def test_tokens_accepted_before_an_inconsistency_reach_their_streams(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock)
    broken = LoopbackWorker(fleet, "w0")
    requests = [make_request(fleet, [i], 20) for i in range(4)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    await broken.turn()
    register, calls = PrefixCache.register, []

    def break_at_the_third(cache: PrefixCache, row: Row, *, keep: bool) -> None:
        calls.append(row.sequence)
        assert len(calls) < 3, "the state is inconsistent"
        register(cache, row, keep=keep)

    monkeypatch.setattr(PrefixCache, "register", break_at_the_third)
    await broken.run(broken.session.ended.is_set)
    assert len(calls) == 3 and len({id(sequence.group) for sequence in calls}) == 3  # within one result
    monkeypatch.undo()
    other = LoopbackWorker(fleet, "w1")
    await other.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]


async def test_an_end_that_was_not_reported_when_the_worker_was_lost_is_reported_then(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    stream = fleet.submit(make_request(fleet, [1], 20, deadline_s=clock.now_s + 1))
    other = make_request(fleet, [2], 20)
    reader = asyncio.create_task(read_all(fleet.submit(other)))
    await worker.turn()
    clock.advance(1.5)
    worker.session.scheduler.plan(clock.now_s, max_steps=4)  # it ends the request; the fleet gets that after it
    worker.lose()
    with pytest.raises(DeadlineExceeded):
        await read_all(stream)
    await LoopbackWorker(fleet, "w1").run(reader.done)
    assert await reader == expected(other)
