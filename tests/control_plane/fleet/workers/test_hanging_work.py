"""A scheduler that stalls, and steps and loads that a worker does not bring to an end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from contract.v1 import plan_pb2
from control_plane.errors import (
    AdapterLoadFailed,
)
from control_plane.fleet.requests.streams import MAX_UNREAD_TOKENS
from control_plane.fleet.workers.endings import EndCause
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
from tests.fakes.fleet_steps import pass_time, run_all


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
    assert stalled.session.end_cause is EndCause.INTERNAL_ERROR and seen == [True], "another worker serves"
    [error] = [record for record in caplog.records if record.levelname == "ERROR"]
    shown = "num_running=1" if has_run else "num_waiting=1"
    assert "stalled worker_id=w0" in error.getMessage() and shown in error.getMessage()
    await other.run(reader.done)
    assert reader.result() == expected(request)
    other.leave()
    assert fleet.num_workers == 0


async def hang(clock: FakeClock, fleet: InspectedFleet, worker: LoopbackWorker, others: list[LoopbackWorker]) -> float:
    """Seconds until the session of a worker ends that computes for ever; its heartbeats go on."""
    start_s = clock()
    while not worker.session.ended.is_set():
        beat = plan_pb2.Heartbeat(step_id=worker.num_replies + 1, step_age_ms=int((clock() - start_s) * 1000))
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
    [load] = [m.load_adapter for m in hanging.session.outbox.take() if m.HasField("load_adapter")]
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
