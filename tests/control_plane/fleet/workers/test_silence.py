"""Peers that are silent, and a control plane that was asleep itself."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.errors import (
    DeadlineExceeded,
)
from tests.fakes.fleet_rig import (
    FakeClock,
    LoopbackWorker,
    expected,
    let_time_pass,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.fleet_steps import encode_stale_result, heartbeat, run_all


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
    silent.reply()
    await other.run(reader.done)
    assert await reader == expected(request)
    # The stopped worker comes back with a result of its old epoch: it is dropped.
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
        for message in LoopbackWorker(fleet).session.outbox.take()
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
    pings = [m.ping.sequence for m in worker.session.outbox.take() if m.WhichOneof("message") == "ping"]
    assert pings == list(range(1, len(pings) + 1))
    assert 6 <= len(pings) <= 7  # the first came with the welcome
