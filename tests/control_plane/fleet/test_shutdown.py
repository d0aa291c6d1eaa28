"""The end: requests may finish, and what is left is ended."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.errors import ShuttingDown
from control_plane.fleet.workers.endings import EndCause
from tests.fakes.fleet_rig import (
    FakeClock,
    LoopbackWorker,
    expected,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.fleet_steps import heartbeat, run_all


async def test_a_shutdown_lets_requests_finish_and_takes_no_more(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    request = make_request(fleet, [1], 30)
    stream = fleet.submit(request)
    ended = asyncio.create_task(fleet.shut_down(10))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        fleet.submit(make_request(fleet, [1], 5))
    assert await run_all(worker, [stream]) == [expected(request)]
    await ended


async def test_a_shutdown_ends_what_is_left_after_its_time(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    stream = fleet.submit(make_request(fleet, [1], 900))
    ended = asyncio.create_task(fleet.shut_down(10))
    for _ in range(5):
        await worker.turn()
    clock.advance(10)
    worker.session.receive(heartbeat())
    fleet.tick()
    await ended
    with pytest.raises(ShuttingDown):
        await read_all(stream)
    await fleet.close()
    assert worker.session.end_cause is EndCause.CLOSED
