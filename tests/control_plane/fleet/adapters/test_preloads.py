"""Versions that are loaded into slots before their first request."""

from __future__ import annotations

import asyncio

from tests.fakes.fleet_rig import FakeClock, LoopbackWorker, expected, make_fleet, make_request, read_all


async def test_a_version_is_loaded_where_the_one_before_it_is(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    first, second = LoopbackWorker(fleet, "w0"), LoopbackWorker(fleet, "w1")
    old, new = fleet.weights.add("old"), fleet.weights.add("new")
    reader = asyncio.create_task(read_all(fleet.submit(make_request(fleet, [1], 3, old))))
    while not reader.done():
        await first.turn()
        await second.turn()
    holders = fleet.placements(old.digest)
    assert len(holders) == 1
    chosen = fleet.preloads.choose_workers(old.digest)
    assert [session.worker_id for session in chosen] == holders
    loading = asyncio.create_task(fleet.preloads.preload(new, "tenant", chosen))
    while not loading.done():
        await first.turn()
        await second.turn()
    assert await loading == holders == fleet.placements(new.digest)
    request = make_request(fleet, [2], 4, new)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    while not reader.done():
        await first.turn()
        await second.turn()
    assert await reader == expected(request) and fleet.placements(new.digest) == holders


async def test_a_first_version_goes_to_one_worker_and_a_preload_ends_with_its_session(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    assert fleet.preloads.choose_workers("") == []
    worker = LoopbackWorker(fleet, "w0")
    LoopbackWorker(fleet, "w1")
    chosen = fleet.preloads.choose_workers("f" * 64)
    assert len(chosen) == 1
    loading = asyncio.create_task(fleet.preloads.preload(fleet.weights.add("a"), "tenant", [worker.session]))
    await asyncio.sleep(0)
    assert not loading.done()
    worker.leave()
    assert await loading == []


async def test_a_preload_without_room_is_given_up_in_time(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapter = fleet.weights.add("a")
    assert await fleet.preloads.preload(adapter, "tenant", [worker.session], timeout_s=0.0) == []
    assert not worker.session.scheduler.preloads.is_open(adapter.digest)
