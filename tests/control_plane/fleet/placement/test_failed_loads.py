"""Adapters that a worker cannot load, and where requests with an adapter go."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from control_plane.errors import (
    AdapterDamaged,
    AdapterLoadFailed,
    AdapterNotServed,
    AdapterTooLarge,
)
from control_plane.fleet.requests.streams import MAX_UNREAD_TOKENS
from control_plane.fleet.settings import PlacementCosts
from control_plane.scheduler.types import AdapterUse, Combination, Composition, Request
from data_plane.errors import AdapterMismatch
from tests.fakes.fleet_rig import (
    CAPACITIES,
    FakeClock,
    InspectedFleet,
    LoopbackWorker,
    expected,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.fleet_steps import pass_time, run_all


async def test_adapter_that_does_not_fit_the_model_fails_for_good_with_the_reason(clock: FakeClock) -> None:
    """Not as "try again": no try will help. Waiting requests were admitted before a worker could tell."""
    fleet = make_fleet(clock)
    adapter = fleet.weights.add("a")
    waiting = fleet.submit(make_request(fleet, [1, 2], 5, adapter))
    workers = [LoopbackWorker(fleet, f"w{i}") for i in range(2)]
    for worker in workers:
        worker.engine.hash_slots.failing[adapter.digest] = AdapterMismatch("the model has no linear layers.9.up")
    reader = asyncio.create_task(read_all(waiting))
    await pass_time(clock, fleet, workers, 2.0)
    with pytest.raises(AdapterNotServed, match=f"adapter {adapter.digest[:12]}: the model has no linear layers.9.up"):
        await reader
    workers[1].engine.hash_slots.failing.clear()
    request = make_request(fleet, [1, 2], 5, adapter)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await pass_time(clock, fleet, workers, 2.0)
    assert reader.result() == expected(request)  # one of them can


async def test_store_that_is_away_for_five_seconds_only_delays(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapter = fleet.weights.add("a")
    worker.engine.hash_slots.failing[adapter.digest] = True
    request = make_request(fleet, [1, 2], 5, adapter)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await pass_time(clock, fleet, [worker], 5.0)
    assert not reader.done()
    assert worker.num_replies == 5  # loads, at 0, 0.25, 0.75, 1.75 and 3.75 s
    worker.engine.hash_slots.failing.clear()
    await pass_time(clock, fleet, [worker], 2.0)
    assert reader.done() and reader.result() == expected(request)


async def test_adapter_that_one_worker_cannot_load_is_tried_on_another(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    workers = [LoopbackWorker(fleet, f"w{i}") for i in range(3)]
    adapter = fleet.weights.add("a")
    for worker in workers[:2]:
        worker.engine.hash_slots.failing[adapter.digest] = False
    request = make_request(fleet, [1, 2], 5, adapter)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await pass_time(clock, fleet, workers, 1.5)
    assert reader.done() and reader.result() == expected(request)
    assert fleet.placements(adapter.digest) == ["w2"]
    assert fleet.queue_snapshot().num_requests == 0


async def test_adapter_that_no_worker_can_load_fails_after_one_try_on_each(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    workers = [LoopbackWorker(fleet, f"w{i}") for i in range(6)]
    adapter = fleet.weights.add("a")
    for worker in workers:
        worker.engine.hash_slots.failing[adapter.digest] = False
    for num_attached in (6, 2):  # the limit of migrations first, then too few workers
        for worker in workers[num_attached:]:
            worker.lose()
        before = sum(worker.num_replies for worker in workers)
        reader = asyncio.create_task(read_all(fleet.submit(make_request(fleet, [1, 2], 5, adapter))))
        await pass_time(clock, fleet, workers[:num_attached], 2.0)
        with pytest.raises(AdapterLoadFailed):
            await reader
        assert sum(worker.num_replies for worker in workers) - before == min(num_attached, 4)


async def test_damaged_weights_are_reported_as_what_they_are_without_a_wait(clock: FakeClock) -> None:
    """The worker gets a final error and the client the reason at once: before, it took 47 s to hear "try again"."""
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapter = fleet.weights.add("a")
    fleet.weights.damaged.add(adapter.digest)
    worker.engine.hash_slots.failing[adapter.digest] = False  # as FetchAdapter's DATA_LOSS makes it
    before_s = clock.now_s
    reader = asyncio.create_task(read_all(fleet.submit(make_request(fleet, [1, 2], 5, adapter))))
    await worker.run(reader.done)
    assert clock.now_s == before_s and worker.num_replies == 1
    with pytest.raises(AdapterDamaged):
        await reader


def combined_request(fleet: InspectedFleet) -> Request:
    """A request for two adapters at once."""
    refs = [fleet.weights.add(name) for name in ("one", "two")]
    composition = Composition(tuple(AdapterUse(ref, 1.0) for ref in refs), Combination.CAT)
    return replace(make_request(fleet, [1, 2], 5, refs[0]), composition=composition)


async def test_adapters_that_pins_leave_no_room_for_are_refused_with_their_own_size(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Not as "try again": a try helps only once something is unpinned. A pin may come after the request.

    An attack would read from the refusal how large the pinned adapters of other tenants are; the log has that.
    """
    caplog.set_level("INFO")
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, num_slots=2))
    pinned = fleet.weights.add("pinned")
    fleet.pin(pinned)
    await pass_time(clock, fleet, [worker], 2.0)
    assert fleet.placements(pinned.digest)
    reader = asyncio.create_task(read_all(fleet.submit(combined_request(fleet))))
    await pass_time(clock, fleet, [worker], 2.0)
    with pytest.raises(AdapterTooLarge, match=r" of 2048 bytes beside the pinned adapters; unpin") as caught:
        await reader
    assert "3072" not in str(caught.value) and "slots," not in str(caught.value)
    assert "its 2 adapters take 3072 bytes in 3 slots, the worker's arena has" in caplog.text
    fleet.unpin(pinned.digest)
    request = combined_request(fleet)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await pass_time(clock, fleet, [worker], 2.0)
    assert reader.result() == expected(request)


async def test_adapters_that_pins_leave_no_room_for_run_at_the_one_worker_that_has_room(clock: FakeClock) -> None:
    """However many workers have none: no load failed there, so none counts as a try."""
    fleet = make_fleet(clock)
    small = [LoopbackWorker(fleet, f"w{i}", capacities=replace(CAPACITIES, num_slots=2)) for i in range(6)]
    fleet.pin(fleet.weights.add("pinned"))
    await pass_time(clock, fleet, small, 2.0)
    workers = [*small, LoopbackWorker(fleet, "w9")]
    request = combined_request(fleet)
    reader = asyncio.create_task(read_all(fleet.submit(request)))
    await pass_time(clock, fleet, workers, 3.0)
    assert reader.done() and reader.result() == expected(request)


async def test_rebalancing_passes_over_what_failed_on_the_idle_worker(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    small = replace(CAPACITIES, max_rows=1)
    first = LoopbackWorker(fleet, "w0", capacities=small)
    adapter = fleet.weights.add("a")
    requests = [make_request(fleet, [i], 200) for i in range(6)] + [make_request(fleet, [99], 200, adapter)]
    for request in requests:
        fleet.submit(request)
    await first.turn()
    idle = LoopbackWorker(fleet, "w1", capacities=small)
    fleet.parts.jobs.by_id[requests[-1].request_id].failed_load_epochs.add(idle.session.epoch)
    fleet.tick()
    assert requests[-1].request_id in first.session.scheduler.request_ids
    assert set(idle.session.scheduler.request_ids) == {requests[-2].request_id}


async def test_tokens_from_before_a_failed_reload_are_kept_elsewhere(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    first = LoopbackWorker(fleet, "w0", capacities=replace(CAPACITIES, num_slots=1))
    adapter, other = (fleet.weights.add(name) for name in "ab")
    request = make_request(fleet, [1, 2], MAX_UNREAD_TOKENS + 50, adapter)
    stream = fleet.submit(request)
    await first.run(lambda: first.session.scheduler.stats().num_paused == 1)  # nobody reads
    assert await run_all(first, [fleet.submit(make_request(fleet, [3], 2, other))])  # takes the slot away
    assert fleet.placements(adapter.digest) == []
    second = LoopbackWorker(fleet, "w1")
    first.engine.hash_slots.failing[adapter.digest] = False
    reader = asyncio.create_task(read_all(stream))
    await first.run(lambda: len(first.session.scheduler.request_ids) == 0)
    await second.run(reader.done)
    assert reader.result() == expected(request)


async def test_requests_go_to_the_worker_that_holds_the_adapter_unless_it_is_busier(clock: FakeClock) -> None:
    fleet = make_fleet(clock, placement=PlacementCosts(load_ms=10.0))
    workers = {name: LoopbackWorker(fleet, name) for name in ("w0", "w1")}
    adapter = fleet.weights.add("a")
    first = fleet.submit(make_request(fleet, [0], 5))  # w0: equal cost goes to the lower id
    request = make_request(fleet, [1], 5, adapter)
    assert await run_all(workers["w1"], [fleet.submit(request)]) == [expected(request)]
    assert fleet.placements(adapter.digest) == ["w1"]
    await run_all(workers["w0"], [first])
    for i in range(8):
        fleet.submit(make_request(fleet, [i], 50, adapter))
    unfinished = {name: len(worker.session.scheduler.request_ids) for name, worker in workers.items()}
    # A request of 50 steps of 1 ms is 3.1 ms to the next one on 16 rows: the load is worth a little more than three.
    assert unfinished == {"w0": 2, "w1": 6}
