"""How much work there is for workers, and how long requests wait for one where an autoscaler starts them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.errors import DeadlineExceeded, NoWorker, QueueFull, WorkerLost
from control_plane.fleet.workload import Workload
from tests.fakes.fleet_rig import (
    CAPACITIES,
    FakeClock,
    LoopbackWorker,
    expected,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.fleet_steps import pass_time, run_all

START_S = 60.0


async def test_a_fleet_without_requests_needs_no_worker(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    assert fleet.workload.now() == Workload(0, 0, 0, 0, 0.0, 0.0)
    assert fleet.workload.now().needed_workers(1.0) == 0 and not fleet.workload.is_active
    LoopbackWorker(fleet)
    assert fleet.workload.now() == Workload(0, 0, 1, 0, CAPACITIES.max_rows, 0.0)
    assert fleet.workload.now().needed_workers(1.0) == 0


async def test_a_waiting_request_needs_one_worker_before_any_worker_has_been_there(clock: FakeClock) -> None:
    fleet = make_fleet(clock, worker_start_s=START_S)
    for index in range(40):
        fleet.submit(make_request(fleet, [index], 4))
    workload = fleet.workload.now()
    assert (workload.num_requests, workload.num_waiting, workload.num_rows_requested) == (40, 40, 40)
    assert workload.needed_workers(0.8) == 1 and fleet.workload.is_active


async def test_rows_say_how_many_workers_requests_fill_also_after_the_last_worker_left(clock: FakeClock) -> None:
    fleet = make_fleet(clock, worker_start_s=START_S)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, max_rows=4))
    streams = [fleet.submit(make_request(fleet, [index], 4)) for index in range(6)]
    await worker.turn()
    workload = fleet.workload.now()
    assert (workload.num_requests, workload.num_waiting, workload.num_rows_requested) == (6, 2, 6)
    assert workload.rows_per_worker == 4
    assert (workload.needed_workers(1.0), workload.needed_workers(0.5)) == (1.5, 3.0)
    worker.lose()
    assert fleet.workload.now().needed_workers(1.0) == 1.5 and fleet.workload.now().num_waiting == 6
    await run_all(LoopbackWorker(fleet), streams)
    assert fleet.workload.now().needed_workers(1.0) == 0


async def test_kv_blocks_count_where_they_are_shorter_than_rows(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, num_blocks=20, max_rows=16))
    stream = fleet.submit(make_request(fleet, list(range(48)), 20))
    await worker.turn()
    workload = fleet.workload.now()
    assert workload.full_workers >= 12 / 20 > workload.num_rows_requested / workload.rows_per_worker
    assert workload.needed_workers(0.5) == workload.full_workers / 0.5
    await run_all(worker, [stream])


async def test_requests_are_served_when_workers_are_started_for_them(clock: FakeClock) -> None:
    """Readiness and health: with an autoscaler no worker is needed for requests to be sent."""
    assert not make_fleet(clock).workload.is_served
    fleet = make_fleet(clock, worker_start_s=START_S)
    assert fleet.workload.is_served
    plain = make_fleet(clock)
    LoopbackWorker(plain)
    assert plain.workload.is_served


async def test_the_first_request_waits_for_a_worker_that_is_started_however_long_none_was_there(
    clock: FakeClock,
) -> None:
    fleet = make_fleet(clock, worker_grace_s=5, worker_start_s=START_S)
    await pass_time(clock, fleet, [], 20)  # far beyond the grace of those that have no autoscaler
    request = make_request(fleet, [1], 10)
    stream = fleet.submit(request)
    await pass_time(clock, fleet, [], START_S - 1)
    assert not stream.has_ended
    assert await run_all(LoopbackWorker(fleet), [stream]) == [expected(request)]


async def test_each_request_waits_for_its_own_time(clock: FakeClock) -> None:
    fleet = make_fleet(clock, worker_start_s=START_S)
    first = fleet.submit(make_request(fleet, [1], 10))
    await pass_time(clock, fleet, [], 40)
    request = make_request(fleet, [2], 10)
    second = fleet.submit(request)
    await pass_time(clock, fleet, [], START_S - 39)
    with pytest.raises(NoWorker, match="no worker took requests for 60 s"):
        await read_all(first)
    assert not second.has_ended
    third = fleet.submit(make_request(fleet, [3], 10))  # not refused: it may be what makes a worker start
    assert await run_all(LoopbackWorker(fleet), [second, third]) == [
        expected(request),
        expected(make_request(fleet, [3], 10)),
    ]


async def test_a_deadline_and_the_queue_bound_the_wait(clock: FakeClock) -> None:
    fleet = make_fleet(clock, worker_start_s=START_S, max_waiting_requests=2)
    short = fleet.submit(make_request(fleet, [1], 10, deadline_s=clock() + 5))
    fleet.submit(make_request(fleet, [2], 10))
    with pytest.raises(QueueFull, match="2 requests wait"):
        fleet.submit(make_request(fleet, [3], 10))
    await pass_time(clock, fleet, [], 6)
    with pytest.raises(DeadlineExceeded):
        await read_all(short)


async def test_a_request_that_lost_its_worker_waits_from_then_on(clock: FakeClock) -> None:
    fleet = make_fleet(clock, worker_start_s=10)
    worker = LoopbackWorker(fleet)
    stream = fleet.submit(make_request(fleet, [1], 900))
    await pass_time(clock, fleet, [worker], 10)  # it has been there for as long as a request may wait
    worker.lose()
    await pass_time(clock, fleet, [], 9)
    assert not stream.has_ended
    await pass_time(clock, fleet, [], 2)
    with pytest.raises(WorkerLost, match="no worker took requests for 10 s"):
        await read_all(stream)


async def test_a_sleep_of_the_control_plane_does_not_use_up_the_time_to_start_a_worker(clock: FakeClock) -> None:
    fleet = make_fleet(clock, worker_start_s=START_S)
    await pass_time(clock, fleet, [], 100)
    stream = fleet.submit(make_request(fleet, [1], 10))
    clock.advance(10 * START_S)
    fleet.tick()
    assert not stream.has_ended


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
async def test_a_time_to_start_that_is_none_is_refused(clock: FakeClock, seconds: float) -> None:
    with pytest.raises(ValueError, match=r"worker_start_s: .* is not above 0"):
        make_fleet(clock, worker_start_s=seconds)
