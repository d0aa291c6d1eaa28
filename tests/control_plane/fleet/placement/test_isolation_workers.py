"""Which workers run suspects: closed, emptied, or waited for."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from contract.v1 import plan_pb2
from control_plane.errors import ContextTooLong
from control_plane.fleet.placement import placement
from control_plane.fleet.requests.deaths import is_suspect
from control_plane.fleet.requests.jobs import Death
from control_plane.scheduler.types import RequestId
from tests.fakes.fleet_rig import (
    CAPACITIES,
    FakeClock,
    LoopbackWorker,
    expected,
    let_time_pass,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.suspects import (
    is_open,
    is_running,
    make_suspect,
    see_two_deaths,
    submit_suspect,
    two_busy_workers,
    until_done,
    worker_of,
)


async def test_groups_of_suspects_run_one_after_the_other_beside_those_that_were_cleared(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspects = [make_request(fleet, [i], 60) for i in range(1, 5)]
    streams = await see_two_deaths(fleet, suspects)
    workers = [LoopbackWorker(fleet, name) for name in ("w0", "w1")]
    readers = [asyncio.create_task(read_all(stream)) for stream in streams]
    groups: list[set[RequestId]] = []
    for _ in range(400):
        for worker in workers:
            await worker.turn()
        now = {
            job.request.request_id for job in fleet.parts.jobs.by_id.values() if fleet.parts.dispatcher.is_isolated(job)
        }
        if now and not (groups and now <= groups[-1]):
            groups.append(now)
        for worker in workers:
            assert worker.session.scheduler.request_ids <= {i for group in groups for i in group}
    first, second, third, fourth = (request.request_id for request in suspects)
    assert groups == [{first, second}, {third, fourth}]
    assert [await reader for reader in readers] == [expected(request) for request in suspects]


async def test_suspects_close_at_most_half_of_the_workers_to_others(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    workers = [LoopbackWorker(fleet, f"w{i}") for i in range(5)]
    readers = [asyncio.create_task(read_all(submit_suspect(fleet, make_request(fleet, [i], 40)))) for i in range(1, 9)]
    most = 0
    for prompt in range(20, 60):
        for worker in workers:
            await worker.turn()
        fleet.tick()
        most = max(most, [is_open(fleet, worker) for worker in workers].count(False))
        newcomer = make_request(fleet, [prompt], 5)
        readers.append(asyncio.create_task(read_all(fleet.submit(newcomer))))
        assert worker_of(fleet, newcomer) is not None
    assert most == 2
    await until_done(workers, *readers)


async def test_a_busy_worker_is_emptied_for_a_suspect(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    small = replace(CAPACITIES, max_rows=2)
    workers = [LoopbackWorker(fleet, name, capacities=small) for name in ("w0", "w1")]
    running = [make_request(fleet, [i], 120) for i in range(4)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in running]
    waiting = [make_request(fleet, [i, i], 10) for i in range(20, 24)]
    await workers[0].turn()
    await workers[1].turn()
    readers += [asyncio.create_task(read_all(fleet.submit(request))) for request in waiting]
    suspect = make_request(fleet, [1, 1], 30)
    readers.append(asyncio.create_task(read_all(fleet.submit(suspect))))
    job = fleet.parts.jobs.by_id[suspect.request_id]
    assert job.session is not None
    fleet.parts.dispatcher.take_from_worker(job)
    make_suspect(fleet, job)
    fleet.tick()
    assert worker_of(fleet, suspect) is None
    emptied = next(worker for worker in workers if not is_open(fleet, worker))
    assert {worker_of(fleet, request) for request in waiting}.isdisjoint({emptied.session.worker_id, None})
    tried_beside: set[int] = set()
    for _ in range(300):
        for worker in workers:
            await worker.turn()
        fleet.tick()
        if fleet.parts.dispatcher.is_isolated(job):
            assert job.session is emptied.session
            tried_beside |= set(emptied.session.scheduler.request_ids) - {suspect.request_id}
        if all(reader.done() for reader in readers):
            break
    assert [await reader for reader in readers] == [expected(request) for request in [*running, *waiting, suspect]]
    assert tried_beside == set() and is_open(fleet, emptied)


async def test_beside_the_suspects_of_an_only_worker_nobody_runs_whose_own_death_may_come(clock: FakeClock) -> None:
    fleet = make_fleet(clock, emptying_timeout_s=0.01)  # no other worker is waited for
    suspects = [make_request(fleet, [i], 40) for i in (1, 2)]
    readers = [asyncio.create_task(read_all(stream)) for stream in await see_two_deaths(fleet, suspects)]
    worker = LoopbackWorker(fleet, "third")
    newcomers = [make_request(fleet, [i, 7], 60) for i in range(10, 13)]
    readers += [asyncio.create_task(read_all(fleet.submit(request))) for request in newcomers]
    await worker.receive()
    assert set(worker.session.scheduler.request_ids) == {suspects[0].request_id}
    await worker.run(lambda: not is_suspect(fleet.parts.jobs.by_id[suspects[0].request_id]))
    # The group is over: those that waited go first. Then nobody, until the next group runs.
    await worker.turn()
    clock.advance(0.02)
    fleet.tick()
    late = make_request(fleet, [20, 7], 20)
    readers.append(asyncio.create_task(read_all(fleet.submit(late))))
    for _ in range(100):
        worker.session.receive(heartbeat())
        fleet.tick()
        if is_running(fleet, suspects[1]):
            break
        assert set(worker.session.scheduler.request_ids) == {r.request_id for r in [suspects[0], *newcomers]}
        await worker.turn()
    gained = [fleet.parts.jobs.by_id[request.request_id].num_tokens_here for request in newcomers]
    assert is_running(fleet, suspects[1]) and min(gained) == 10, "two plans of four steps, and one token more"
    await worker.run(lambda: all(reader.done() for reader in readers))
    requests = [*suspects, *newcomers, late]
    assert [await reader for reader in readers] == [expected(request) for request in requests]


def heartbeat() -> plan_pb2.AttachRequest:
    return plan_pb2.AttachRequest(heartbeat=plan_pb2.Heartbeat())


async def test_what_fits_only_a_worker_that_is_closed_waits_for_it(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspect = make_request(fleet, [1], 60)
    [stream] = await see_two_deaths(fleet, [suspect])
    large = LoopbackWorker(fleet, "large")
    small = LoopbackWorker(fleet, "small", capacities=replace(CAPACITIES, max_model_len=64))
    long = make_request(fleet, [*range(100)], 10)
    reader = asyncio.create_task(read_all(fleet.submit(long)))
    assert worker_of(fleet, long) is None
    await until_done([large, small], reader, asyncio.create_task(read_all(stream)))
    assert await reader == expected(long)
    with pytest.raises(ContextTooLong):
        fleet.submit(make_request(fleet, [1] * 3000, 10))


async def test_a_worker_is_emptied_for_a_bounded_time(clock: FakeClock) -> None:
    """Its reader does not read: it would never be empty."""
    fleet = make_fleet(clock, emptying_timeout_s=3.0)
    workers = await two_busy_workers(fleet)
    suspect = make_request(fleet, [9], 40)
    reader = asyncio.create_task(read_all(submit_suspect(fleet, suspect)))
    fleet.tick()
    assert [is_open(fleet, worker) for worker in workers] == [True, False]
    for _ in range(29):
        clock.advance(0.1)
        fleet.tick()
        for worker in workers:
            await worker.turn()
        assert worker_of(fleet, suspect) is None
    clock.advance(0.2)
    fleet.tick()
    assert worker_of(fleet, suspect) == "w1" and is_running(fleet, suspect)
    await until_done(workers, reader)
    assert await reader == expected(suspect)
    assert all(is_open(fleet, worker) for worker in workers)


async def test_suspects_run_beside_requests_whose_own_death_may_come_only_after_twice_the_time(
    clock: FakeClock,
) -> None:
    fleet = make_fleet(clock, emptying_timeout_s=3.0)
    workers = await two_busy_workers(fleet)
    suspect = make_request(fleet, [9], 40)
    submit_suspect(fleet, suspect)
    beside = next(job for job in fleet.parts.jobs.by_id.values() if job.session is workers[1].session)
    beside.num_tokens_here = 9  # it may be about to kill its worker
    fleet.tick()
    for _ in range(59):
        clock.advance(0.1)
        for worker in workers:
            worker.session.receive(heartbeat())
        fleet.tick()
        assert worker_of(fleet, suspect) is None
    clock.advance(0.2)
    fleet.tick()
    assert worker_of(fleet, suspect) == "w1"
    await workers[1].turn()
    await workers[1].receive()
    beside.num_tokens_here = 9
    workers[1].lose()  # nobody can tell which of them it was
    assert [len(job.deaths) for job in (fleet.parts.jobs.by_id[suspect.request_id], beside)] == [3, 1]


async def test_a_worker_that_nobody_waits_for_any_more_is_open_again(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    workers = await two_busy_workers(fleet)
    stream = submit_suspect(fleet, make_request(fleet, [9], 40))
    fleet.tick()
    assert not is_open(fleet, workers[1])
    stream.cancel()
    fleet.tick()
    assert all(is_open(fleet, worker) for worker in workers)


async def test_what_waits_or_is_held_moves_away_from_a_worker_that_is_emptied(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    workers = [LoopbackWorker(fleet, name, capacities=replace(CAPACITIES, max_rows=1)) for name in ("w0", "w1")]
    requests = [make_request(fleet, [i], 60) for i in range(4)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    for worker in workers:
        await worker.turn()
    for worker in workers:
        [held] = worker.session.scheduler.request_ids - worker.session.steps.running_request_ids
        worker.session.pause(held)
    suspect = make_request(fleet, [9], 40)
    readers.append(asyncio.create_task(read_all(submit_suspect(fleet, suspect))))
    fleet.tick()
    assert [len(worker.session.scheduler.request_ids) for worker in workers] == [1, 3]
    await until_done(workers[:1], readers[requests.index(next(r for r in requests if worker_of(fleet, r) == "w0"))])
    fleet.tick()
    assert worker_of(fleet, suspect) == "w0"


async def test_a_suspect_waits_for_the_lost_one_of_two_workers(clock: FakeClock) -> None:
    fleet = make_fleet(clock, emptying_timeout_s=10.0)
    workers = await two_busy_workers(fleet)
    suspect = next(job for job in fleet.parts.jobs.by_id.values() if job.session is workers[1].session)
    suspect.num_tokens_here, suspect.deaths = 0, [Death(1, "elsewhere", is_loss=True)]
    workers[1].lose()
    clock.advance(5.0)
    fleet.tick()
    assert is_suspect(suspect) and suspect.session is None
    back = LoopbackWorker(fleet, "w1")
    assert suspect.session is back.session


async def test_a_suspect_runs_beside_others_where_the_lost_one_of_two_workers_stays_away(clock: FakeClock) -> None:
    fleet = make_fleet(clock, emptying_timeout_s=10.0, dead_after_ms=60_000)
    workers = await two_busy_workers(fleet)
    suspect = next(job for job in fleet.parts.jobs.by_id.values() if job.session is workers[1].session)
    suspect.num_tokens_here, suspect.deaths = 0, [Death(1, "elsewhere", is_loss=True)]
    workers[1].lose()
    let_time_pass(clock, fleet, 9.8)
    assert suspect.session is None
    for _ in range(5):  # those that run there come past the point of their own death
        await workers[0].turn()
    let_time_pass(clock, fleet, 0.3)
    assert suspect.session is workers[0].session


async def test_those_that_wait_while_every_worker_is_closed_are_not_priced(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock)
    await see_two_deaths(fleet, [make_request(fleet, [1], 40)])
    LoopbackWorker(fleet, "first")
    for i in range(20):
        fleet.submit(make_request(fleet, [i], 20))
    monkeypatch.setattr(placement, "need_of", None)
    fleet.parts.dispatcher.place_waiting()
    assert len(fleet.parts.dispatcher.waiting) == 20
