"""Workers that an operator drains: their requests move, and they get no others until they are undrained."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.errors import LastWorker, NoWorker, WorkerNotFound
from control_plane.fleet.workers.endings import EndCause
from tests.fakes.fleet_rig import (
    FakeClock,
    LoopbackWorker,
    expected,
    let_time_pass,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.fleet_steps import assert_nothing_held, run_all


async def test_requests_of_a_drained_worker_go_on_elsewhere_and_it_gets_no_others(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    first, second = LoopbackWorker(fleet, "w0"), LoopbackWorker(fleet, "w1")
    adapter = fleet.weights.add("a")
    requests = [make_request(fleet, [i, 9], 50, adapter if i % 2 else None) for i in range(12)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    for _ in range(15):
        await first.turn()
        await second.turn()
    assert fleet.drains.drain("w0") == 6
    assert first.session.end_cause is EndCause.DRAINED
    assert fleet.drains.drain("w0") == 0, "a repeated call changes nothing"
    again = LoopbackWorker(fleet, "w0")
    requests += [make_request(fleet, [i, 8], 20, adapter if i % 2 else None) for i in range(8)]
    readers += [asyncio.create_task(read_all(fleet.submit(request))) for request in requests[12:]]
    await second.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    assert fleet.queue_snapshot().num_migrated == 6
    assert fleet.drains.worker_ids == ["w0"]
    assert again.session.snapshot().num_plans == 0
    assert_nothing_held(second)


async def test_an_undrained_worker_gets_requests_again(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    LoopbackWorker(fleet, "w0")
    changes: list[int] = []
    fleet.drains.drain("w0", is_forced=True)
    again = LoopbackWorker(fleet, "w0")
    fleet.on_workers_changed(lambda: changes.append(fleet.num_workers))
    assert fleet.num_workers == 0
    request = make_request(fleet, [1], 10)
    stream = fleet.submit(request)
    assert fleet.queue_snapshot().num_waiting == 1
    fleet.drains.undrain("w0")
    assert changes == [1] and fleet.drains.worker_ids == []
    assert await run_all(again, [stream]) == [expected(request)]
    fleet.drains.undrain("w0")


async def test_the_last_worker_is_drained_by_force_only(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    LoopbackWorker(fleet, "w0")
    LoopbackWorker(fleet, "w1")
    fleet.drains.drain("w1")
    with pytest.raises(LastWorker, match="no worker but w0 takes requests"):
        fleet.drains.drain("w0")
    assert fleet.drains.worker_ids == ["w1"]


async def test_the_grace_without_workers_begins_when_the_last_one_is_drained(clock: FakeClock) -> None:
    fleet = make_fleet(clock, worker_grace_s=30)
    LoopbackWorker(fleet, "w0")
    reader = asyncio.create_task(read_all(fleet.submit(make_request(fleet, [1], 10))))
    fleet.drains.drain("w0", is_forced=True)
    LoopbackWorker(fleet, "w0")
    let_time_pass(clock, fleet, 29)
    assert fleet.worker_snapshots() == [], "it fell silent; it took no requests anyway"
    assert not reader.done()
    let_time_pass(clock, fleet, 2)
    with pytest.raises(NoWorker, match="no worker took requests for 30 s"):
        await reader
    with pytest.raises(NoWorker):
        fleet.submit(make_request(fleet, [1], 10))


async def test_workers_that_are_not_there_are_named_with_those_that_are(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    with pytest.raises(WorkerNotFound, match="no worker w9 is attached; those that are: none"):
        fleet.drains.drain("w9")
    LoopbackWorker(fleet, "w0")
    LoopbackWorker(fleet, "w1").leave()
    with pytest.raises(WorkerNotFound, match=r"those that are: w0$"):
        fleet.drains.drain("w1")
    with pytest.raises(WorkerNotFound, match="no worker w1 is attached or drained"):
        fleet.drains.undrain("w1")


async def test_a_drained_worker_that_left_may_be_undrained_before_it_is_back(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    LoopbackWorker(fleet, "w0")
    second = LoopbackWorker(fleet, "w1")
    fleet.drains.drain("w0")
    LoopbackWorker(fleet, "w0").leave()
    assert fleet.drains.worker_ids == ["w0"]
    fleet.drains.undrain("w0")
    second.leave()
    worker = LoopbackWorker(fleet, "w0")
    request = make_request(fleet, [1], 10)
    assert await run_all(worker, [fleet.submit(request)]) == [expected(request)]
