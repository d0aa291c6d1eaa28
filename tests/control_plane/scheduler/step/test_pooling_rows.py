"""Requests for vectors beside requests that generate: neither starves the other, and slots stay theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.types import EvictSlot, FinishReason, LoadSlot, Pooling, PoolingKind, Request
from tests.control_plane.scheduler.factories import Bench, make_adapter, make_request
from tests.fakes.model_worker import WIDTH, chain_of, vector_of

ONE, TWO = make_adapter("one", 60), make_adapter("two", 60)


def pooled(request_id: int, prompt: int = 8, kind: PoolingKind = PoolingKind.LAST, **fields: object) -> Request:
    return make_request(request_id, prompt, 1, pooling=Pooling(kind), **fields)


def check_vector(bench: Bench, request: Request) -> None:
    end = bench.ends[request.request_id]
    assert end.finish_reason is FinishReason.POOLED and end.pooled is not None and request.pooling is not None
    assert end.pooled.tolist() == vector_of(chain_of(request, request.prompt_token_ids), request.pooling).tolist()


def steps_until(bench: Bench, request_id: int, flood: Callable[[int], Request]) -> int:
    """Steps until the request ended, while `flood` refills the queue with requests that came later."""
    next_id = 10_000
    for num_steps in range(200):
        if request_id in bench.ends:
            return num_steps
        while bench.scheduler.num_waiting < 20:
            bench.add(flood(next_id))
            next_id += 1
        bench.step()
    raise AssertionError(f"request {request_id} did not end in 200 steps")


@pytest.mark.parametrize("policy", Policy)
def test_a_flood_of_embeddings_does_not_starve_a_generation(policy: Policy) -> None:
    bench = Bench(SchedulerSettings(policy=policy), max_rows=4, num_blocks=64, hidden_width=WIDTH)
    bench.add(*[pooled(number, tenant="flood") for number in range(1, 21)])
    bench.add(make_request(1000, 4, 20, tenant="writer"))
    num_steps = steps_until(bench, 1000, lambda number: pooled(number, tenant="flood"))
    assert bench.ends[1000].finish_reason is FinishReason.LENGTH
    assert num_steps <= 80


@pytest.mark.parametrize("policy", Policy)
def test_a_flood_of_generations_does_not_starve_an_embedding(policy: Policy) -> None:
    bench = Bench(SchedulerSettings(policy=policy), max_rows=4, num_blocks=64, hidden_width=WIDTH)
    bench.add(*[make_request(number, 4, 10, tenant="flood") for number in range(1, 20)])
    wanted = pooled(1000, tenant="reader")
    bench.add(wanted)
    assert steps_until(bench, 1000, lambda number: make_request(number, 4, 10, tenant="flood")) <= 80
    check_vector(bench, wanted)


@pytest.mark.parametrize(("swap_us", "num_host_blocks"), [(1e9, 0), (0.0, 16)])
@pytest.mark.parametrize("kind", PoolingKind)
def test_a_request_that_is_preempted_in_its_prompt_gets_its_vector(
    kind: PoolingKind, swap_us: float, num_host_blocks: int
) -> None:
    bench = Bench(
        SchedulerSettings(swap_us_per_block=swap_us),
        max_step_tokens=4,
        num_host_blocks=num_host_blocks,
        hidden_width=WIDTH,
    )
    request = pooled(1, 14, kind)
    bench.add(request)
    bench.step()
    bench.scheduler.pause(request.request_id)
    assert bench.probe.latest_paused_id() == request.request_id
    bench.probe.preempt(request.request_id)
    bench.scheduler.resume(request.request_id)
    bench.run()
    assert sum(new.request_id == 1 for plan in bench.plans for new in plan.new_rows) == 2
    check_vector(bench, request)


def test_slots_change_hands_while_requests_for_vectors_wait() -> None:
    """The arena has room for one of two adapters, each of which has requests all the time."""
    bench = Bench(hidden_width=WIDTH, num_slots=1)
    requests = [pooled(number, adapter=(ONE, TWO)[number % 2]) for number in range(1, 13)]
    bench.add(*requests)
    bench.run()
    for request in requests:
        check_vector(bench, request)


def test_an_adapter_stays_in_its_slot_while_a_vector_is_computed() -> None:
    bench = Bench(max_step_tokens=4, hidden_width=WIDTH)
    request = pooled(1, 14, adapter=ONE)
    bench.add(request)
    assert [type(command) for command in bench.obey()] == [LoadSlot]
    bench.step()
    bench.scheduler.purge_digest(ONE.digest)
    assert not bench.scheduler.slot_commands(), "the request holds it"
    bench.run()
    check_vector(bench, request)
    assert [type(command) for command in bench.obey()] == [EvictSlot]
