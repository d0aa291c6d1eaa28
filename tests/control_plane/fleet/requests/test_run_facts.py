"""What a stream knows, at its end, of where its request was computed and how much of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from control_plane.errors import DeadlineExceeded
from control_plane.fleet.requests.streams import JobStream, Place
from control_plane.scheduler.types import SlotRef
from tests.fakes.fleet_rig import CAPACITIES, FakeClock, LoopbackWorker, make_fleet, make_request, read_all
from tests.fakes.fleet_steps import run_all


async def test_a_request_that_ends_knows_worker_slot_and_tokens(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    with_adapter = fleet.submit(make_request(fleet, [1, 2], 20, fleet.weights.add("a")))
    base = fleet.submit(make_request(fleet, [3, 4], 30))
    await run_all(worker, [with_adapter, base])
    epoch = worker.session.epoch
    assert with_adapter.facts.places == [Place("w0", epoch, SlotRef(0, 1))]
    assert base.facts.places == [Place("w0", epoch, None)]
    assert (with_adapter.facts.num_new_tokens, base.facts.num_new_tokens) == (20, 30)
    assert base.facts.queue_time_s == 0.0


async def test_the_generation_of_a_slot_counts_its_loads(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, num_slots=1))
    slots = []
    for name in ("a", "b", "a"):
        stream = fleet.submit(make_request(fleet, [1, 2], 5, fleet.weights.add(name)))
        await run_all(worker, [stream])
        slots += [place.slot for place in stream.facts.places]
    assert slots == [SlotRef(0, 1), SlotRef(0, 2), SlotRef(0, 3)]


async def test_a_request_that_moves_to_another_worker_knows_both(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    first, adapter = LoopbackWorker(fleet, "w0"), fleet.weights.add("a")
    stream = fleet.submit(make_request(fleet, [1, 2], 50, adapter))
    reader = asyncio.create_task(read_all(stream))
    await first.run(lambda: bool(stream.facts.places))
    second = LoopbackWorker(fleet, "w1")
    first.lose()
    await second.run(reader.done)
    assert [(place.worker_id, place.slot) for place in stream.facts.places] == [
        ("w0", SlotRef(0, 1)),
        ("w1", SlotRef(0, 1)),
    ]
    assert stream.facts.num_new_tokens == 50 == len(await reader)


async def test_requests_that_are_preempted_and_come_back_to_the_same_slot_name_it_once(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker, adapter = LoopbackWorker(fleet, capacities=replace(CAPACITIES, num_blocks=24)), fleet.weights.add("a")
    streams = [fleet.submit(make_request(fleet, [i, 2, 3], 60, adapter)) for i in range(6)]
    await run_all(worker, streams)
    assert worker.session.snapshot().num_preemptions > 0
    assert [len(stream.facts.places) for stream in streams] == [1] * 6
    assert [stream.facts.num_new_tokens for stream in streams] == [60] * 6


async def test_a_request_that_is_cancelled_in_its_prompt_knows_its_worker(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker, adapter = LoopbackWorker(fleet), fleet.weights.add("a")
    stream = fleet.submit(make_request(fleet, list(range(200)), 50, adapter))
    await worker.run(lambda: bool(worker.plans))
    assert stream.facts.places == []
    stream.cancel()
    assert stream.facts.places == [Place("w0", worker.session.epoch, SlotRef(0, 1))]
    assert stream.facts.num_new_tokens == 0


async def test_a_request_that_never_ran_was_nowhere(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, max_rows=1))
    running = fleet.submit(make_request(fleet, [1], 50))
    late = fleet.submit(make_request(fleet, [2], 50, deadline_s=clock.now_s + 1))
    given_up = fleet.submit(make_request(fleet, [3], 50))
    await worker.run(lambda: bool(running.facts.places))
    given_up.cancel()
    clock.advance(1)
    fleet.tick()
    with pytest.raises(DeadlineExceeded):
        await anext(late)
    for stream in (late, given_up):
        assert (stream.facts.places, stream.facts.queue_time_s, stream.facts.num_new_tokens) == ([], None, 0)


def test_a_request_that_comes_back_to_another_slot_names_both() -> None:
    stream = JobStream(lambda: None, lambda: None, lambda _index: None)
    for slot in (SlotRef(0, 1), SlotRef(0, 1), SlotRef(0, 2), SlotRef(3, 2)):
        stream.note_place("w0", 7, slot)
    stream.note_place("w0", 8, SlotRef(3, 2))
    assert [(place.epoch, place.slot) for place in stream.facts.places] == [
        (7, SlotRef(0, 1)),
        (7, SlotRef(0, 2)),
        (7, SlotRef(3, 2)),
        (8, SlotRef(3, 2)),
    ]
