"""Requests that were computed at two worker deaths: where they run, what runs beside them, and how that ends.

How many deaths it takes to find a poison request, and what it costs the others, is in test_poison.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from contract.v1 import plan_pb2
from control_plane.errors import ContextTooLong
from control_plane.fleet import placement
from control_plane.fleet.deaths import is_suspect
from control_plane.fleet.jobs import MAX_UNREAD_TOKENS, Death, Job, JobStream
from control_plane.scheduler.types import BeamSearch, Request
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


def submit_suspect(fleet: InspectedFleet, request: Request) -> JobStream:
    """Hand in a request as if it had come from elsewhere with two deaths; where no worker is empty, it waits."""
    parts = fleet.parts
    stream = parts.delivery.stream_for(request)
    job = Job(request, stream, parts.quotas.admit(request))
    parts.jobs.add(job)
    make_suspect(fleet, job)
    error = parts.dispatcher.add(job)
    assert error is None, error
    return stream


def make_suspect(fleet: InspectedFleet, job: Job) -> None:
    """Let a waiting job be a suspect, as if workers that nobody knows had died of it."""
    job.deaths = [Death(epoch, f"elsewhere{epoch}", is_loss=True) for epoch in (1, 2)]
    fleet.parts.isolation.add([job])


def is_running(fleet: InspectedFleet, request: Request) -> bool:
    """Whether the request runs as a suspect."""
    return fleet.parts.dispatcher.is_isolated(fleet.parts.jobs.by_id[request.request_id])


def is_open(fleet: InspectedFleet, worker: LoopbackWorker) -> bool:
    """Whether the worker takes requests that are no suspects."""
    return fleet.parts.isolation.is_open(worker.session)


def worker_of(fleet: InspectedFleet, request: Request) -> str | None:
    """Id of the worker that has the request; None: it waits for one."""
    session = fleet.parts.jobs.by_id[request.request_id].session
    return None if session is None else session.worker_id


async def see_two_deaths(fleet: InspectedFleet, requests: list[Request]) -> list[JobStream]:
    """Requests that were computed at the deaths of two workers; none is attached after that."""
    streams = [fleet.submit(request) for request in requests]
    for name in ("first", "second"):
        worker = LoopbackWorker(fleet, name)
        await worker.receive()
        worker.answer()
        assert worker.session.scheduler.stats().num_running == len(requests)
        worker.lose()
    return streams


async def until_done(workers: list[LoopbackWorker], *readers: asyncio.Task[list[int]]) -> None:
    for _ in range(3000):
        if all(reader.done() for reader in readers):
            return
        for worker in workers:
            await worker.turn()
    raise AssertionError("the readers wait for ever")


async def test_a_request_present_at_two_worker_deaths_is_isolated(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspect = make_request(fleet, [1], 60)
    [stream] = await see_two_deaths(fleet, [suspect])
    workers = [LoopbackWorker(fleet, name) for name in ("w0", "w1")]
    others = [make_request(fleet, [i, 7], 20) for i in range(10, 16)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in others]
    assert worker_of(fleet, suspect) == "w0" and {worker_of(fleet, request) for request in others} == {"w1"}
    for _ in range(3):
        for worker in workers:
            await worker.turn()
            fleet.tick()
        assert set(workers[0].session.scheduler.request_ids) == {suspect.request_id}
    await until_done(workers, *readers)
    readers.append(asyncio.create_task(read_all(stream)))
    newcomer = make_request(fleet, [3], 5)
    readers.append(asyncio.create_task(read_all(fleet.submit(newcomer))))
    assert not is_suspect(fleet.parts.jobs.by_id[suspect.request_id])  # cleared: both workers take what comes
    await until_done(workers, *readers)
    assert [await reader for reader in readers] == [expected(request) for request in [*others, suspect, newcomer]]


async def test_groups_of_suspects_run_one_after_the_other_beside_those_that_were_cleared(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspects = [make_request(fleet, [i], 60) for i in range(1, 5)]
    streams = await see_two_deaths(fleet, suspects)
    workers = [LoopbackWorker(fleet, name) for name in ("w0", "w1")]
    readers = [asyncio.create_task(read_all(stream)) for stream in streams]
    groups: list[set[int]] = []
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


async def test_who_waited_while_a_group_ran_goes_before_the_next_group(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspects = [make_request(fleet, [i], 40) for i in range(1, 9)]
    streams = await see_two_deaths(fleet, suspects)
    large = LoopbackWorker(fleet, "large")
    small = LoopbackWorker(fleet, "small", capacities=replace(CAPACITIES, max_model_len=64))
    readers = [asyncio.create_task(read_all(stream)) for stream in streams]
    long = make_request(fleet, [*range(100)], 10)
    readers.append(asyncio.create_task(read_all(fleet.submit(long))))
    assert worker_of(fleet, long) is None and worker_of(fleet, suspects[0]) == "large"
    await large.run(lambda: not is_suspect(fleet.parts.jobs.by_id[suspects[0].request_id]))
    assert worker_of(fleet, long) == "large" and worker_of(fleet, suspects[-1]) in (None, "small")
    for _ in range(400):
        await large.turn()
        await small.turn()
        fleet.tick()
    assert all(reader.done() for reader in readers)


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


async def test_a_worker_that_dies_before_it_computes_the_suspect_convicts_nobody(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspect = make_request(fleet, [1], 30)
    [stream] = await see_two_deaths(fleet, [suspect])
    worker = LoopbackWorker(fleet, "w0")
    assert worker_of(fleet, suspect) == "w0"
    worker.lose()  # before the loop turned: no plan was made
    back = LoopbackWorker(fleet, "w0")
    reader = asyncio.create_task(read_all(stream))
    await back.run(reader.done)
    assert await reader == expected(suspect)


async def test_a_suspect_runs_until_it_is_cleared_although_its_reader_falls_behind(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspect = make_request(fleet, [1], MAX_UNREAD_TOKENS + 100)
    stream = fleet.submit(suspect)
    job = fleet.parts.jobs.by_id[suspect.request_id]
    worker = LoopbackWorker(fleet, "first")
    await worker.run(lambda: job.num_generated >= MAX_UNREAD_TOKENS - 4)
    worker.lose()
    worker = LoopbackWorker(fleet, "second")
    await worker.receive()
    worker.lose()
    assert is_suspect(job) and job.full_since_s is None
    worker = LoopbackWorker(fleet)
    other = make_request(fleet, [2], 20)
    reader = asyncio.create_task(read_all(fleet.submit(other)))
    await worker.run(reader.done)
    assert await reader == expected(other) and not is_suspect(job) and job.full_since_s is not None
    await until_done([worker], reader := asyncio.create_task(read_all(stream)))
    assert await reader == expected(suspect)


async def test_a_full_suspect_waits_for_its_reader(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspect = make_request(fleet, [1], MAX_UNREAD_TOKENS + 100)
    stream = fleet.submit(suspect)
    job = fleet.parts.jobs.by_id[suspect.request_id]
    worker = LoopbackWorker(fleet)
    await worker.run(lambda: job.full_since_s is not None)
    worker.lose()
    make_suspect(fleet, job)
    worker = LoopbackWorker(fleet)
    assert worker_of(fleet, suspect) is None
    reader = asyncio.create_task(read_all(stream))
    await until_done([worker], reader)
    assert await reader == expected(suspect)


async def test_a_suspect_beam_search_is_cleared_by_what_it_searched(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspect = make_request(fleet, [1, 2], 100, beam=BeamSearch(2))
    await see_two_deaths_of_one(fleet, suspect)
    worker = LoopbackWorker(fleet, "w0")
    job = fleet.parts.jobs.by_id[suspect.request_id]
    for _ in range(30):
        await worker.turn()
    assert fleet.parts.dispatcher.is_isolated(job) and job.num_tokens_here == 0
    fleet.tick()
    assert not fleet.parts.dispatcher.is_isolated(job) and suspect.request_id in worker.session.scheduler.request_ids


async def see_two_deaths_of_one(fleet: InspectedFleet, request: Request) -> None:
    fleet.submit(request)
    for _ in range(2):
        worker = LoopbackWorker(fleet, "first")
        await worker.receive()
        worker.lose()


@pytest.mark.parametrize("num_samples", [1, 3])
async def test_a_suspect_is_cleared_once_none_of_its_tokens_can_have_been_under_way(
    clock: FakeClock, num_samples: int
) -> None:
    """Two plans of four steps each, and the token after them, for every answer."""
    fleet = make_fleet(clock)
    suspect = make_request(fleet, [1], 60, num_samples=num_samples)
    await see_two_deaths_of_one(fleet, suspect)
    LoopbackWorker(fleet, "w0")
    job = fleet.parts.jobs.by_id[suspect.request_id]
    for num_tokens, is_isolated in ((9 * num_samples, True), (9 * num_samples + 1, False)):
        job.num_tokens_here = num_tokens
        fleet.tick()
        assert fleet.parts.dispatcher.is_isolated(job) is is_isolated


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


async def two_busy_workers(fleet: InspectedFleet) -> list[LoopbackWorker]:
    """w0 with two long requests, w1 with one."""
    workers = [LoopbackWorker(fleet, name) for name in ("w0", "w1")]
    for i in range(3):
        fleet.submit(make_request(fleet, [i], 900))
    for worker in workers:
        await worker.turn()
    assert [len(worker.session.scheduler.request_ids) for worker in workers] == [2, 1]
    return workers


async def test_a_suspect_does_not_go_back_where_its_adapter_failed(clock: FakeClock) -> None:
    """The other worker is busy: it is emptied."""
    fleet = make_fleet(clock)
    adapter = fleet.weights.add("a")
    good = LoopbackWorker(fleet, "good")
    readers = [asyncio.create_task(read_all(fleet.submit(make_request(fleet, [i], 60)))) for i in range(3)]
    await good.turn()
    bad = LoopbackWorker(fleet, "bad")
    bad.engine.hash_slots.failing[adapter.digest] = False
    suspect = make_request(fleet, [1], 40, adapter)
    readers.append(asyncio.create_task(read_all(submit_suspect(fleet, suspect))))
    job = fleet.parts.jobs.by_id[suspect.request_id]
    assert worker_of(fleet, suspect) == "bad"
    await bad.run(lambda: bool(job.failed_load_epochs))
    assert worker_of(fleet, suspect) is None and is_open(fleet, bad)
    fleet.tick()
    assert not is_open(fleet, good)
    for _ in range(200):
        await good.turn()
        await bad.turn()
        assert suspect.request_id not in bad.session.scheduler.request_ids
        fleet.tick()
    assert await readers[-1] == expected(suspect)


async def test_what_failed_to_load_waits_for_the_worker_that_did_not_try(clock: FakeClock) -> None:
    """That is closed by a trial meanwhile."""
    fleet = make_fleet(clock)
    adapter = fleet.weights.add("a")
    suspect = make_request(fleet, [1], 40)
    [stream] = await see_two_deaths(fleet, [suspect])
    good = LoopbackWorker(fleet, "good")
    bad = LoopbackWorker(fleet, "bad")
    bad.engine.hash_slots.failing[adapter.digest] = False
    request = make_request(fleet, [2], 10, adapter)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    assert (worker_of(fleet, suspect), worker_of(fleet, request)) == ("good", "bad")
    await bad.run(lambda: bool(fleet.parts.jobs.by_id[request.request_id].failed_load_epochs))
    for _ in range(20):
        await bad.turn()
        fleet.tick()
        assert worker_of(fleet, request) is None
    await until_done([good], reader, asyncio.create_task(read_all(stream)))
    assert await reader == expected(request)


async def test_a_suspect_that_fits_no_worker_fails_and_stops_nobody(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    large, fitting = make_request(fleet, [*range(100)], 60), make_request(fleet, [3], 40)
    streams = await see_two_deaths(fleet, [large, fitting])
    worker = LoopbackWorker(fleet, "small", capacities=replace(CAPACITIES, max_model_len=64))
    assert worker_of(fleet, fitting) == "small"
    with pytest.raises(ContextTooLong):
        await read_all(streams[0])
    await until_done([worker], reader := asyncio.create_task(read_all(streams[1])))
    assert await reader == expected(fitting)


async def test_a_suspect_for_which_no_worker_is_large_enough_any_more_fails(clock: FakeClock) -> None:
    """The workers that are left are busy, so that it could not be tried there anyway."""
    fleet = make_fleet(clock)
    workers = [LoopbackWorker(fleet, name, capacities=replace(CAPACITIES, max_model_len=64)) for name in ("w0", "w1")]
    large_worker = LoopbackWorker(fleet, "large")
    for i in range(6):
        fleet.submit(make_request(fleet, [i], 60))
    for worker in (*workers, large_worker):
        await worker.turn()
        assert worker.session.scheduler.request_ids
    large, fitting = make_request(fleet, [*range(100)], 60), make_request(fleet, [3], 40)
    streams = [submit_suspect(fleet, request) for request in (large, fitting)]
    assert worker_of(fleet, large) is worker_of(fleet, fitting) is None
    large_worker.lose()
    assert streams[0].has_ended
    with pytest.raises(ContextTooLong):
        await read_all(streams[0])
    fleet.tick()
    assert [is_open(fleet, worker) for worker in workers].count(False) == 1


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
        [held] = worker.session.scheduler.request_ids - worker.session.running_request_ids()
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
