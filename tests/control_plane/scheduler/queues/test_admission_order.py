"""Tenants share by service, adapters by cost: who is admitted when both are short of room."""

from __future__ import annotations

import pytest

from control_plane.scheduler.fairness import DECODE_WEIGHT, PREFILL_WEIGHT, VirtualCounters
from control_plane.scheduler.memory.slot_placement import STARVATION_ADMISSIONS
from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.step.planner import MAX_TIMES_OVERTAKEN
from tests.control_plane.scheduler.factories import Bench, make_adapter, make_request

EXPENSIVE = SchedulerSettings(adapter_us_per_mib=1e12)  # a further adapter always costs more than it gives
HOT = [make_adapter("hot 0"), make_adapter("hot 1")]


def service(counters: VirtualCounters) -> dict[str, float]:
    """Weighted tokens of each tenant."""
    return {
        t.tenant: PREFILL_WEIGHT * t.num_prefill_tokens + DECODE_WEIGHT * t.num_decode_tokens for t in counters.stats()
    }


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_tenant_that_floods_gets_its_share_within_10_percent_and_no_more(weight: float) -> None:
    counters = VirtualCounters({"modest": weight})
    bench = Bench(counters=counters, max_rows=6, num_blocks=60, plan_depth=2)
    next_id = 1
    for _ in range(300):
        for tenant, num_kept in (("flood", 80), ("modest", 8)):
            account = {t.tenant: t.num_waiting for t in counters.stats()}
            for _ in range(num_kept - account.get(tenant, 0)):
                bench.add(make_request(next_id, prompt=3 + next_id % 9, max_tokens=2 + next_id % 11, tenant=tenant))
                next_id += 1
        bench.step()
    served = service(counters)
    assert served["modest"] / weight == pytest.approx(served["flood"], rel=0.1)


def test_a_tenant_alone_gets_everything() -> None:
    bench = Bench(max_rows=2)
    bench.add(*[make_request(i, tenant="only") for i in range(1, 6)])
    bench.run()
    assert list(bench.ends) == [1, 2, 3, 4, 5]


def test_priorities_order_a_tenants_own_requests() -> None:
    bench = Bench(max_rows=1)
    bench.add(make_request(1, max_tokens=1), make_request(2, max_tokens=1, priority=1), make_request(3, max_tokens=1))
    bench.run()
    assert list(bench.ends) == [2, 1, 3]


def test_blocks_are_taken_from_the_tenant_that_had_most() -> None:
    bench = Bench(num_blocks=6, max_rows=3)
    bench.counters.charge_prefill("greedy", 10_000)
    bench.add(
        make_request(1, max_tokens=12), make_request(2, max_tokens=12, tenant="greedy"), make_request(3, max_tokens=12)
    )
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    bench.return_result() if bench.sent else None
    assert bench.running_ids() == [1, 3]


def test_of_one_tenant_the_least_priority_is_preempted() -> None:
    bench = Bench(num_blocks=6, max_rows=3)
    bench.add(
        make_request(1, max_tokens=12), make_request(2, max_tokens=12), make_request(3, max_tokens=12, priority=1)
    )
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    assert bench.running_ids() == [1, 3]


def test_a_request_whose_adapter_is_read_anyway_goes_before_one_that_costs_the_step_more() -> None:
    bench = Bench(EXPENSIVE, max_rows=2, num_blocks=64)
    bench.add(make_request(1, adapter=HOT[0], max_tokens=12), make_request(2, adapter=HOT[0], max_tokens=2))
    bench.step()
    bench.add(make_request(3, adapter=HOT[1], max_tokens=2), make_request(4, adapter=HOT[0], max_tokens=2))
    bench.run()
    assert list(bench.ends).index(4) < list(bench.ends).index(3)


def test_a_cheap_adapter_keeps_its_place() -> None:
    bench = Bench(max_rows=2, num_blocks=64)
    bench.add(make_request(1, adapter=HOT[0], max_tokens=12), make_request(2, adapter=HOT[0], max_tokens=2))
    bench.step()
    bench.add(make_request(3, adapter=HOT[1], max_tokens=2), make_request(4, adapter=HOT[0], max_tokens=2))
    bench.run()
    assert list(bench.ends).index(3) < list(bench.ends).index(4)


def test_a_request_with_an_expensive_adapter_is_overtaken_by_at_most_16_of_its_tenant() -> None:
    assert MAX_TIMES_OVERTAKEN == 16
    bench = Bench(EXPENSIVE, max_rows=2, num_blocks=64)
    bench.add(make_request(1, adapter=HOT[0], max_tokens=60))
    bench.step()
    bench.add(make_request(2, adapter=HOT[1], max_tokens=1))
    bench.add(*[make_request(i, adapter=HOT[0], max_tokens=1) for i in range(3, 60)])
    while 2 not in bench.ends:
        bench.step()
    assert len(bench.ends) - 1 == MAX_TIMES_OVERTAKEN


def test_another_tenants_turn_is_not_taken_by_who_is_cheaper() -> None:
    bench = Bench(EXPENSIVE, max_rows=2, num_blocks=64)
    bench.add(make_request(1, adapter=HOT[0], max_tokens=20, tenant="a"), make_request(2, tenant="a", max_tokens=1))
    bench.step()
    bench.add(make_request(3, adapter=HOT[0], tenant="a", max_tokens=1), make_request(4, adapter=HOT[1], tenant="b"))
    bench.counters.charge_prefill("a", 1)
    bench.step()
    assert 4 in bench.running_ids()


@pytest.mark.parametrize("is_hot_adapter", [True, False])
def test_each_of_50_cold_adapters_is_passed_by_at_most_32_admissions_and_two_batches_in_its_turn(
    is_hot_adapter: bool,
) -> None:
    """Room for two adapters, 50 cold ones in line, and ten times their load from others, of the base model even."""
    assert STARVATION_ADMISSIONS == 32
    bench = Bench(max_rows=6, num_blocks=64, plan_depth=2)
    next_id, num_cold = 1, 50
    for _ in range(40):
        bench.add(make_request(next_id, adapter=HOT[next_id % 2], max_tokens=2 + next_id % 5))
        next_id += 1
    bench.step()
    num_before = sum(len(plan.new_rows) for plan in bench.plans)
    cold_ids = list(range(10_000, 10_000 + num_cold))
    for idx, request_id in enumerate(cold_ids):
        bench.add(make_request(request_id, adapter=make_adapter(f"cold {idx}"), max_tokens=3, arrival_s=next_id))
    passed: list[int] = []  # admissions before each cold request got in
    seen = 0
    while len(passed) < num_cold:
        for _ in range(10 if bench.scheduler.stats().num_waiting < 120 else 0):
            adapter = HOT[next_id % 2] if is_hot_adapter else None
            bench.add(make_request(next_id, adapter=adapter, max_tokens=2 + next_id % 5))
            next_id += 1
        bench.step()
        admitted = [new.request_id for plan in bench.plans for new in plan.new_rows]
        passed += [i - num_before for i in range(seen, len(admitted)) if admitted[i] in cold_ids]
        seen = len(admitted)
        in_one_turn = STARVATION_ADMISSIONS + 2 * bench.limits.max_rows
        assert seen - num_before <= in_one_turn * (len(passed) + 1), "a cold adapter starves"


def test_an_adapter_that_only_waits_for_its_tenants_turn_is_not_safe_for_ever() -> None:
    """Its slot goes to a starving adapter after 32 admissions, though nobody used it: priorities keep it waiting."""
    bench = Bench(num_slots=1, max_rows=1)
    bench.add(make_request(1, adapter=HOT[0], priority=-1))
    bench.obey()
    next_id = 2
    bench.add(make_request(5000, adapter=HOT[1], tenant="other", arrival_s=2.0))
    while 5000 not in bench.ends:
        if bench.scheduler.stats().num_waiting < 5:
            bench.add(make_request(next_id, max_tokens=1))
            next_id += 1
        bench.step()
        assert next_id < 5 * STARVATION_ADMISSIONS
    assert 1 not in bench.ends
