"""Requests that were computed at two worker deaths run apart from others until they are cleared.

Which workers are closed or emptied for them is in test_isolation_workers.py; how many deaths it takes to find a poison
request, and what it costs the others, in test_poison.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from control_plane.errors import ContextTooLong
from control_plane.fleet.requests.deaths import is_suspect
from control_plane.fleet.requests.streams import MAX_UNREAD_TOKENS
from control_plane.scheduler.types import BeamSearch
from tests.fakes.fleet_rig import (
    CAPACITIES,
    FakeClock,
    LoopbackWorker,
    expected,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.suspects import (
    is_open,
    make_suspect,
    see_two_deaths,
    see_two_deaths_of_one,
    submit_suspect,
    until_done,
    worker_of,
)


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


async def test_a_worker_that_dies_before_it_computes_the_suspect_marks_no_request_as_poison(clock: FakeClock) -> None:
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
    assert is_suspect(job) and job.paused_since_s is None
    worker = LoopbackWorker(fleet)
    other = make_request(fleet, [2], 20)
    reader = asyncio.create_task(read_all(fleet.submit(other)))
    await worker.run(reader.done)
    assert await reader == expected(other) and not is_suspect(job) and job.paused_since_s is not None
    await until_done([worker], reader := asyncio.create_task(read_all(stream)))
    assert await reader == expected(suspect)


async def test_a_full_suspect_waits_for_its_reader(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    suspect = make_request(fleet, [1], MAX_UNREAD_TOKENS + 100)
    stream = fleet.submit(suspect)
    job = fleet.parts.jobs.by_id[suspect.request_id]
    worker = LoopbackWorker(fleet)
    await worker.run(lambda: job.paused_since_s is not None)
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


@pytest.mark.parametrize("num_samples", [1, 3])
async def test_a_suspect_is_cleared_once_none_of_its_tokens_can_have_been_under_way(
    clock: FakeClock, num_samples: int
) -> None:
    """Two plans of four steps each, and the token after them, for every completion."""
    fleet = make_fleet(clock)
    suspect = make_request(fleet, [1], 60, num_samples=num_samples)
    await see_two_deaths_of_one(fleet, suspect)
    LoopbackWorker(fleet, "w0")
    job = fleet.parts.jobs.by_id[suspect.request_id]
    for num_tokens, is_isolated in ((9 * num_samples, True), (9 * num_samples + 1, False)):
        job.num_tokens_here = num_tokens
        fleet.tick()
        assert fleet.parts.dispatcher.is_isolated(job) is is_isolated


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
    """The other worker is closed for a suspect meanwhile."""
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
