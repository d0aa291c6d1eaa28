"""A mistake of ours costs one request or one session, and nothing beside it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from control_plane.errors import (
    MotetError,
    status_of,
)
from control_plane.fleet.requests.jobs import Job
from control_plane.fleet.requests.streams import JobStream
from tests.fakes.fleet_rig import (
    FakeClock,
    LoopbackWorker,
    expected,
    let_time_pass,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.fleet_steps import assert_nothing_held


def break_stream(stream: JobStream, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    """Let these methods of a stream raise: a mistake about one request."""

    def fail(*_: object) -> None:
        raise AssertionError("the stream is inconsistent")

    for name in names:
        monkeypatch.setattr(stream, name, fail)


@pytest.mark.parametrize("names", [("push_token",), ("push",), ("push", "push_token", "fail")])
async def test_a_mistake_at_one_requests_tokens_loses_no_others(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    requests = [make_request(fleet, [i], 30) for i in range(5)]
    streams = [fleet.submit(request) for request in requests]
    readers = [asyncio.create_task(read_all(stream)) for stream in streams]
    break_stream(streams[2], monkeypatch, names)
    others = readers[:2] + readers[3:]
    await worker.run(lambda: all(reader.done() for reader in others))
    assert [await reader for reader in others] == [expected(r) for r in requests[:2] + requests[3:]]
    assert fleet.queue_snapshot().num_requests == 0 and fleet.num_workers == 1
    for _ in range(3):
        await worker.turn()
    assert_nothing_held(worker)
    if "fail" in names:
        readers[2].cancel()
    else:
        with pytest.raises(MotetError, match="internal error") as caught:
            await readers[2]
        assert status_of(caught.value) is grpc.StatusCode.INTERNAL


async def test_a_mistake_in_one_part_of_a_tick_skips_no_other(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock, slow_reader_timeout_s=2.0)
    worker = LoopbackWorker(fleet)
    slow = fleet.submit(make_request(fleet, [1], 700))
    for _ in range(400):
        await worker.turn()
    large = [3] * 3000  # fits no worker that is attached, and waits for one
    monkeypatch.setattr(fleet.parts.dispatcher, "place", lambda _job: None)
    streams = [fleet.submit(make_request(fleet, large, 10, deadline_s=clock() + 1)) for _ in range(3)]
    break_stream(streams[0], monkeypatch, ("fail",))

    def fail() -> None:
        raise AssertionError("a mistake")

    for owner, name in (
        (fleet.parts.dispatcher, "clear_survivors"),
        (fleet.parts.rebalancer, "rebalance"),
        (worker.session, "tick"),
    ):
        monkeypatch.setattr(owner, name, fail)
    ended = asyncio.create_task(fleet.shut_down(3.0))
    let_time_pass(clock, fleet, 1.1)
    assert [stream.has_ended for stream in streams[1:]] == [True, True]
    let_time_pass(clock, fleet, 1.5)
    assert slow.has_ended
    await asyncio.wait_for(ended, 30)
    assert fleet.queue_snapshot().num_requests == 0


async def test_a_mistake_at_placing_one_request_loses_none_behind_it(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock)
    requests = [make_request(fleet, [i], 20) for i in range(4)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    place = fleet.parts.dispatcher.place

    def break_at_the_second(job: Job) -> MotetError | None:
        assert job.request is not requests[1], "a mistake"
        return place(job)

    monkeypatch.setattr(fleet.parts.dispatcher, "place", break_at_the_second)
    worker = LoopbackWorker(fleet)
    await worker.run(lambda: all(reader.done() for reader in readers))
    with pytest.raises(MotetError, match="internal error"):
        await readers[1]
    rest = [(requests[i], readers[i]) for i in (0, 2, 3)]
    assert [await reader for _, reader in rest] == [expected(request) for request, _ in rest]


async def test_a_mistake_when_a_session_ends_leaves_no_request_waiting_for_ever(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    readers = [asyncio.create_task(read_all(fleet.submit(make_request(fleet, [i], 20)))) for i in range(3)]
    await worker.turn()

    def fail() -> None:
        raise AssertionError("the state is inconsistent")

    monkeypatch.setattr(worker.session.scheduler, "take_requests", fail)
    worker.lose()
    for reader in readers:
        with pytest.raises(MotetError, match="internal error"):
            await reader
    assert fleet.queue_snapshot().num_requests == 0 and fleet.num_workers == 0


async def test_a_mistake_at_ending_one_request_of_a_lost_worker_leaves_no_other_waiting_for_ever(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    readers = [asyncio.create_task(read_all(fleet.submit(make_request(fleet, [i], 20)))) for i in range(3)]
    await worker.turn()
    monkeypatch.setattr(worker.session.scheduler, "take_requests", list)  # so none of them can go on
    num_calls = 0

    def fail(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        raise AssertionError("a mistake")

    monkeypatch.setattr(fleet.parts.jobs, "fail", fail)
    worker.lose()
    assert num_calls == 1
    for reader in readers:
        with pytest.raises(MotetError, match="internal error"):
            await reader
    assert fleet.queue_snapshot().num_requests == 0 and fleet.num_workers == 0


async def test_a_mistake_at_judging_suspects_keeps_no_request_of_a_lost_worker(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    requests = [make_request(fleet, [i], 20) for i in range(3)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    await worker.turn()

    def fail() -> None:
        raise AssertionError("a mistake")

    monkeypatch.setattr(fleet.parts.dispatcher, "clear_survivors", fail)
    worker.lose()
    other = LoopbackWorker(fleet, "w1")
    await other.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    assert fleet.num_workers == 1, "the mistake is not that session's"
