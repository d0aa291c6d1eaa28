"""Adapters that are unloaded from every worker, and adapters that are pinned there."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from control_plane.errors import (
    AdapterTooLarge,
)
from control_plane.scheduler.types import AdapterRef
from tests.fakes.fleet_rig import (
    CAPACITIES,
    FakeClock,
    LoopbackWorker,
    expected,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.fleet_steps import reader_tokens, run_all


async def test_unload_waits_for_requests_that_use_the_adapter(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapter = fleet.weights.add("a")
    request = make_request(fleet, [1], 30, adapter)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    for _ in range(8):
        await worker.turn()
    assert fleet.placements(adapter.digest) == ["w0"]
    unloaded = asyncio.create_task(fleet.unload(adapter.digest))
    await worker.run(lambda: len(reader_tokens(reader)) == 30)
    await worker.run(unloaded.done)
    assert await reader == expected(request)
    assert not worker.session.scheduler.adapter_use(adapter.digest).is_held


async def test_unload_ends_when_another_name_wants_the_adapter(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapter = fleet.weights.add("a")
    request = make_request(fleet, [1], 30, adapter)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await worker.turn()
    unloaded = asyncio.create_task(fleet.unload(adapter.digest))
    await worker.turn()
    assert not unloaded.done()
    fleet.cancel_unload(adapter.digest)
    await asyncio.wait_for(unloaded, 60)
    assert not reader.done()
    await worker.run(reader.done)
    assert await reader == expected(request)


async def test_pin_holds_on_every_worker_until_it_is_taken_back(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    small = replace(CAPACITIES, num_slots=2)
    workers = [LoopbackWorker(fleet, "w0", capacities=small)]
    pinned, *others = (fleet.weights.add(name) for name in "abc")
    fleet.pin(pinned)
    workers.append(LoopbackWorker(fleet, "w1", capacities=small))  # attached after the pin

    async def use(adapter: AdapterRef) -> None:
        """One request with the adapter on each worker."""
        for worker in workers:
            worker.session.add(make_request(fleet, [1], 1, adapter))
            await worker.run(lambda: len(worker.session.scheduler.request_ids) == 0)  # noqa: B023 - awaited here

    for adapter in (pinned, *others):
        await use(adapter)
    assert fleet.placements(pinned.digest) == ["w0", "w1"]
    fleet.unpin(pinned.digest)  # no request with the adapter follows
    for adapter in others:
        await use(adapter)
    assert fleet.placements(pinned.digest) == []


async def test_what_pinned_adapters_leave_no_room_for_is_reported_at_once(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, num_slots=1))
    pinned, other = (fleet.weights.add(name) for name in "ab")
    fleet.pin(pinned)
    await run_all(worker, [fleet.submit(make_request(fleet, [1], 2, pinned))])
    stream = fleet.submit(make_request(fleet, [1], 2, other))
    await asyncio.sleep(0)  # the pump: nothing is sent, nothing will be answered
    with pytest.raises(AdapterTooLarge):
        async with asyncio.timeout(10):
            await read_all(stream)
