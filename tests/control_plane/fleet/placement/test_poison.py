"""Poison requests: how many deaths it takes to find one, and what that costs the requests beside it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from contract.v1 import plan_pb2
from control_plane.errors import PoisonedRequest, WorkerLost
from control_plane.fleet.requests.deaths import MAX_DEATHS, is_suspect
from control_plane.fleet.requests.jobs import Death, Job
from control_plane.fleet.workers.endings import EndCause
from control_plane.scheduler.types import Request
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

POISON = [1, 66]  # how the prompt of a poison request begins
LARGE = replace(CAPACITIES, num_blocks=4096, max_rows=64, max_step_tokens=1024)


def computes_poison(worker: LoopbackWorker) -> bool:
    """Whether the worker was given a row that kills it."""
    return any(row.tokens[:2] == POISON for row in worker.engine.rows.values())


class Fate:
    """Workers that die of poison requests and are started again, until every request has ended."""

    def __init__(self, fleet: InspectedFleet, num_workers: int) -> None:
        self.fleet = fleet
        self.workers = {f"w{i}": self._start(f"w{i}") for i in range(num_workers)}
        self.num_deaths = 0
        self.num_turns = 0

    def _start(self, worker_id: str) -> LoopbackWorker:
        return LoopbackWorker(self.fleet, worker_id, capacities=LARGE)

    def kill(self, worker_id: str) -> None:
        """Let a worker die and come back as another process."""
        self.workers[worker_id].lose()
        self.workers[worker_id] = self._start(worker_id)

    async def turn(self) -> None:
        """A turn of every worker; those that were given poison do not send its result."""
        self.num_turns += 1
        for worker_id, worker in list(self.workers.items()):
            await worker.receive()
            if computes_poison(worker):
                self.num_deaths += 1
                self.kill(worker_id)
            else:
                worker.reply()
        self.fleet.tick()

    async def run(self, until: Callable[[], bool]) -> None:
        for _ in range(5000):
            if until():
                return
            await self.turn()
        raise AssertionError("it never ends")


def submit(fleet: InspectedFleet, requests: list[Request]) -> list[asyncio.Task[list[int]]]:
    return [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize(("num_requests", "place"), [(1, 0), (2, 1), (9, 4), (64, 0), (64, 31), (64, 63)])
async def test_a_poison_request_among_n_is_found_after_a_bounded_number_of_deaths(
    clock: FakeClock, num_requests: int, place: int, num_workers: int
) -> None:
    fleet = make_fleet(clock, worker_grace_s=1e9)
    requests = [make_request(fleet, [100 + i, 2], 60) for i in range(num_requests - 1)]
    requests.insert(place, make_request(fleet, POISON, 30))
    readers = submit(fleet, requests)
    fate = Fate(fleet, num_workers)
    await fate.run(lambda: all(reader.done() for reader in readers))
    poisoned = readers.pop(place)
    with pytest.raises(PoisonedRequest, match=r"\d+ workers died while they computed this request"):
        await poisoned
    del requests[place]
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    assert 3 <= fate.num_deaths <= 3 + math.ceil(math.log2(num_requests))
    assert fleet.queue_snapshot().num_requests == 0


async def test_a_poison_request_that_arrives_beside_running_ones_is_found_at_its_third_death(clock: FakeClock) -> None:
    """It alone never came past a re-prefill."""
    fleet = make_fleet(clock)
    innocents = [make_request(fleet, [100 + i, 2], 90) for i in range(40)]
    readers = submit(fleet, innocents)
    fate = Fate(fleet, 1)
    for _ in range(6):
        await fate.turn()
    [poisoned] = submit(fleet, [make_request(fleet, POISON, 30)])
    await fate.run(lambda: poisoned.done())
    assert fate.num_deaths == 3
    with pytest.raises(PoisonedRequest):
        await poisoned
    assert not any(job.deaths for job in fleet.parts.jobs.by_id.values()), "the poison request explains them all"
    await fate.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in innocents]


async def test_two_poison_requests_are_both_found(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    requests = [make_request(fleet, [100 + i, 2], 60) for i in range(14)]
    requests[3:3] = [make_request(fleet, [*POISON, 5], 30)]
    requests[12:12] = [make_request(fleet, [*POISON, 6], 30)]
    readers = submit(fleet, requests)
    fate = Fate(fleet, 1)
    await fate.run(lambda: all(reader.done() for reader in readers))
    for place, (request, reader) in enumerate(zip(requests, readers, strict=True)):
        if place in (3, 12):
            assert isinstance(reader.exception(), PoisonedRequest)
        else:
            assert await reader == expected(request)
    assert fate.num_deaths <= 2 * (3 + 4)


async def test_a_tenants_poison_has_no_adapter_refused_to_another_tenant(clock: FakeClock) -> None:
    """An attack would register another tenant's bytes, and kill workers under that digest."""
    fleet = make_fleet(clock, worker_grace_s=1e9)
    adapter = fleet.weights.add("of both")
    attack = replace(make_request(fleet, [*POISON, 3], 30, adapter), tenant="thief")
    [poisoned], fate = submit(fleet, [attack]), Fate(fleet, 2)
    await fate.run(poisoned.done)
    assert isinstance(poisoned.exception(), PoisonedRequest)
    own = replace(make_request(fleet, [100, 2], 20, adapter), tenant="owner")
    [reader] = submit(fleet, [own])
    await fate.run(reader.done)
    assert await reader == expected(own)


# ---- deaths that no request is the reason of ----


async def num_turns_of_64_streams(clock: FakeClock, turns_before_cuts: list[int]) -> int:
    fleet = make_fleet(clock)
    requests = [make_request(fleet, [100 + i, 2], 100) for i in range(64)]
    readers = submit(fleet, requests)
    fate = Fate(fleet, 1)
    for num_turns in turns_before_cuts:
        for _ in range(num_turns):
            await fate.turn()
        fate.workers["w0"].lose()
        fate.workers["w0"] = LoopbackWorker(fleet, "w0", capacities=LARGE)
    await fate.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    return fate.num_turns


@pytest.mark.parametrize("cuts", [[10], [10, 10], [1, 1], [1, 1, 1], [1, 1, 1, 1]])
async def test_an_only_worker_that_dies_of_something_else_costs_its_streams_little(
    clock: FakeClock, cuts: list[int]
) -> None:
    """With and without progress between the deaths; four in a row look like a poison request, and are none."""
    undisturbed = await num_turns_of_64_streams(clock, [])
    assert await num_turns_of_64_streams(clock, cuts) <= 2 * undisturbed


async def test_progress_clears_earlier_deaths_wherever_it_is_made(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    request = make_request(fleet, [1], 400)
    [reader] = submit(fleet, [request])
    [job] = fleet.parts.jobs.by_id.values()
    for number in range(6):
        worker = LoopbackWorker(fleet, f"w{number}")
        for _ in range(5):
            await worker.turn()
        worker.lose()
        assert not is_suspect(job)
    await LoopbackWorker(fleet).run(reader.done)
    assert await reader == expected(request)


async def test_the_loss_of_a_whole_fleet_is_held_against_no_request_once(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    for num_requests, num_deaths in ((6, 0), (0, 1)):
        workers = [LoopbackWorker(fleet, f"w{i}") for i in range(3)]
        for i in range(num_requests):
            fleet.submit(make_request(fleet, [i], 30))
        for worker in workers:
            await worker.receive()
        assert {len(worker.session.scheduler.request_ids) for worker in workers} == ({2} if num_requests else {0, 6})
        for worker in workers:
            worker.lose()
        assert [len(job.deaths) for job in fleet.parts.jobs.by_id.values()] == [num_deaths] * 6
        let_time_pass(clock, fleet, 1.1)


async def test_who_was_computed_at_two_deaths_of_a_whole_fleet_may_be_the_reason(clock: FakeClock) -> None:
    """A poison request went from one of two workers to the other."""
    fleet = make_fleet(clock)
    first, second = LoopbackWorker(fleet, "w0"), LoopbackWorker(fleet, "w1")
    requests = [make_request(fleet, [i], 30) for i in range(2)]
    for request in requests:
        fleet.submit(request)
    chained, other = fleet.parts.jobs.by_id.values()
    await first.receive()
    await second.receive()
    first.lose()
    await second.turn()
    await second.receive()
    second.lose()
    assert (len(chained.deaths), len(other.deaths)) == (2, 0)


@pytest.mark.parametrize("slowly", [False, True])
async def test_the_loss_of_an_only_worker_or_of_one_after_the_other_is_counted(clock: FakeClock, slowly: bool) -> None:
    fleet = make_fleet(clock, dead_after_ms=60_000)
    workers = [LoopbackWorker(fleet, f"w{i}") for i in range(1 + slowly)]
    for i in range(4):
        fleet.submit(make_request(fleet, [i], 30))
    for worker in workers:
        await worker.receive()
    jobs = [job for job in fleet.parts.jobs.by_id.values() if job.session is workers[-1].session]
    for worker in workers:
        let_time_pass(clock, fleet, 1.1)
        worker.lose()
    assert jobs and all(len(job.deaths) == 1 for job in jobs)


async def test_a_process_that_outlived_its_session_was_killed_by_no_request(clock: FakeClock) -> None:
    """As after a cut of the network: nobody is suspected, however often it is cut."""
    fleet = make_fleet(clock)
    requests = [make_request(fleet, [i], 40) for i in range(8)]
    readers = submit(fleet, requests)
    worker = LoopbackWorker(fleet, "w0")
    for _ in range(3):
        await worker.receive()
        worker.lose()
        assert all(len(job.deaths) == 1 for job in fleet.parts.jobs.by_id.values())
        worker = LoopbackWorker(fleet, "w0", last_epoch=worker.session.epoch)
        assert not any(job.deaths for job in fleet.parts.jobs.by_id.values())
        assert len(worker.session.scheduler.request_ids) == 8
    await worker.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]


async def test_suspects_whose_worker_turns_out_to_live_are_suspects_no_more(clock: FakeClock) -> None:
    """It was fenced while it was stopped, and comes back while they wait and run apart."""
    fleet = make_fleet(clock)
    requests = [make_request(fleet, [i], 60) for i in range(8)]
    readers = submit(fleet, requests)
    stopped = LoopbackWorker(fleet, "w0")
    await stopped.receive()
    stopped.lose()
    dead = LoopbackWorker(fleet, "w1")
    await dead.receive()
    dead.lose()
    assert all(is_suspect(job) for job in fleet.parts.jobs.by_id.values())
    other = LoopbackWorker(fleet, "w2")
    await other.turn()
    assert len(other.session.scheduler.request_ids) == 4
    back = LoopbackWorker(fleet, "w0", last_epoch=stopped.session.epoch)
    assert not any(is_suspect(job) for job in fleet.parts.jobs.by_id.values())
    assert len(other.session.scheduler.request_ids) + len(back.session.scheduler.request_ids) == 8
    for _ in range(200):
        await other.turn()
        await back.turn()
    assert [reader.result() for reader in readers] == [expected(request) for request in requests]


@pytest.mark.parametrize("kind", ["fault", "garbage"])
async def test_a_fault_speaks_against_requests_although_the_process_lives(clock: FakeClock, kind: str) -> None:
    fleet = make_fleet(clock)
    fleet.submit(make_request(fleet, [1], 40))
    [job] = fleet.parts.jobs.by_id.values()
    worker = LoopbackWorker(fleet, "w0")
    await worker.receive()
    if kind == "fault":
        worker.session.receive(plan_pb2.AttachRequest(fault=plan_pb2.Fault(reason="it broke", step_id=1)))
    else:
        worker.session.receive(plan_pb2.AttachRequest(hello=plan_pb2.Hello()))
    fleet.parts.migration.outlived("w0", worker.session.epoch)
    assert [death.worker_id for death in job.deaths] == ["w0"]


# ---- marking a request as poison ----


async def see_deaths_at(fleet: InspectedFleet, names: list[str]) -> Job:
    """The record of a request that was computed alone when workers of these names died, one after the other."""
    fleet.submit(make_request(fleet, [1], 40))
    [job] = fleet.parts.jobs.by_id.values()
    for name in names:
        worker = LoopbackWorker(fleet, name)
        await worker.receive()
        assert worker.plans
        worker.lose()
    return job


async def test_an_only_worker_is_enough_to_mark_a_request_as_poison(clock: FakeClock) -> None:
    job = await see_deaths_at(make_fleet(clock), ["sick", "sick", "sick"])
    with pytest.raises(PoisonedRequest, match="3 workers died"):
        await read_all(job.stream)


async def test_a_poison_request_is_marked_after_deaths_of_two_workers_if_there_are_two(
    clock: FakeClock,
) -> None:
    """One of them kills whatever it computes."""
    fleet = make_fleet(clock)
    job = await see_deaths_at(fleet, ["sick", "sick"])
    sick = LoopbackWorker(fleet, "sick")
    assert job.session is sick.session, "nobody else is there"
    sound = LoopbackWorker(fleet, "sound")
    await sick.receive()
    sick.lose()
    assert not job.stream.has_ended and job.session is sound.session
    reader = asyncio.create_task(read_all(job.stream))
    LoopbackWorker(fleet, "sick")
    await sound.run(reader.done)
    assert await reader == expected(job.request)


async def test_a_suspect_waits_for_the_worker_that_did_not_die_of_it(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    sick = LoopbackWorker(fleet, "sick", capacities=replace(CAPACITIES, max_model_len=64))
    sound = LoopbackWorker(fleet, "sound")
    [reader] = submit(fleet, [make_request(fleet, [7] * 70, 30)])  # for the one that is large enough
    await sound.turn()
    fleet.submit(make_request(fleet, [1], 40))
    *_, job = fleet.parts.jobs.by_id.values()
    assert job.session is not None
    fleet.parts.dispatcher.take_from_worker(job)
    job.deaths = [Death(epoch, "sick", is_loss=True) for epoch in (1, 2)]
    fleet.parts.isolation.add([job])
    for _ in range(5):
        await sick.turn()
        fleet.tick()
        assert job.session is None and not sick.plans
    await sound.run(reader.done)
    fleet.tick()
    assert job.session is sound.session


async def test_an_innocent_request_beside_a_worker_that_kills_everything_is_served_elsewhere(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    workers = {name: LoopbackWorker(fleet, name) for name in ("sick", "sound")}
    requests = [make_request(fleet, [i], 40) for i in range(12)]
    readers = submit(fleet, requests)
    for _ in range(400):
        await workers["sick"].receive()
        if workers["sick"].plans:
            workers["sick"].lose()
            workers["sick"] = LoopbackWorker(fleet, "sick")
        await workers["sound"].turn()
        clock.advance(0.1)
        for worker in workers.values():
            worker.session.receive(plan_pb2.AttachRequest(heartbeat=plan_pb2.Heartbeat()))
        fleet.tick()
        if all(reader.done() for reader in readers):
            break
    assert [await reader for reader in readers] == [expected(request) for request in requests]


# ---- how often a request may lose its worker ----


async def test_planned_restarts_of_workers_never_use_a_request_up(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    requests = [make_request(fleet, [i], 120) for i in range(8)]
    readers = submit(fleet, requests)
    for number in range(12):
        worker = LoopbackWorker(fleet, f"w{number % 3}")
        await worker.receive()
        if number % 2:
            worker.reply()
        worker.leave()
    jobs = list(fleet.parts.jobs.by_id.values())
    assert len(jobs) == 8 and not any(job.deaths or job.num_losses for job in jobs)
    await LoopbackWorker(fleet).run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    assert fleet.queue_snapshot().num_migrated == 12 * 8


async def test_a_request_that_gains_no_token_at_four_workers_in_a_row_is_given_up(clock: FakeClock) -> None:
    """Each of them outlived that, so that it is not a suspect: a link that is cut again and again."""
    fleet = make_fleet(clock)
    [reader] = submit(fleet, [make_request(fleet, [1], 40)])
    last_epoch = 0
    for _ in range(4):
        assert not reader.done()
        worker = LoopbackWorker(fleet, "w0", last_epoch=last_epoch)
        last_epoch = worker.session.epoch
        await worker.receive()
        worker.lose()
    with pytest.raises(WorkerLost, match="lost its worker 4 times"):
        await reader


async def test_a_token_makes_the_losses_before_it_forgotten(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    [reader] = submit(fleet, [make_request(fleet, [1], 40)])
    last_epoch = 0
    for gains in [False] * 3 + [True] + [False] * 3:
        assert not reader.done()
        worker = LoopbackWorker(fleet, "w0", last_epoch=last_epoch)
        last_epoch = worker.session.epoch
        await worker.receive()
        if gains:
            worker.reply()
        worker.lose()
    worker = LoopbackWorker(fleet, "w0", last_epoch=last_epoch)
    await worker.run(reader.done)
    assert await reader == expected(make_request(fleet, [1], 40))


async def test_a_request_whose_workers_die_again_and_again_is_given_up_although_it_comes_further(
    clock: FakeClock,
) -> None:
    fleet = make_fleet(clock)
    [reader] = submit(fleet, [make_request(fleet, [1], 900)])
    for number in range(MAX_DEATHS + 1):
        assert not reader.done()
        worker = LoopbackWorker(fleet, f"w{number}")
        for _ in range(8):  # far enough to be beyond suspicion
            await worker.turn()
        worker.lose()
        await asyncio.sleep(0)
    with pytest.raises(WorkerLost, match=f"lost its worker {MAX_DEATHS + 1} times"):
        await reader


async def test_an_internal_error_counts_against_requests_that_wait_too(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, max_rows=2))
    for i in range(4):
        fleet.submit(make_request(fleet, [i], 40))
    await worker.turn()
    worker.session.end(EndCause.INTERNAL_ERROR, "the state is inconsistent")
    assert [len(job.deaths) for job in fleet.parts.jobs.by_id.values()] == [1] * 4
    let_time_pass(clock, fleet, 1.0)
