"""Workers that send results, and wrong ones: logits that are not finite, steps that raise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from contract.v1 import plan_pb2
from control_plane.errors import NotFinite, WorkerQuarantined
from control_plane.fleet.placement.second_check import MAX_CHECKS
from control_plane.fleet.workers.endings import EndCause
from control_plane.fleet.workers.step_record import MAX_NOT_FINITE
from control_plane.scheduler.types import Sampling
from tests.fakes.fleet_rig import (
    FakeClock,
    InspectedFleet,
    LoopbackWorker,
    expected,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.hash_engine import HashEngineFaults


class SickWorker(LoopbackWorker):
    """Its logits are not finite, of rows with the given slots; None is the base model."""

    is_sick: Callable[[int | None], bool] = staticmethod(lambda _slot: True)

    def reply(self, num_results: int | None = None) -> None:
        for message in self.results:
            if message.WhichOneof("message") == "step_result":
                result = message.step_result
                rows = memoryview(result.rows).cast("i").tolist()
                sick = [row for row in rows if row in self.engine.rows and self.is_sick(self.engine.rows[row].slot)]
                tokens = dict(zip(rows, memoryview(result.token_ids).cast("i").tolist(), strict=True))
                sound = [row for row in rows if row not in sick]
                result.rows = b"".join(row.to_bytes(4, "little") for row in sound)
                result.token_ids = b"".join(tokens[row].to_bytes(4, "little") for row in sound)
                result.failed_rows = b"".join(row.to_bytes(4, "little") for row in sick)
                del result.sampled_logprobs[:]
        super().reply(num_results)


async def turn_all(clock: FakeClock, fleet: InspectedFleet, workers: Sequence[LoopbackWorker]) -> None:
    clock.advance(0.01)
    for worker in workers:
        if not worker.session.ended.is_set():
            worker.session.receive(plan_pb2.AttachRequest(heartbeat=plan_pb2.Heartbeat(num_plans_waiting=1)))
            await worker.turn()
    fleet.tick()


def heal(fleet: InspectedFleet, workers: Sequence[LoopbackWorker]) -> list[LoopbackWorker]:
    """Those whose session ended attach again as the same process, if they may."""
    again: list[LoopbackWorker] = []
    for worker in workers:
        if worker.session.ended.is_set():
            try:
                again.append(type(worker)(fleet, worker.session.worker_id, last_epoch=worker.session.epoch))
                continue
            except WorkerQuarantined:
                pass
        again.append(worker)
    return again


async def test_one_sick_worker_of_three_fails_no_request_and_is_quarantined(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    workers = [SickWorker(fleet, "sick"), LoopbackWorker(fleet, "w1"), LoopbackWorker(fleet, "w2")]
    requests, readers, num_sessions = [], [], 1
    for number in range(300):
        requests.append(make_request(fleet, [number % 250, 3], 40))
        readers.append(asyncio.create_task(read_all(fleet.submit(requests[-1]))))
        await turn_all(clock, fleet, workers)
        again = heal(fleet, workers)
        num_sessions += again[0] is not workers[0]
        workers = again
    for _ in range(200):
        await turn_all(clock, fleet, workers)
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    assert 2 <= num_sessions <= 4, "pauses of 1, 2 and 4 s in 5 s"


@pytest.mark.parametrize("num_sick", [2, 3])
async def test_several_workers_that_are_sick_at_once_fail_no_request(clock: FakeClock, num_sick: int) -> None:
    """As those of one machine. Each is idle at once, and so the first that another one's requests are offered to."""
    fleet = make_fleet(clock)
    workers: list[LoopbackWorker] = [SickWorker(fleet, f"sick{number}") for number in range(num_sick)]
    workers += [LoopbackWorker(fleet, "sound0"), LoopbackWorker(fleet, "sound1")]
    requests, readers = [], []
    for number in range(200):
        requests.append(make_request(fleet, [number % 250, 3], 20))
        readers.append(asyncio.create_task(read_all(fleet.submit(requests[-1]))))
        await turn_all(clock, fleet, workers)
        workers = heal(fleet, workers)
    for _ in range(200):
        await turn_all(clock, fleet, workers)
    assert [await reader for reader in readers] == [expected(request) for request in requests]


async def test_workers_that_become_sick_together_fail_no_request_that_runs(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    sick = [SickWorker(fleet, f"sick{number}") for number in range(2)]
    for worker in sick:
        worker.is_sick = lambda _slot: False
    workers = [*sick, LoopbackWorker(fleet, "sound")]
    requests = [make_request(fleet, [number, 3], 60) for number in range(24)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    for _ in range(4):
        await turn_all(clock, fleet, workers)
    assert all(len(worker.session.steps.running_request_ids) >= MAX_NOT_FINITE for worker in sick)
    for worker in sick:
        worker.is_sick = lambda _slot: True
    for _ in range(300):
        await turn_all(clock, fleet, workers)
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    assert [worker.session.end_cause for worker in sick] == [EndCause.SICK, EndCause.SICK]


async def test_a_request_that_is_not_finite_anywhere_is_tried_at_few_workers_though_none_gave_tokens(
    clock: FakeClock,
) -> None:
    fleet = make_fleet(clock)
    request = make_request(fleet, [3, 1], 40)
    bad = expected(request)[0]
    faults = HashEngineFaults(non_finite_token=bad)
    workers = [LoopbackWorker(fleet, f"w{number}", faults=faults) for number in range(MAX_CHECKS + 3)]
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    for _ in range(60):
        await turn_all(clock, fleet, workers)
    with pytest.raises(NotFinite):
        await reader
    assert not any(worker.session.ended.is_set() for worker in workers)
    assert sum(len(worker.plans) > 0 for worker in workers) == MAX_CHECKS


async def test_an_only_workers_word_on_logits_is_final(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    sick = SickWorker(fleet, "sick")
    stream = fleet.submit(make_request(fleet, [3], 20))
    await sick.turn()
    with pytest.raises(NotFinite):
        await read_all(stream)
    assert not sick.session.ended.is_set(), "nobody else could serve"


async def test_logits_that_no_worker_finds_finite_are_the_requests_fault(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    request = make_request(fleet, [3, 1], 40)
    bad = expected(request)[5]
    workers = [LoopbackWorker(fleet, f"w{i}", faults=HashEngineFaults(non_finite_token=bad)) for i in range(3)]
    stream = fleet.submit(request)
    reader = asyncio.create_task(read_all(stream))
    for _ in range(40):
        await turn_all(clock, fleet, workers)
    with pytest.raises(NotFinite):
        await reader
    assert not any(worker.session.ended.is_set() for worker in workers)
    assert sum(len(worker.plans) > 0 for worker in workers) == 2, "it is tried at one other worker"


async def test_a_request_keeps_its_tokens_where_it_goes_on(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    request = make_request(fleet, [3, 1], 40)
    bad = expected(request)[20]
    first = LoopbackWorker(fleet, "w0", faults=HashEngineFaults(non_finite_token=bad))
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    for _ in range(3):
        await first.turn()
    other = LoopbackWorker(fleet, "w1")
    for _ in range(60):
        await turn_all(clock, fleet, [first, other])
    assert await reader == expected(request)
    assert first.session.end_cause is EndCause.SICK


async def test_several_completions_go_on_together(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    sick, other = SickWorker(fleet, "a"), LoopbackWorker(fleet, "b")
    request = make_request(fleet, [3], 20, num_samples=3, sampling=Sampling(temperature=1.0, seed=5))
    stream = fleet.submit(request)
    assert fleet.parts.jobs.by_id[request.request_id].session is sick.session
    got: list[list[int]] = [[], [], []]

    async def read() -> None:
        async for event in stream:
            got[event.index] += event.token_ids

    reader = asyncio.create_task(read())
    for _ in range(60):
        await turn_all(clock, fleet, [sick, other])
    await reader
    assert got == [expected(request, index) for index in range(3)]


@pytest.mark.parametrize("num_adapters", [1, 2])
async def test_one_adapter_alone_does_not_make_its_worker_sick_but_two_do(clock: FakeClock, num_adapters: int) -> None:
    """One may lie on the edge of its dtype's range, so that it is finite at one worker and not at another."""
    fleet = make_fleet(clock)
    sick, other = SickWorker(fleet, "a"), LoopbackWorker(fleet, "b")
    sick.is_sick = lambda slot: slot is not None
    adapters = [fleet.weights.add(f"a{i}") for i in range(num_adapters)]
    readers, requests = [], []
    for number in range(6):
        request = make_request(fleet, [number], 20, adapters[number % num_adapters])
        requests.append(request)
        stream = fleet.submit(request)
        job = fleet.parts.jobs.by_id[request.request_id]
        if job.session is other.session:  # let it begin where it fails
            fleet.parts.dispatcher.move(job, sick.session) if not sick.session.ended.is_set() else None
        readers.append(asyncio.create_task(read_all(stream)))
        for _ in range(20):
            await turn_all(clock, fleet, [sick, other])
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    assert sick.session.ended.is_set() == (num_adapters == 2)


async def test_a_worker_whose_every_step_raises_is_kept_out_and_marks_no_request_as_poison(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    sound = LoopbackWorker(fleet, "sound")
    sick = LoopbackWorker(fleet, "sick")
    requests, readers, num_sessions = [], [], 1
    for number in range(300):
        if number % 3 == 0:
            requests.append(make_request(fleet, [number % 250, 3], 20))
            readers.append(asyncio.create_task(read_all(fleet.submit(requests[-1]))))
        clock.advance(0.1)
        await sick.receive()
        if sick.results and not sick.session.ended.is_set():
            fault = plan_pb2.Fault(reason="MemoryError", step_id=1)
            sick.session.receive(plan_pb2.AttachRequest(fault=fault))
        elif not sick.session.ended.is_set():
            sick.session.receive(plan_pb2.AttachRequest(heartbeat=plan_pb2.Heartbeat()))
        sound.session.receive(plan_pb2.AttachRequest(heartbeat=plan_pb2.Heartbeat(num_plans_waiting=1)))
        await sound.turn()
        fleet.tick()
        [again] = heal(fleet, [sick])
        num_sessions += again is not sick
        sick = again
    for _ in range(100):
        await sound.turn()
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    assert 4 <= num_sessions <= 6, "pauses of 1, 2, 4, 8 and 16 s in 30 s"


async def test_a_poison_request_keeps_no_worker_out(clock: FakeClock) -> None:
    """It makes steps raise. Faults beside suspects, and faults that it explains, are not counted against the worker."""
    fleet = make_fleet(clock)
    stream = fleet.submit(make_request(fleet, [1], 40))
    worker = LoopbackWorker(fleet, "w0")
    pauses = []
    for _ in range(3):
        await worker.receive()
        worker.session.receive(plan_pb2.AttachRequest(fault=plan_pb2.Fault(reason="it broke", step_id=1)))
        try:
            fleet.parts.gate.quarantine.check("w0")
            pauses.append(0.0)
        except WorkerQuarantined as error:
            pauses.append(error.retry_after_s)
            clock.advance(error.retry_after_s)
        worker = LoopbackWorker(fleet, "w0", last_epoch=worker.session.epoch)
    assert stream.has_ended and pauses == [1.0, 2.0, 0.0]
    await worker.receive()
    worker.session.receive(plan_pb2.AttachRequest(fault=plan_pb2.Fault(reason="it broke", step_id=1)))
    with pytest.raises(WorkerQuarantined) as caught:
        fleet.parts.gate.quarantine.check("w0")
    assert caught.value.retry_after_s == 1.0, "the first one that is its own"
