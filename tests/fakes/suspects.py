"""Requests that were computed at two worker deaths, as tests hand them in and see them."""

from __future__ import annotations

import asyncio

from control_plane.fleet.requests.jobs import Death, Job
from control_plane.fleet.requests.streams import JobStream
from control_plane.scheduler.types import Request
from tests.fakes.fleet_rig import (
    InspectedFleet,
    LoopbackWorker,
    make_request,
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
    """Whether the worker takes requests that are not suspects."""
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
        worker.reply()
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


async def see_two_deaths_of_one(fleet: InspectedFleet, request: Request) -> None:
    fleet.submit(request)
    for _ in range(2):
        worker = LoopbackWorker(fleet, "first")
        await worker.receive()
        worker.lose()


async def two_busy_workers(fleet: InspectedFleet) -> list[LoopbackWorker]:
    """w0 with two long requests, w1 with one."""
    workers = [LoopbackWorker(fleet, name) for name in ("w0", "w1")]
    for i in range(3):
        fleet.submit(make_request(fleet, [i], 900))
    for worker in workers:
        await worker.turn()
    assert [len(worker.session.scheduler.request_ids) for worker in workers] == [2, 1]
    return workers
