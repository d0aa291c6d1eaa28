"""Requests that combine adapters, or whose adapter acts from some token on, go on at another worker as they began."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from control_plane.fleet.requests.streams import JobStream
from control_plane.scheduler.types import (
    AdapterUse,
    BeamSearch,
    Combination,
    Composition,
    Request,
    Sampling,
    sample_seed,
)
from tests.fakes.fleet_rig import (
    FINGERPRINT,
    FakeClock,
    InspectedFleet,
    LoopbackWorker,
    expected,
    expected_beams,
    make_fleet,
    make_request,
)
from tests.fakes.fleet_steps import assert_nothing_held
from tests.fakes.hash_model import oracle

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
COMPLETIONS = {"num_samples": 3, "sampling": Sampling(temperature=1.0, seed=7)}
FORMS: list[dict[str, Any]] = [{}, COMPLETIONS, {"beam": BeamSearch(3)}]


def combined(fleet: InspectedFleet, kind: Combination, names: str, **fields: Any) -> Request:
    refs = [fleet.weights.add(name) for name in names]
    composition = Composition(tuple(AdapterUse(ref, 0.5 * n) for n, ref in enumerate(refs, start=1)), kind)
    return make_request(fleet, PROMPT, 30, refs[0], composition=composition, **fields)


def due(request: Request) -> dict[int, list[int]]:
    """All tokens by index."""
    if request.beam is not None:
        return dict(enumerate(expected_beams(request)))
    return {index: expected(request, index) for index in range(request.num_samples)}


async def read(stream: JobStream) -> dict[int, list[int]]:
    """All tokens by index."""
    got: dict[int, list[int]] = defaultdict(list)
    async for event in stream:
        got[event.index] += event.token_ids
    return got


async def moved(fleet: InspectedFleet, requests: list[Request], num_turns: int) -> list[dict[int, list[int]]]:
    """What the requests return if their worker is lost after so many turns, with a step executed and not answered."""
    first = LoopbackWorker(fleet, "w0")
    streams = [fleet.submit(request) for request in requests]
    for _ in range(num_turns):
        await first.turn()
    await first.receive()
    first.lose()
    second = LoopbackWorker(fleet, "w1")
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    await second.run(lambda: all(reader.done() for reader in readers))
    assert_nothing_held(second)
    assert fleet.queue_snapshot().num_migrated == len(requests) * (num_turns > 0)
    return [reader.result() for reader in readers]


@pytest.mark.parametrize("num_turns", [0, 4, 9])
@pytest.mark.parametrize("form", FORMS)
async def test_combinations_go_on_with_all_their_adapters_scales_and_kind(
    clock: FakeClock, form: dict[str, Any], num_turns: int
) -> None:
    fleet = make_fleet(clock)
    kinds = [(Combination.CAT, "ab"), (Combination.LINEAR, "ab"), (Combination.CAT, "abc")]
    requests = [combined(fleet, kind, names, **form) for kind, names in kinds]
    assert await moved(fleet, requests, num_turns) == [due(request) for request in requests]
    assert len({str(due(request)) for request in requests}) == 3, "these adapters do not tell a wrong combination"


@pytest.mark.parametrize("num_turns", [0, 4, 9])
@pytest.mark.parametrize("form", FORMS)
async def test_an_activated_adapter_goes_on_from_the_token_at_which_it_became_active(
    clock: FakeClock, form: dict[str, Any], num_turns: int
) -> None:
    fleet = make_fleet(clock)
    adapter = fleet.weights.add("a")
    requests = [make_request(fleet, PROMPT, 30, adapter, active_from=start, **form) for start in (0, 3, 4, 8)]
    assert await moved(fleet, requests, num_turns) == [due(request) for request in requests]
    assert len({str(due(request)) for request in requests}) == 4


async def test_a_combination_moves_to_a_worker_where_other_adapters_have_its_slots(clock: FakeClock) -> None:
    """Four slots there: two requests for two adapters each hold them until they end, or their slots are closed."""
    fleet = make_fleet(clock)
    first, second = LoopbackWorker(fleet, "w0"), LoopbackWorker(fleet, "w1")
    requests = [combined(fleet, Combination.CAT, names) for names in ("ab", "cd", "ef", "gh", "bc", "fg")]
    streams = [fleet.submit(request) for request in requests]
    for _ in range(5):
        await first.turn()
        await second.turn()
    first.lose()
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    await second.run(lambda: all(reader.done() for reader in readers))
    assert [reader.result() for reader in readers] == [due(request) for request in requests]
    assert_nothing_held(second)


async def test_completions_of_an_activated_adapter_share_the_prompt_and_differ_by_seed(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker, adapter = LoopbackWorker(fleet), fleet.weights.add("a")
    request = make_request(fleet, PROMPT, 8, adapter, active_from=5, **COMPLETIONS)
    reader = asyncio.create_task(read(fleet.submit(request)))
    await worker.run(reader.done)
    seeds = [sample_seed(7, index) for index in range(3)]
    tokens = [oracle(FINGERPRINT, adapter.digest, PROMPT, 8, seed=seed, active_from=5) for seed in seeds]
    assert reader.result() == dict(enumerate(tokens)) and len(set(map(tuple, tokens))) == 3
    computed = sum(int(np.frombuffer(plan.prefills, dtype="<i4")[1::2].sum()) for plan in worker.plans)
    assert computed < 2 * len(PROMPT), "the prompt is computed once"
