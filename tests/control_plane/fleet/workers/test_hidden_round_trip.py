"""A worker far away, on a virtual clock: how much of its time it waits for plans. No machine is too busy for it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from contract.v1 import plan_pb2
from control_plane.fleet.requests.streams import JobStream
from control_plane.fleet.workers.round_trip import RoundTrip
from control_plane.scheduler.types import Request
from data_plane.wire import decode_steps, encode_output
from tests.fakes.fleet_rig import CAPACITIES, FakeClock, LoopbackWorker, expected, make_fleet, make_request

WARM_UP_S, MEASURE_S = 0.5, 1.0
ROWS = 6
LARGE = replace(CAPACITIES, max_rows=2 * ROWS, num_blocks=2048)  # nothing is short


class FarWorker(LoopbackWorker):
    """Every message takes a while, either way; a step takes its time; several plans queue up."""

    def __init__(self, clock: FakeClock, *, delay_s: float, step_s: float, plan_depth: int) -> None:
        super().__init__(make_fleet(clock, plan_depth=plan_depth), capacities=LARGE)
        self.clock, self.delay_s, self.step_s = clock, delay_s, step_s
        self.free_at_s = clock()  # when it is through with what it got
        self.busy_s: list[float] = []  # beginnings of steps
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._serial), act))

    async def next_event(self) -> None:
        """Whatever comes next, and what follows from it at once."""
        time_s, _, act = heapq.heappop(self._events)
        self.clock.now_s = time_s
        act()
        await asyncio.sleep(0)  # a pump that is due
        for message in self.session.outbox.take():
            self.at(time_s + self.delay_s, lambda message=message: self._arrived(message))  # type: ignore[misc]  # bound at once

    def tick(self) -> None:
        self.fleet.tick()
        self.session.receive(plan_pb2.AttachRequest(heartbeat=plan_pb2.Heartbeat()))
        self.at(self.clock() + 0.1, self.tick)

    def _arrived(self, message: plan_pb2.AttachResponse) -> None:
        if message.WhichOneof("message") == "ping":
            pong = plan_pb2.AttachRequest(pong=plan_pb2.Pong(sequence=message.ping.sequence))
            self.at(self.clock() + self.delay_s, lambda: self.session.receive(pong))
        elif message.WhichOneof("message") == "step_plan":
            for step in decode_steps(message.step_plan):
                begin_s = max(self.free_at_s, self.clock())
                self.busy_s.append(begin_s)
                self.free_at_s = begin_s + self.step_s
                output = replace(self.engine.execute(step), step_time_us=round(self.step_s * 1e6))
                result = encode_output(output, self.session.epoch)
                self.at(self.free_at_s + self.delay_s, lambda result=result: self.session.receive(result))  # type: ignore[misc]  # bound at once


async def busy_share(added_ms: float, step_ms: float, *, plan_depth: int = 2, lengths: tuple[int, int]) -> float:
    """Share of its time that the worker computes, with clients that send request after request."""
    clock = FakeClock()
    start_s = clock()
    worker = FarWorker(clock, delay_s=added_ms / 2000, step_s=step_ms / 1000, plan_depth=plan_depth)
    rng = random.Random(1)
    streams: list[tuple[Request, JobStream, list[int]]] = []
    worker.at(clock(), worker.tick)
    while clock() < start_s + WARM_UP_S + MEASURE_S:
        while len(streams) < ROWS:
            request = make_request(worker.fleet, [rng.randrange(256) for _ in range(8)], rng.randint(*lengths))
            streams.append((request, worker.fleet.submit(request), []))
        await worker.next_event()
        for request, stream, tokens in list(streams):
            while stream.num_unread_tokens:
                tokens += (await anext(stream)).token_ids
            if stream.has_ended:
                assert tokens == expected(request)
                streams.remove((request, stream, tokens))
    end_s = clock()
    return sum(step_ms / 1000 for begin_s in worker.busy_s if start_s + WARM_UP_S <= begin_s < end_s) / (
        end_s - start_s - WARM_UP_S
    )


@pytest.mark.parametrize("lengths", [(1000, 1000), (1, 120)], ids=["long", "ending and beginning"])
@pytest.mark.parametrize(("added_ms", "least"), [(0.0, 0.999), (5.0, 0.98), (10.0, 0.98)])
async def test_a_longer_way_costs_next_to_nothing(added_ms: float, least: float, lengths: tuple[int, int]) -> None:
    for step_ms in (5.0, 8.0):
        assert await busy_share(added_ms, step_ms, lengths=lengths) >= least


@pytest.mark.parametrize("plan_depth", [3, 4])
async def test_a_greater_plan_depth_hides_as_much(plan_depth: int) -> None:
    assert await busy_share(10.0, 5.0, plan_depth=plan_depth, lengths=(1000, 1000)) >= 0.95


async def test_without_running_ahead_the_worker_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above would show if the way were not hidden."""
    assert await busy_share(10.0, 5.0, plan_depth=1, lengths=(1000, 1000)) < 0.4
    monkeypatch.setattr(RoundTrip, "steps_to_hide", lambda _self: 1)
    assert await busy_share(10.0, 5.0, lengths=(1000, 1000)) < 0.7
