"""Every policy over encoded plans, with too few KV blocks: the oracle's tokens, whoever gave way and how."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from control_plane.fleet.requests.streams import JobStream
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.types import Sampling
from tests.fakes.fleet_rig import CAPACITIES, FakeClock, LoopbackWorker, expected, make_fleet, make_request

TINY = replace(CAPACITIES, num_blocks=14, num_host_blocks=24, max_rows=6, num_slots=2)
SWAP = SchedulerSettings(swap_us_per_block=0.0)
RECOMPUTE = SchedulerSettings(swap_us_per_block=1e9)


async def read_completions(stream: JobStream) -> dict[int, list[int]]:
    completions: dict[int, list[int]] = {}
    async for event in stream:
        completions.setdefault(event.index, []).extend(event.token_ids)
    return completions


@pytest.mark.parametrize("max_step_tokens", [3, 7, 64])
@pytest.mark.parametrize("settings", [SWAP, RECOMPUTE], ids=["swap", "recompute"])
@pytest.mark.parametrize("policy", Policy)
async def test_completions_are_the_oracles(policy: Policy, settings: SchedulerSettings, max_step_tokens: int) -> None:
    settings = replace(settings, policy=policy, max_step_tokens=max_step_tokens)
    fleet = make_fleet(FakeClock(), scheduler=settings)
    adapters = [None, *(fleet.weights.add(f"a{idx}") for idx in range(3))]
    worker = LoopbackWorker(fleet, capacities=TINY)
    requests, readers = [], []
    for idx in range(12):
        request = make_request(
            fleet,
            [idx % 3] * (5 + idx),
            10,
            adapters[idx % 4],
            num_samples=3 if idx % 4 == 0 else 1,
            sampling=Sampling(temperature=1.0, seed=idx),
            tenant="ab"[idx % 2],
            priority=idx % 3,
        )
        requests.append(request)
        readers.append(asyncio.create_task(read_completions(fleet.submit(request))))
    await worker.run(lambda: all(reader.done() for reader in readers))
    for request, reader in zip(requests, readers, strict=True):
        assert reader.result() == {index: expected(request, index) for index in range(request.num_samples)}
    scheduler = worker.session.scheduler
    check_scheduler(scheduler)
    stats = scheduler.stats()
    assert stats.num_preemptions > 0 and stats.num_host_blocks_held == 0
    if policy is Policy.FCFS:
        assert stats.num_swapped_out == 0
    elif settings.swap_us_per_block == 0:
        assert stats.num_swapped_out > 0
