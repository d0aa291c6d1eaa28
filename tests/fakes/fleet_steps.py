"""What several tests of the fleet do with its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from contract.v1 import plan_pb2
from control_plane.fleet.requests.streams import JobStream
from control_plane.scheduler.invariants import check_scheduler
from tests.fakes.fleet_rig import (
    FakeClock,
    InspectedFleet,
    LoopbackWorker,
    read_all,
)


async def run_all(worker: LoopbackWorker, streams: list[JobStream]) -> list[list[int]]:
    """Turn the worker until every stream has ended; their tokens."""
    readers = [asyncio.create_task(read_all(stream)) for stream in streams]
    await worker.run(lambda: all(reader.done() for reader in readers))
    return [await reader for reader in readers]


def assert_nothing_held(worker: LoopbackWorker) -> None:
    snapshot = worker.session.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.num_blocks_held) == (0, 0, 0)
    assert snapshot.num_plans_in_flight == 0
    check_scheduler(worker.session.scheduler)


async def pass_time(clock: FakeClock, fleet: InspectedFleet, workers: list[LoopbackWorker], seconds: float) -> None:
    """Let time pass in ticks, with workers that are alive."""
    for _ in range(round(seconds / 0.1)):
        clock.advance(0.1)
        for worker in workers:
            worker.session.receive(heartbeat())
            await worker.turn()
        fleet.tick()
    await asyncio.sleep(0)


async def run_with(worker: LoopbackWorker, awaitable: Coroutine[None, None, None]) -> None:
    """Turn the worker until the coroutine is done."""
    task = asyncio.create_task(awaitable)
    await worker.run(task.done)
    await task


def reader_tokens(reader: asyncio.Task[list[int]]) -> list[int]:
    return reader.result() if reader.done() else []


def heartbeat() -> plan_pb2.AttachRequest:
    return plan_pb2.AttachRequest(heartbeat=plan_pb2.Heartbeat(num_steps=1))


def encode_stale_result(worker: LoopbackWorker) -> plan_pb2.AttachRequest:
    return plan_pb2.AttachRequest(step_result=plan_pb2.StepResult(step_id=1, epoch=worker.session.epoch))
