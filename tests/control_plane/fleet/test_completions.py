"""Requests for several completions in the fleet: moved off a lost worker, cancelled in part, read slowly."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from contract.v1 import plan_pb2
from control_plane.errors import DeadlineExceeded, NotFinite
from control_plane.fleet.requests.streams import MAX_UNREAD_TOKENS, JobEvent, JobStream
from control_plane.fleet.tenants import TenantLimits, TenantTable
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.types import BeamSearch, FinishReason, Request, RequestId, Sampling, sample_seed
from tests.fakes.fleet_rig import (
    CAPACITIES,
    FINGERPRINT,
    FakeClock,
    InspectedFleet,
    LoopbackWorker,
    make_fleet,
    make_request,
)
from tests.fakes.hash_model import oracle

PROMPT = [1, 2, 3, 4, 5, 6]


def expected(request: Request, index: int) -> list[int]:
    seed = sample_seed(request.sampling.seed, index)
    return oracle(FINGERPRINT, "", request.prompt_token_ids, request.max_tokens, seed=seed)


async def read_completions(stream: JobStream) -> dict[int, list[int]]:
    """Tokens by index; nothing of a completion follows its end."""
    completions: dict[int, list[int]] = {}
    ended: set[int] = set()
    async for event in stream:
        assert event.index not in ended
        completions.setdefault(event.index, []).extend(event.token_ids)
        if event.finish_reason is not None:
            assert event.finish_reason in (FinishReason.LENGTH, FinishReason.STOP_TOKEN)
            ended.add(event.index)
    assert ended == completions.keys()
    return completions


async def run_to_the_end(worker: LoopbackWorker, stream: JobStream) -> dict[int, list[int]]:
    reader = asyncio.create_task(read_completions(stream))
    await worker.run(reader.done)
    snapshot = worker.session.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.num_blocks_held) == (0, 0, 0)
    check_scheduler(worker.session.scheduler)
    return await reader


@pytest.mark.parametrize("num_turns", [0, 1, 2, 5])
async def test_completions_go_on_elsewhere_without_a_lost_or_doubled_token(clock: FakeClock, num_turns: int) -> None:
    fleet = make_fleet(clock)
    first = LoopbackWorker(fleet, "w0")
    request = make_request(fleet, PROMPT, 12, num_samples=3, sampling=Sampling(temperature=1.0, seed=7))
    stream = fleet.submit(request)
    for _ in range(num_turns):
        await first.turn()
    first.lose()
    second = LoopbackWorker(fleet, "w1")
    completions = await run_to_the_end(second, stream)
    assert completions == {index: expected(request, index) for index in range(3)}
    assert fleet.queue_snapshot().num_requests == 0


@pytest.mark.parametrize("is_attached", [True, False])
async def test_a_cancelled_completion_frees_what_it_held_and_never_runs_again(
    clock: FakeClock, is_attached: bool
) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    request = make_request(fleet, PROMPT, 40, num_samples=3, sampling=Sampling(temperature=1.0, seed=7))
    stream = fleet.submit(request)
    await worker.run(lambda: stream.num_unread_tokens >= 9)
    if not is_attached:  # the fleet itself has to remember
        worker.lose()
    stream.cancel_index(1)
    if not is_attached:
        worker = LoopbackWorker(fleet)
    completions = await run_to_the_end(worker, stream)
    assert completions == {index: expected(request, index) for index in (0, 2)}
    assert sum(len(plan.new_rows) for plan in worker.plans) == (3 if is_attached else 2)
    use = fleet.tenant_use()[0]
    assert use.num_requests == 0 and 80 <= use.num_generated_tokens < 100


async def test_slow_reader_of_several_completions_is_paused_and_goes_on(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    num_tokens = MAX_UNREAD_TOKENS + 50
    request = make_request(fleet, PROMPT, num_tokens, num_samples=2, sampling=Sampling(temperature=1.0, seed=7))
    stream = fleet.submit(request)
    for _ in range(num_tokens + 20):
        await worker.turn()
    assert 2 * MAX_UNREAD_TOKENS <= stream.num_unread_tokens <= 2 * MAX_UNREAD_TOKENS + 6
    completions = await run_to_the_end(worker, stream)
    assert completions == {index: expected(request, index) for index in range(2)}


async def beams_of(
    fleet: InspectedFleet, worker: LoopbackWorker, *, num_turns_before_a_loss: int | None
) -> list[JobEvent]:
    request = make_request(fleet, PROMPT, 8, beam=BeamSearch(3), sampling=Sampling())
    stream = fleet.submit(request)
    if num_turns_before_a_loss is not None:
        for _ in range(num_turns_before_a_loss):
            await worker.turn()
        worker.lose()
        worker = LoopbackWorker(fleet)

    async def read() -> list[JobEvent]:
        return [event async for event in stream]

    reader = asyncio.create_task(read())
    await worker.run(reader.done)
    check_scheduler(worker.session.scheduler)
    assert worker.session.snapshot().num_blocks_held == 0
    return await reader


async def test_a_beam_search_returns_nothing_before_its_end_and_starts_over_elsewhere(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    first = LoopbackWorker(fleet)
    whole = await beams_of(fleet, first, num_turns_before_a_loss=None)
    first.leave()
    assert [event.index for event in whole] == [0, 1, 2]
    assert all(len(event.token_ids) == 8 and event.finish_reason is FinishReason.LENGTH for event in whole)
    scores = [event.score for event in whole if event.score is not None]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    moved = await beams_of(fleet, LoopbackWorker(fleet), num_turns_before_a_loss=4)
    whole_events = [(event.token_ids, event.score) for event in whole]
    assert [(event.token_ids, event.score) for event in moved] == whole_events
    assert fleet.tenant_use()[0].num_generated_tokens == 48


async def test_a_beam_search_given_up_leaves_nothing_behind(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    stream = fleet.submit(make_request(fleet, PROMPT, 30, beam=BeamSearch(4), sampling=Sampling()))
    for _ in range(6):
        await worker.turn()
    stream.cancel()
    await worker.run(lambda: worker.session.snapshot().num_plans_in_flight == 0)
    await worker.turn()
    snapshot = worker.session.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.num_blocks_held) == (0, 0, 0)
    assert fleet.queue_snapshot().num_requests == 0 and fleet.tenant_use()[0].num_requests == 0


def fail_first_row(result: plan_pb2.StepResult) -> None:
    """Let the result say that the logits of its first row were not finite."""
    result.failed_rows, result.rows, result.token_ids = result.rows[:4], result.rows[4:], result.token_ids[4:]
    del result.sampled_logprobs[0]


def num_searched(worker: LoopbackWorker) -> int:
    progress = worker.session.scheduler.progress(RequestId(1))
    return 0 if progress is None else progress.num_searched


@pytest.mark.parametrize("end", ["given up", "late", "not finite"])
async def test_a_beam_search_that_returns_nothing_pays_what_it_computed(clock: FakeClock, end: str) -> None:
    limits = TenantLimits(tokens_per_minute=1000)
    fleet = make_fleet(clock, tenants=TenantTable(default=limits))
    worker = LoopbackWorker(fleet)
    fields: dict[str, Any] = {"beam": BeamSearch(4), "deadline_s": clock.now_s + 1.0 if end == "late" else None}
    stream = fleet.submit(make_request(fleet, PROMPT, 60, **fields))
    await worker.run(lambda: num_searched(worker) >= 100)
    if end == "given up":
        stream.cancel()
    elif end == "late":
        clock.advance(1.0)
        fleet.tick()
        with pytest.raises(DeadlineExceeded):
            await anext(stream)
    else:
        await worker.receive()
        fail_first_row(worker.results[0].step_result)
        worker.reply(1)
        with pytest.raises(NotFinite):
            await anext(stream)
    (use,) = fleet.tenant_use()
    assert use.num_requests == 0 and use.num_generated_tokens == 101, "one token, then four a step"
    filled = 17 if end == "late" else 0
    assert use.tokens_left is not None and use.tokens_left <= 1000 - len(PROMPT) - 101 + filled


async def test_completions_begin_after_the_one_that_they_fork_from_ended(clock: FakeClock) -> None:
    """One fork fits into a step, and the first completion ends with its first token: its block outlives its row."""
    fleet = make_fleet(clock, scheduler=SchedulerSettings(max_step_tokens=7))
    worker = LoopbackWorker(fleet)
    for number in range(6):
        fleet.submit(make_request(fleet, [number], 60))
    for _ in range(3):
        await worker.turn()
    request = make_request(fleet, PROMPT, 12, num_samples=4, sampling=Sampling(temperature=1.0, seed=7))
    stop = expected(request, 0)[0]
    stream = fleet.submit(replace(request, stop_token_ids=frozenset([stop])))
    reader = asyncio.create_task(read_completions(stream))
    await worker.run(reader.done)
    whole = [expected(request, index) for index in range(4)]
    ends = [tokens.index(stop) + 1 if stop in tokens else 12 for tokens in whole]
    assert await reader == {index: whole[index][: ends[index]] for index in range(4)}


async def test_one_beam_given_up_before_a_worker_takes_the_search_changes_nothing_for_the_others(
    clock: FakeClock,
) -> None:
    fleet = make_fleet(clock)
    stream = fleet.submit(make_request(fleet, PROMPT, 12, beam=BeamSearch(3)))
    stream.cancel_index(2)
    assert sorted(await run_to_the_end(LoopbackWorker(fleet), stream)) == [0, 1]


@pytest.mark.parametrize("is_lagging", [False, True])
async def test_requests_that_were_swapped_out_go_on_with_the_same_tokens(clock: FakeClock, is_lagging: bool) -> None:
    """More than fits: rows are freed a plan later than their blocks, which by then may be others'."""
    fleet = make_fleet(clock, scheduler=SchedulerSettings(swap_us_per_block=1.0))
    capacities = replace(CAPACITIES, num_blocks=40, num_host_blocks=48, max_rows=12)
    worker = LoopbackWorker(fleet, capacities=capacities)
    requests = [
        make_request(
            fleet,
            [9 + number] * (3 + number),
            40,
            num_samples=1 + number % 3,
            sampling=Sampling(temperature=1.0, seed=number),
        )
        for number in range(12)
    ]
    readers = [asyncio.create_task(read_completions(fleet.submit(request))) for request in requests]
    while not all(reader.done() for reader in readers):
        await worker.receive()
        worker.reply(1 if is_lagging else None)
    for request, reader in zip(requests, readers, strict=True):
        assert await reader == {index: expected(request, index) for index in range(request.num_samples)}
    assert worker.session.snapshot().num_swapped_out >= 5
    assert worker.session.snapshot().num_host_blocks_held == 0
