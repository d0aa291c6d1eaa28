"""Requests that fit no worker, and requests whose deadline passes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from control_plane.errors import (
    AdapterTooLarge,
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    status_of,
)
from control_plane.scheduler.types import BeamSearch
from tests.fakes.fleet_rig import (
    CAPACITIES,
    FakeClock,
    LoopbackWorker,
    expected,
    make_fleet,
    make_request,
    read_all,
)
from tests.fakes.fleet_steps import assert_nothing_held, pass_time, run_all


async def test_request_that_never_fits_names_the_numbers(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    waiting = fleet.submit(make_request(fleet, [1] * 100, 1000))
    LoopbackWorker(fleet, capacities=replace(CAPACITIES, num_blocks=100))
    with pytest.raises(ContextTooLong, match=r"100 tokens and max_tokens 1000.*275 KV blocks.*100") as caught:
        await read_all(waiting)
    assert caught.value.violations[0].field == "stopping.max_tokens"
    with pytest.raises(ContextTooLong):
        fleet.submit(make_request(fleet, [1] * 100, 1000))
    large = LoopbackWorker(fleet, "large", capacities=replace(CAPACITIES, num_blocks=1000))
    request = make_request(fleet, [1] * 100, 1000)
    assert await run_all(large, [fleet.submit(request)]) == [expected(request)]


async def test_request_runs_where_its_context_fits_and_is_never_cut(clock: FakeClock) -> None:
    """Of workers with different contexts the short one would have ended it early."""
    fleet = make_fleet(clock)
    short = LoopbackWorker(fleet, "a-short", capacities=replace(CAPACITIES, max_model_len=32))
    with pytest.raises(ContextTooLong, match=r"5 tokens and max_tokens 40: together .* context of 32 tokens"):
        fleet.submit(make_request(fleet, [1] * 5, 40))
    long = LoopbackWorker(fleet, "b-long", capacities=replace(CAPACITIES, max_model_len=64))
    assert [report.max_model_len for report in fleet.reports()] == [32, 64]
    assert [worker.max_model_len for worker in fleet.worker_snapshots()] == [32, 64]
    requests = [make_request(fleet, [1] * 5, 40), make_request(fleet, [2] * 5, 27)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    assert fleet.parts.jobs.by_id[requests[0].request_id].session is long.session
    await pass_time(clock, fleet, [short, long], 1.0)
    assert [reader.result() for reader in readers] == [expected(request) for request in requests]


async def test_adapter_larger_than_every_arena_is_refused(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    LoopbackWorker(fleet, capacities=replace(CAPACITIES, arena_bytes=100))
    adapter = fleet.weights.add("a")
    with pytest.raises(AdapterTooLarge, match=f"takes {adapter.arena_bytes} bytes, more than") as caught:
        fleet.submit(make_request(fleet, [1], 5, adapter))
    assert status_of(caught.value) is grpc.StatusCode.FAILED_PRECONDITION  # which no client tries again


async def test_deadline_ends_running_and_waiting_requests(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    unplaced = fleet.submit(make_request(fleet, [1], 500, deadline_s=clock() + 0.5))
    clock.advance(0.5)
    fleet.tick()
    assert unplaced.has_ended and fleet.queue_snapshot().num_requests == 0, "without a worker, too"
    with pytest.raises(DeadlineExceeded):
        await read_all(unplaced)
    worker = LoopbackWorker(fleet)
    stream = fleet.submit(make_request(fleet, [1], 500, deadline_s=clock() + 1))
    for _ in range(5):
        await worker.turn()
    clock.advance(1)
    fleet.tick()
    for _ in range(3):
        await worker.turn()
    with pytest.raises(DeadlineExceeded):
        await read_all(stream)
    assert_nothing_held(worker)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"num_samples": 17}, "decoding.best_of"), ({"beam": BeamSearch(17)}, "decoding.beam_search.width")],
)
async def test_more_completions_than_a_worker_has_rows_are_refused(
    clock: FakeClock, fields: dict[str, Any], field: str
) -> None:
    fleet = make_fleet(clock)
    LoopbackWorker(fleet)
    with pytest.raises(InvalidRequest) as caught:
        fleet.submit(make_request(fleet, [1, 2], 4, **fields))
    assert caught.value.violations[0].field == field
    assert all(part in str(caught.value) for part in ("17 sequences", "16 rows", "--max-rows"))
    assert fleet.queue_snapshot().num_requests == 0 and fleet.tenant_use()[0].num_requests == 0
