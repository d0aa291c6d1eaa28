"""Adapters that are brought into arenas ahead of requests, taken out again, and kept there by pins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import TypeVar

from control_plane.fleet.adapters.residency import Outcome, PlaceResult
from control_plane.scheduler.types import AdapterRef
from tests.fakes.fleet_rig import CAPACITIES, FakeClock, LoopbackWorker, expected, make_fleet, make_request, read_all

T = TypeVar("T")
SMALL = replace(CAPACITIES, num_slots=2)


async def turned(work: Awaitable[T], *workers: LoopbackWorker) -> T:
    """The result of the work, while the workers do theirs."""
    task = asyncio.ensure_future(work)
    while not task.done():
        for worker in workers:
            await worker.turn()
    return await task


async def test_a_load_reports_every_worker_and_the_first_request_finds_it_there(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    first, second = LoopbackWorker(fleet, "w0"), LoopbackWorker(fleet, "w1")
    adapter = fleet.weights.add("a")
    load = fleet.residency.load
    assert await turned(load(adapter, "t", ["w0"], 30.0), first, second) == [PlaceResult(Outcome.LOADED, "w0")]
    results = await turned(load(adapter, "t", ["w1", "w0", "gone"], 30.0), first, second)
    assert [(result.worker_id, result.outcome) for result in results] == [
        ("w1", Outcome.LOADED),
        ("w0", Outcome.WAS_LOADED),
        ("gone", Outcome.FAILED),
    ]
    request = make_request(fleet, [1], 3, adapter)
    assert await turned(read_all(fleet.submit(request)), first, second) == expected(request)


async def test_a_load_evicts_idle_adapters_and_nothing_that_is_used_or_pinned(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet, capacities=SMALL)
    idle, used, more, pinned = (fleet.weights.add(name) for name in ("idle", "used", "more", "pinned"))
    await turned(fleet.residency.load(idle, "t", ["w0"], 30.0), worker)
    request = make_request(fleet, [1], 40, used)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    for _ in range(6):
        await worker.turn()
    assert fleet.placements(used.digest) == fleet.placements(idle.digest) == ["w0"]
    [result] = await turned(fleet.residency.load(more, "t", ["w0"], 30.0), worker)
    assert result.outcome is Outcome.LOADED and fleet.placements(idle.digest) == []
    fleet.pin(more)
    [refused] = await turned(fleet.residency.load(pinned, "t", ["w0"], 30.0), worker)
    assert refused.outcome is Outcome.NO_ROOM and "slot" in refused.reason
    await worker.run(reader.done)
    assert await reader == expected(request)
    too_large = AdapterRef("e" * 64, CAPACITIES.arena_bytes + 7)
    [result] = await fleet.residency.load(too_large, "t", ["w0"], 30.0)
    assert result.outcome is Outcome.NO_ROOM and result.missing_bytes == 7


async def test_an_unload_waits_for_requests_and_a_pin_keeps(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapter = fleet.weights.add("a")
    unload = fleet.residency.unload
    assert await unload(adapter.digest, ["w0"], 30.0) == [PlaceResult(Outcome.WAS_ABSENT, "w0")]
    request = make_request(fleet, [1], 30, adapter)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    for _ in range(8):
        await worker.turn()
    assert await unload(adapter.digest, ["w0"], 0.0) == [PlaceResult(Outcome.IN_USE, "w0")]
    assert await turned(unload(adapter.digest, ["w0"], 30.0), worker) == [PlaceResult(Outcome.UNLOADED, "w0")]
    assert await reader == expected(request) and fleet.placements(adapter.digest) == []
    fleet.pin(adapter)
    assert await unload(adapter.digest, ["w0"], 30.0) == [PlaceResult(Outcome.PINNED, "w0")]
    again = make_request(fleet, [1], 3, adapter)
    assert await turned(read_all(fleet.submit(again)), worker) == expected(again)


async def test_a_pin_loads_at_every_worker_also_at_one_that_attaches_later(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    first = LoopbackWorker(fleet, "w0")
    adapter = fleet.weights.add("a")
    fleet.pin(adapter, "t")
    await first.run(lambda: fleet.placements(adapter.digest) == ["w0"])
    second = LoopbackWorker(fleet, "w1")
    await second.run(lambda: fleet.placements(adapter.digest) == ["w0", "w1"])
    fleet.unpin(adapter.digest)
    LoopbackWorker(fleet, "w2")
    fleet.residency.load_pinned()
    assert fleet.placements(adapter.digest) == ["w0", "w1"]


async def test_pins_fill_only_a_part_of_an_arena(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, num_slots=4))
    pinned = [fleet.weights.add(f"p{number}") for number in range(4)]
    for adapter in pinned:
        fleet.pin(adapter)
    for _ in range(30):
        await worker.turn()
        fleet.residency.load_pinned()
    assert sum(bool(fleet.placements(adapter.digest)) for adapter in pinned) == 2
    request = make_request(fleet, [1], 3, fleet.weights.add("other"))
    assert await turned(read_all(fleet.submit(request)), worker) == expected(request)
