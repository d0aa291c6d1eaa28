"""What the schedulers return reaches the streams, and what readers cancel is given up."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from control_plane.scheduler.types import FinishReason
from tests.fakes.fleet_rig import (
    FakeClock,
    LoopbackWorker,
    expected,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.fleet_steps import assert_nothing_held, run_with


async def test_events_coalesce_what_is_pending_and_say_why_they_end(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    request = make_request(fleet, [1, 2], 12)
    stop = replace(request, request_id=fleet.next_request_id(), stop_token_ids=frozenset([expected(request)[4]]))
    clock.advance(0.25)
    streams = [fleet.submit(request), fleet.submit(stop)]
    await worker.run(lambda: fleet.queue_snapshot().num_requests == 0)
    for stream, num_tokens, reason in zip(
        streams, (12, 5), (FinishReason.LENGTH, FinishReason.STOP_TOKEN), strict=True
    ):
        events = [event async for event in stream]
        assert [(event.token_ids, event.finish_reason) for event in events] == [
            (expected(request)[:num_tokens], reason)
        ]
        assert events[0].queue_time_s == 0.25


async def test_cancelled_requests_free_blocks_and_slots(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapter = fleet.weights.add("a")
    streams = [fleet.submit(make_request(fleet, [i], 500, adapter)) for i in range(20)]  # 16 rows: 4 wait
    for _ in range(10):
        await worker.turn()
    for stream in streams:
        stream.cancel()
        stream.cancel()
        assert await read_all(stream) == []
    for _ in range(4):
        await worker.turn()
    assert_nothing_held(worker)
    await asyncio.wait_for(run_with(worker, fleet.unload(adapter.digest)), 10)
    assert worker.engine.slots.used_bytes() == 0
    assert fleet.placements(adapter.digest) == []
