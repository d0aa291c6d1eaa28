"""The fleet as a whole: what workers compute reaches the streams, token for token, and plans hide the way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.fakes.fleet_rig import (
    CAPACITIES,
    FakeClock,
    LoopbackWorker,
    expected,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.fleet_steps import assert_nothing_held, heartbeat, run_all


async def test_mixed_adapters_in_one_batch_give_the_oracles_tokens(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapters = [None, *(fleet.weights.add(f"a{i}") for i in range(6))]  # more than the four slots
    requests = [make_request(fleet, [i, 5], 20 + i, adapters[i % 7]) for i in range(28)]
    tokens = await run_all(worker, [fleet.submit(request) for request in requests])
    assert tokens == [expected(request) for request in requests]
    assert_nothing_held(worker)
    assert sorted(set(fleet.weights.cached)) == sorted(adapter.digest for adapter in adapters if adapter)


async def test_adapters_share_no_prefix_and_one_adapter_does(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    adapter = fleet.weights.add("a")
    prompt = list(range(1, 30))
    for ref in (None, adapter, adapter, None):
        request = make_request(fleet, prompt, 6, ref)
        assert await run_all(worker, [fleet.submit(request)]) == [expected(request)]
    snapshot = worker.session.snapshot()
    assert snapshot.prefix_hit_tokens == 2 * 28


async def test_preempted_requests_still_give_the_oracles_tokens(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, num_blocks=24))
    requests = [make_request(fleet, [i, 2, 3], 60) for i in range(6)]
    tokens = await run_all(worker, [fleet.submit(request) for request in requests])
    assert tokens == [expected(request) for request in requests]
    assert worker.session.snapshot().num_preemptions > 0
    assert_nothing_held(worker)


async def test_a_plan_is_sent_before_the_result_of_the_one_before(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    fleet.submit(make_request(fleet, [1, 2], 50))
    await worker.receive()
    assert [plan.step_id for plan in worker.plans] == [1, 2]
    for step_id in range(1, 20):
        worker.reply(1)  # result n arrives after plan n + 1 was sent, and brings plan n + 2
        assert worker.session.snapshot().num_plans_in_flight == 2
        await worker.receive()
        assert worker.plans[-1].step_id == step_id + 2


async def test_a_long_way_lets_plans_stand_for_several_steps(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    requests = [make_request(fleet, [i, 2], 100 + i) for i in range(4)]
    streams = [fleet.submit(request) for request in requests]
    readers = [asyncio.create_task(read_all(stream)) for stream in streams]
    for _ in range(10):
        await worker.turn()
    assert all(plan.num_steps == 0 for plan in worker.plans)  # the first pong came at once
    for _ in range(8):
        clock.advance(0.5)
        worker.session.receive(heartbeat())
        fleet.tick()
        await worker.receive()
        clock.advance(0.05)  # the way of the pong
        worker.reply()
    snapshot = worker.session.snapshot()
    assert (snapshot.max_plan_steps, round(snapshot.round_trip_ms)) == (4, 50)
    await worker.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    assert max(plan.num_steps for plan in worker.plans) == 4
    assert len(worker.plans) < worker.session.snapshot().num_steps
    assert_nothing_held(worker)


async def test_a_worker_lost_amid_a_repeated_plan_loses_and_repeats_no_token(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet, "w0")
    requests = [make_request(fleet, [i, 2], 100) for i in range(4)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    while not (worker.plans and worker.plans[-1].num_steps == 4):
        clock.advance(0.5)
        worker.session.receive(heartbeat())
        fleet.tick()
        await worker.receive()
        clock.advance(0.05)
        worker.reply()
    await worker.receive()
    worker.reply(2)  # of the four steps
    worker.lose()
    other = LoopbackWorker(fleet, "w1")
    await other.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]


async def test_a_burst_of_requests_makes_one_plan(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    for i in range(10):
        fleet.submit(make_request(fleet, [i], 5))
    await worker.receive()
    assert len(worker.plans[0].new_rows) == 10
