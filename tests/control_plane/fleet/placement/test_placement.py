"""What a worker costs a request, and where requests go for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from control_plane.fleet.placement.placement import Need, cost_ms, need_of
from control_plane.fleet.settings import PlacementCosts
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.memory import prefix_cache
from control_plane.scheduler.memory.prefix_cache import chain_next
from control_plane.scheduler.scheduler import PrefixKeys, WorkerUtilization
from control_plane.scheduler.types import AdapterRef, AdapterTier, Completion, Request, RequestId
from tests.fakes.fleet_rig import (
    CAPACITIES,
    FakeClock,
    LoopbackWorker,
    expected,
    make_fleet,
    make_request,
    read_all,
)

COSTS = PlacementCosts(
    expected_tokens=100, full_batch_slowdown=1.0, load_ms=10.0, slot_ms_per_mib=0.5, store_ms_per_mib=2.0
)
ADAPTER = AdapterRef("a" * 64, arena_bytes=40 << 20)
PLAIN = Request(RequestId(1), tuple(range(64)), 500)


def make_need(request: Request = PLAIN, *, is_in_host_cache: bool = True, **changes: Any) -> Need:
    """64 prompt tokens, 100 tokens expected, one row, no adapter."""
    return replace(need_of(request, COSTS, lambda _digest: is_in_host_cache), **changes)


def make_worker(**changes: Any) -> WorkerUtilization:
    """An idle worker: 10 rows, steps of 5 ms, 100 blocks of 16 tokens, 0.1 ms for a prefill token."""
    idle = WorkerUtilization(
        step_us=5000.0,
        prefill_us_per_token=100.0,
        num_rows=10,
        num_rows_requested=0,
        num_waiting=0,
        num_blocks=100,
        num_free_blocks=100,
        block_size=16,
        tier=AdapterTier.READY,
        num_hit_tokens=0,
        num_load_bytes=ADAPTER.arena_bytes,  # counts with a tier other than READY
    )
    return idle._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "milliseconds"),
    [
        ({}, 6.4),  # the prefill alone
        ({"num_hit_tokens": 48}, 1.6),
        ({"num_rows_requested": 5}, 6.4 + 250),  # half a batch: half a step more for 100 steps of 5 ms
        ({"num_rows_requested": 10}, 6.4 + 500 + 50),  # full: a tenth of the rows has to end
        ({"num_rows_requested": 14, "num_waiting": 4}, 6.4 * 5 + 700 + 250),  # five are short, four prefills go before
        ({"num_free_blocks": 1}, 6.4 + 50),  # 164 tokens take 11 blocks: a tenth of all
        ({"step_us": 50_000.0}, 6.4),  # nothing waits, nothing is shared
        ({"step_us": 50_000.0, "num_rows_requested": 5}, 6.4 + 2500),
    ],
)
def test_cost_of_a_worker_for_a_request_without_adapter(changes: dict[str, Any], milliseconds: float) -> None:
    assert cost_ms(make_worker(**changes), make_need(), COSTS) == pytest.approx(milliseconds)


@pytest.mark.parametrize(
    ("tier", "is_in_host_cache", "milliseconds"),
    [
        (AdapterTier.READY, True, 0.0),
        (AdapterTier.LOADING, True, 15.0),
        (AdapterTier.ABSENT, True, 30.0),  # 10 + 40 MiB x 0.5
        (AdapterTier.ABSENT, False, 110.0),  # and 40 MiB x 2 from the store
        (AdapterTier.NO_ROOM, True, 280.0),  # and half the time that a request runs
        (AdapterTier.NO_ROOM, False, 360.0),
    ],
)
def test_cost_of_an_adapter_by_where_it_is(tier: AdapterTier, is_in_host_cache: bool, milliseconds: float) -> None:
    need = make_need(replace(PLAIN, adapter=ADAPTER), is_in_host_cache=is_in_host_cache)
    assert cost_ms(make_worker(tier=tier), need, COSTS) == pytest.approx(6.4 + milliseconds)


@pytest.mark.parametrize(
    ("load_ms", "load_mib", "milliseconds"),
    [
        (30.0, 40, 30.0),  # as is stated: 10 + 40 MiB x 0.5
        (90.0, 40, 90.0),
        (45.0, 10, 90.0),  # three times what is stated of 10 MiB, 15
    ],
)
def test_loads_cost_what_the_worker_took_for_its_own(load_ms: float, load_mib: int, milliseconds: float) -> None:
    worker = make_worker(tier=AdapterTier.ABSENT, load_us=load_ms * 1000, load_bytes=load_mib << 20)
    need = make_need(replace(PLAIN, adapter=ADAPTER))
    assert cost_ms(worker, need, COSTS) == pytest.approx(6.4 + milliseconds)
    from_store = make_need(replace(PLAIN, adapter=ADAPTER), is_in_host_cache=False)
    assert cost_ms(worker, from_store, COSTS) == pytest.approx(6.4 + milliseconds + 80)
    free = replace(COSTS, load_ms=0.0, slot_ms_per_mib=0.0)
    assert cost_ms(worker, need, free) == pytest.approx(6.4 + load_ms)


def test_a_load_and_a_wait_for_rows_pass_at_the_same_time() -> None:
    need = make_need(replace(PLAIN, adapter=ADAPTER))
    full = make_worker(num_rows_requested=10)
    assert cost_ms(full._replace(tier=AdapterTier.ABSENT), need, COSTS) == cost_ms(full, need, COSTS)


def test_several_completions_need_rows_and_blocks_of_their_own() -> None:
    need = make_need(replace(PLAIN, num_samples=4))
    assert cost_ms(make_worker(), need, COSTS) == pytest.approx(6.4)
    # One row is free, three are short. 64 + 4 x 100 tokens take 29 blocks.
    assert cost_ms(make_worker(num_rows_requested=9), need, COSTS) == pytest.approx(6.4 + 450 + 150)
    assert cost_ms(make_worker(num_free_blocks=9), need, COSTS) == pytest.approx(6.4 + 100)


def test_a_request_that_moves_brings_its_tokens_to_be_computed_and_needs_fewer() -> None:
    need = make_need(replace(PLAIN, max_tokens=110, generated_token_ids=tuple(range(50))))
    assert (need.num_known_tokens, need.num_new_tokens) == (114, 60)
    completions = (Completion(tuple(range(30)), is_ended=True), Completion(tuple(range(90))))
    need = make_need(replace(PLAIN, max_tokens=100, num_samples=2, completions=completions))
    assert (need.num_known_tokens, need.num_new_tokens, need.num_rows) == (154, 10, 2)


def test_keys_of_a_prompt_are_made_only_as_far_as_a_worker_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCache:
        num_looked_up = 0

        def has_blocks_of(self, _name: str | None) -> bool:
            return True

        def __contains__(self, _key: bytes) -> bool:
            self.num_looked_up += 1
            return False

    made: list[bytes] = []

    def counted(*arguments: Any) -> bytes:
        made.append(chain_next(*arguments))
        return made[-1]

    monkeypatch.setattr(prefix_cache, "chain_next", counted)
    keys, cache = PrefixKeys(replace(PLAIN, prompt_token_ids=tuple(range(2000)))), NoCache()
    assert [keys.num_hit_tokens(cache, 16) for _ in range(3)] == [0, 0, 0]  # type: ignore[arg-type]  # all that is used
    assert cache.num_looked_up == 3 and len(made) == 1


# ---- with workers ----


async def test_loads_from_the_host_cache_alone_teach_what_a_load_takes(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    worker = LoopbackWorker(fleet)
    weights = fleet.weights

    def utilization() -> WorkerUtilization:
        return worker.session.scheduler.utilization(PrefixKeys(PLAIN))

    loads = [("cold", False, 1000)] + [(f"a{i}", True, 200_000 if i == 0 else 7000 + i) for i in range(9)]
    for name, is_cached, load_time_us in loads:
        assert utilization().load_us == 0
        adapter = weights.add(name)
        if is_cached:
            await weights.ensure_cached(adapter.digest)
        worker.load_time_us = load_time_us
        reader = asyncio.create_task(read_all(fleet.submit(make_request(fleet, [1], 2, adapter))))
        await worker.run(reader.done)
    # The middle one of nine: the first, which was slow, does not keep adapters away for ever.
    assert (utilization().load_us, utilization().load_bytes) == (7005, adapter.arena_bytes)


def name_of(workers: list[LoopbackWorker], request: Request) -> str:
    """The worker that has the request."""
    [name] = [w.session.worker_id for w in workers if request.request_id in w.session.scheduler.request_ids]
    return name


async def test_a_prompt_goes_where_its_prefix_is(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    workers = [LoopbackWorker(fleet, name) for name in ("w0", "w1")]
    blocker = fleet.submit(make_request(fleet, [9], 40))  # on w0, so that the prompt goes to w1
    prompt = [*range(60)]
    readers = [asyncio.create_task(read_all(fleet.submit(make_request(fleet, prompt, 2))))]
    await workers[1].run(lambda: readers[0].done())
    readers = [asyncio.create_task(read_all(blocker))]
    await workers[0].run(lambda: readers[0].done())
    strange, same = make_request(fleet, [7, *prompt], 2), make_request(fleet, [*prompt, 5], 2)
    for request in (strange, same):
        stream = fleet.submit(request)
        assert name_of(workers, request) == ("w0" if request is strange else "w1")
        stream.cancel()
    salted = make_request(fleet, [*prompt, 5], 2, cache_salt=b"another partition")
    stream = fleet.submit(salted)
    assert name_of(workers, salted) == "w0"
    stream.cancel()
    foreign = make_request(fleet, [*prompt, 5], 2, tenant="other")
    fleet.submit(foreign)
    assert name_of(workers, foreign) == "w0"


async def test_a_request_goes_where_there_are_blocks_for_it(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    small = replace(CAPACITIES, num_blocks=24)
    workers = [LoopbackWorker(fleet, "w0", capacities=small), LoopbackWorker(fleet, "w1")]
    fleet.submit(make_request(fleet, [*range(60)], 30))  # 23 blocks of the 24
    await workers[0].turn()
    fleet.submit(make_request(fleet, [1], 30))
    fleet.submit(make_request(fleet, [2], 30))  # w1 is the busier one of the two
    for worker in workers:
        await worker.turn()
    request = make_request(fleet, [3] * 40, 30)
    fleet.submit(request)
    assert name_of(workers, request) == "w1"


async def test_the_nearer_an_adapter_is_the_better(clock: FakeClock) -> None:
    """Loading beats absent, a slot beats both, and a worker whose slots are all in use comes last."""
    fleet = make_fleet(clock, placement=PlacementCosts(load_ms=100.0))
    weights = fleet.weights
    adapters = [weights.add(f"a{i}") for i in range(3)]
    one_slot = replace(CAPACITIES, num_slots=1)
    workers = [LoopbackWorker(fleet, name, capacities=one_slot) for name in ("w0", "w1")]
    first = make_request(fleet, [1], 40, adapters[0])
    fleet.submit(first)
    await asyncio.sleep(0)  # the load is requested
    second = make_request(fleet, [2], 40, adapters[0])
    fleet.submit(second)
    assert [name_of(workers, request) for request in (first, second)] == ["w0", "w0"]
    for _ in range(3):
        await workers[0].turn()
    third, fourth = make_request(fleet, [3], 40, adapters[0]), make_request(fleet, [4], 40, adapters[1])
    fleet.submit(third)
    fleet.submit(fourth)
    assert [name_of(workers, request) for request in (third, fourth)] == ["w0", "w1"]


async def test_a_worker_that_attaches_takes_over_what_waits_elsewhere(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    first = LoopbackWorker(fleet, "w0")
    requests = [make_request(fleet, [i, 1], 40) for i in range(48)]  # three times its rows
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    await first.turn()
    second = LoopbackWorker(fleet, "w1")
    assert not second.session.scheduler.request_ids
    fleet.tick()
    moved = [request for request in requests if request.request_id in second.session.scheduler.request_ids]
    assert 8 <= len(moved) <= 16 and moved == requests[-len(moved) :]  # the latest
    fleet.tick()
    assert len(second.session.scheduler.request_ids) <= 20  # it has enough
    while not all(reader.done() for reader in readers):
        await first.turn()
        await second.turn()
        fleet.tick()
    assert [await reader for reader in readers] == [expected(request) for request in requests]
    assert fleet.queue_snapshot().num_migrated == 0
    for worker in (first, second):
        check_scheduler(worker.session.scheduler)
        assert worker.session.snapshot().num_blocks_held == 0


async def test_what_waits_stays_where_its_turn_comes_sooner(clock: FakeClock) -> None:
    fleet = make_fleet(clock, placement=PlacementCosts(load_ms=10_000.0))
    first = LoopbackWorker(fleet, "w0")
    adapter = fleet.weights.add("a")
    requests = [make_request(fleet, [i, 1], 40, adapter) for i in range(24)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    for _ in range(3):
        await first.turn()
    second = LoopbackWorker(fleet, "w1")  # has no weights, and a load is said to take ten seconds
    fleet.tick()
    assert not second.session.scheduler.request_ids
    await first.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]


async def test_requests_that_have_run_are_not_moved_about(clock: FakeClock) -> None:
    fleet = make_fleet(clock)
    first = LoopbackWorker(fleet, "w0", capacities=replace(CAPACITIES, num_blocks=40))
    requests = [make_request(fleet, [i, 1], 60) for i in range(6)]
    readers = [asyncio.create_task(read_all(fleet.submit(request))) for request in requests]
    while not first.session.scheduler.num_waiting or not first.session.snapshot().num_preemptions:
        await first.turn()
    second = LoopbackWorker(fleet, "w1")
    fleet.tick()
    assert not second.session.scheduler.request_ids
    await first.run(lambda: all(reader.done() for reader in readers))
    assert [await reader for reader in readers] == [expected(request) for request in requests]
