"""Requests that were present at two worker deaths: where they run, what runs beside them, and how that ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from control_plane.errors import ContextTooLong, PoisonedRequest
from control_plane.fleet.fleet import Fleet
from control_plane.fleet.jobs import MAX_UNREAD_TOKENS, JobStream
from control_plane.scheduler.types import BeamSearch, Request
from tests.fakes.fleet_rig import (
    CAPACITIES,
    FakeClock,
    LoopbackWorker,
    expected,
    make_fleet,
    make_request,
    read_all,
)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def lose(worker: LoopbackWorker) -> None:
    worker.session.end(grpc.StatusCode.UNAVAILABLE, "the stream broke", is_death=True)


def worker_of(fleet: Fleet, request: Request) -> str | None:
    """Id of the worker that has the request; None: it waits for one."""
    session = fleet._jobs[request.request_id].session
    return None if session is None else session.worker_id


async def see_two_deaths(fleet: Fleet, requests: list[Request]) -> list[JobStream]:
    """Requests that were computed at two worker deaths; no worker is attached after that."""
    streams = [fleet.submit(request) for request in requests]
    for _ in range(2):
        worker = LoopbackWorker(fleet, "first")
        await worker.receive()
        worker.answer()
        assert worker.session.scheduler.stats().num_running == len(requests)
        lose(worker)
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
        assert set(workers[0].session.scheduler.groups) == {suspect.request_id}
    await until_done(workers, *readers)
    readers.append(asyncio.create_task(read_all(stream)))
    newcomer = make_request(fleet, [3], 5)
    readers.append(asyncio.create_task(read_all(fleet.submit(newcomer))))
    assert fleet._jobs[suspect.request_id].num_deaths == 0  # cleared: both workers take what comes
    await until_done(workers, *readers)
    assert [await reader for reader in readers] == [expected(request) for request in [*others, suspect, newcomer]]


async def test_suspects_are_tried_one_after_the_other_among_those_that_were_cleared(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspects = [make_request(fleet, [i], 40) for i in range(1, 5)]
    streams = await see_two_deaths(fleet, suspects)
    busy = LoopbackWorker(fleet, "busy")  # the only one: a suspect runs there
    empty = LoopbackWorker(fleet, "empty")
    readers = [asyncio.create_task(read_all(stream)) for stream in streams]
    newcomer = make_request(fleet, [9], 30)
    await asyncio.sleep(0)
    assert [worker_of(fleet, request) for request in suspects] == ["busy", "empty", None, None]
    readers.append(asyncio.create_task(read_all(fleet.submit(newcomer))))
    await asyncio.sleep(0)
    assert worker_of(fleet, newcomer) is None  # it waits for the end of a trial
    most = 0
    for _ in range(400):
        for worker in (busy, empty):
            await worker.turn()
            on_trial = [job for job in fleet._jobs.values() if fleet._dispatcher.is_on_trial(job)]
            most = max(most, len(on_trial))
            for job in on_trial:
                assert job.session is not None
                assert newcomer.request_id not in job.session.scheduler.groups
    assert most == 2
    assert [await reader for reader in readers] == [expected(request) for request in [*suspects, newcomer]]


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
    job = fleet._jobs[suspect.request_id]
    assert job.session is not None
    fleet._dispatcher._take_from(job.session, job)
    job.num_deaths = 2  # as if it had come from elsewhere with these
    fleet.tick()
    assert worker_of(fleet, suspect) is None
    emptied = next(worker for worker in workers if not fleet._dispatcher._trials.is_open(worker.session))
    assert {worker_of(fleet, request) for request in waiting}.isdisjoint({emptied.session.worker_id, None})
    tried_beside: set[int] = set()
    for _ in range(300):
        for worker in workers:
            await worker.turn()
        fleet.tick()
        if fleet._dispatcher.is_on_trial(job):
            assert job.session is emptied.session
            tried_beside |= set(emptied.session.scheduler.groups) - {suspect.request_id}
        if all(reader.done() for reader in readers):
            break
    assert [await reader for reader in readers] == [expected(request) for request in [*running, *waiting, suspect]]
    assert tried_beside == set() and fleet._dispatcher._trials.is_open(emptied.session)


async def test_beside_the_suspect_of_an_only_worker_nobody_starts_who_may_wait(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspects = [make_request(fleet, [i], 40) for i in (1, 2)]
    readers = [asyncio.create_task(read_all(stream)) for stream in await see_two_deaths(fleet, suspects)]
    worker = LoopbackWorker(fleet, "only")
    newcomers = [make_request(fleet, [i, 7], 20) for i in range(10, 13)]
    readers += [asyncio.create_task(read_all(fleet.submit(request))) for request in newcomers]
    await worker.receive()
    assert set(worker.session.scheduler.groups) == {suspects[0].request_id}
    await worker.run(lambda: fleet._jobs[suspects[0].request_id].num_deaths == 0)
    # The trial is over: those that waited for that go first, then the next suspect.
    assert list(worker.session.scheduler.groups) == [r.request_id for r in [suspects[0], *newcomers, suspects[1]]]
    await worker.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in [*suspects, *newcomers]]


async def test_a_death_that_convicts_a_suspect_is_not_held_against_the_others(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspects = [make_request(fleet, [i], 60) for i in (1, 2)]
    streams = await see_two_deaths(fleet, suspects)
    worker = LoopbackWorker(fleet, "w0")
    jobs = [fleet._jobs[request.request_id] for request in suspects]
    await worker.run(lambda: fleet._dispatcher.is_on_trial(jobs[1]))
    await worker.turn()
    lose(worker)
    with pytest.raises(PoisonedRequest):
        await read_all(streams[1])
    assert (jobs[0].num_deaths, jobs[0].num_migrations) == (0, 3)
    back = LoopbackWorker(fleet, "w0")
    reader = asyncio.create_task(read_all(streams[0]))
    await back.run(reader.done)
    assert await reader == expected(suspects[0])


async def test_a_worker_that_dies_before_it_computes_the_suspect_convicts_nobody(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspect = make_request(fleet, [1], 30)
    [stream] = await see_two_deaths(fleet, [suspect])
    worker = LoopbackWorker(fleet, "w0")
    assert worker_of(fleet, suspect) == "w0"
    lose(worker)  # before the loop turned: no plan was made
    back = LoopbackWorker(fleet, "w0")
    reader = asyncio.create_task(read_all(stream))
    await back.run(reader.done)
    assert await reader == expected(suspect)


async def test_a_trial_is_seen_through_although_the_reader_falls_behind(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspect = make_request(fleet, [1], MAX_UNREAD_TOKENS + 100)
    stream = fleet.submit(suspect)
    job = fleet._jobs[suspect.request_id]
    for num_tokens in (100, MAX_UNREAD_TOKENS - 4):
        worker = LoopbackWorker(fleet)
        await worker.run(lambda least=num_tokens: job.num_generated >= least)
        lose(worker)
    assert fleet._dispatcher._trials.on_trial() == [] and job.num_deaths == 2 and job.full_since_s is None
    worker = LoopbackWorker(fleet)
    other = make_request(fleet, [2], 20)
    reader = asyncio.create_task(read_all(fleet.submit(other)))
    await worker.run(reader.done)
    assert await reader == expected(other) and job.num_deaths == 0 and job.full_since_s is not None
    await until_done([worker], reader := asyncio.create_task(read_all(stream)))
    assert await reader == expected(suspect)


async def test_a_full_suspect_waits_for_its_reader(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspect = make_request(fleet, [1], MAX_UNREAD_TOKENS + 100)
    stream = fleet.submit(suspect)
    job = fleet._jobs[suspect.request_id]
    worker = LoopbackWorker(fleet)
    await worker.run(lambda: job.full_since_s is not None)
    job.num_deaths = 1
    lose(worker)
    assert job.num_deaths == 2
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
    job = fleet._jobs[suspect.request_id]
    for _ in range(30):
        await worker.turn()
    assert fleet._dispatcher.is_on_trial(job) and job.num_tokens_here == 0
    fleet.tick()
    assert not fleet._dispatcher.is_on_trial(job) and suspect.request_id in worker.session.scheduler.groups


async def see_two_deaths_of_one(fleet: Fleet, request: Request) -> None:
    fleet.submit(request)
    for _ in range(2):
        worker = LoopbackWorker(fleet, "first")
        await worker.receive()
        lose(worker)


@pytest.mark.parametrize("num_samples", [1, 3])
async def test_a_suspect_is_cleared_once_none_of_its_tokens_can_have_been_under_way(
    clock: FakeClock, num_samples: int
) -> None:
    """Two plans of four steps each, and the token after them, for every answer."""
    fleet = make_fleet(clock)
    suspect = make_request(fleet, [1], 60, num_samples=num_samples)
    await see_two_deaths_of_one(fleet, suspect)
    LoopbackWorker(fleet, "w0")
    job = fleet._jobs[suspect.request_id]
    for num_tokens, is_on_trial in ((9 * num_samples, True), (9 * num_samples + 1, False)):
        job.num_tokens_here = num_tokens
        fleet.tick()
        assert fleet._dispatcher.is_on_trial(job) is is_on_trial


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
