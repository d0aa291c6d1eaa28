"""Requests whose readers are behind are paused, and end if nothing is read."""

from __future__ import annotations

import pytest

from control_plane.errors import (
    SlowConsumer,
)
from control_plane.fleet.requests.streams import MAX_UNREAD_TOKENS
from tests.fakes.fleet_rig import (
    FakeClock,
    LoopbackWorker,
    expected,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.fleet_steps import assert_nothing_held, heartbeat, run_all


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
