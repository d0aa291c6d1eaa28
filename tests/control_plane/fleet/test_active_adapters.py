"""Which adapters unfinished requests use: what a status says of the batches."""

from __future__ import annotations

import asyncio

from control_plane.fleet.requests.active_adapters import AdapterLoad
from control_plane.scheduler.types import AdapterUse, Combination, Composition
from tests.fakes.fleet_rig import FakeClock, LoopbackWorker, make_fleet, make_request, read_all


async def test_adapters_are_counted_by_their_running_and_waiting_requests_busiest_first(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    a, b = fleet.weights.add("a"), fleet.weights.add("b")
    both = Composition((AdapterUse(a), AdapterUse(b, 0.5)), Combination.CAT)
    requests = [make_request(fleet, [1], 50), make_request(fleet, [2], 50, a)]
    requests += [make_request(fleet, [3], 50, composition=both) for _ in range(2)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    await asyncio.sleep(0)
    assert fleet.active_adapters.busiest(8) == (
        [AdapterLoad(a.digest, 0, 3), AdapterLoad(b.digest, 0, 2), AdapterLoad("", 0, 1)],
        0,
    )
    worker = LoopbackWorker(fleet)  # it loads single adapters only
    for _ in range(10):
        await worker.turn()
    assert fleet.active_adapters.busiest(8) == (
        [AdapterLoad(a.digest, 1, 2), AdapterLoad(b.digest, 0, 2), AdapterLoad("", 1, 0)],
        0,
    )
    assert fleet.active_adapters.busiest(1) == ([AdapterLoad(a.digest, 1, 2)], 2)
    await worker.run(lambda: readers[0].done() and readers[1].done())
    left, _ = fleet.active_adapters.busiest(8)
    assert {(load.digest, load.num_requests) for load in left} == {(a.digest, 2), (b.digest, 2)}
    await fleet.close()
    assert fleet.active_adapters.busiest(8) == ([], 0)
    await asyncio.gather(*readers, return_exceptions=True)
