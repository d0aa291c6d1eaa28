"""Virtual token counters: lifts, weights, and the bound of the paper on a server that is never idle."""

from __future__ import annotations

import random

import pytest

from control_plane.scheduler.fairness import DECODE_WEIGHT, MIN_KEPT_TENANTS, PREFILL_WEIGHT, VirtualCounters
from control_plane.scheduler.settings import Policy, SchedulerSettings
from tests.control_plane.scheduler.factories import Bench, make_request


def test_service_is_priced_by_kind_and_divided_by_weight() -> None:
    counters = VirtualCounters({"paying": 4.0})
    counters.charge_prefill("paying", 10)
    counters.charge_decode("paying", 3)
    counters.charge_decode("other", 3)
    assert counters.counter("paying") == (10 * PREFILL_WEIGHT + 3 * DECODE_WEIGHT) / 4
    assert counters.counter("other") == 3 * DECODE_WEIGHT
    (other, paying) = counters.stats()
    assert (other.tenant, other.num_decode_tokens) == ("other", 3)
    assert (paying.num_prefill_tokens, paying.num_decode_tokens, paying.weight) == (10, 3, 4.0)


def test_a_tenant_that_comes_back_is_lifted_to_the_least_of_those_that_wait() -> None:
    counters = VirtualCounters()
    for tenant, num_tokens in [("a", 100), ("b", 300)]:
        counters.wait(tenant)
        counters.charge_prefill(tenant, num_tokens)
    counters.wait("late")
    assert counters.counter("late") == 100
    counters.charge_prefill("late", 500)
    counters.stop_waiting("late")
    counters.wait("late")
    assert counters.counter("late") == 600, "a lift never takes service away"


def test_where_nobody_waits_the_lift_goes_to_the_last_who_did() -> None:
    counters = VirtualCounters()
    counters.wait("a")
    counters.stop_waiting("a")  # the planner's order: it is charged for what it stopped waiting for
    counters.charge_prefill("a", 70)
    counters.charge_decode("a", 5)
    counters.wait("late")
    assert counters.counter("late") == 70 + 5 * DECODE_WEIGHT


def test_who_comes_while_another_runs_alone_gets_no_credit_for_the_time_before() -> None:
    bench = Bench(max_rows=4, num_blocks=200, max_model_len=200, max_step_tokens=64)
    bench.add(*[make_request(i, prompt=4, max_tokens=150, tenant="a") for i in range(4)])
    for _ in range(148):  # up to the end of all that it runs, nearly
        bench.step()
    for i in range(8):
        bench.add(make_request(20 + i, prompt=4, max_tokens=20, tenant="b"))
        bench.add(make_request(10 + i, prompt=4, max_tokens=20, tenant="a"))
    bench.run(3000)
    ends = ["a" if request_id < 20 else "b" for request_id in bench.ends if request_id >= 10]
    assert 3 <= ends[:8].count("a") <= 5, ends


def test_only_the_first_waiting_request_of_a_tenant_lifts_it() -> None:
    counters = VirtualCounters()
    counters.wait("a")
    counters.wait("b")
    counters.charge_prefill("b", 50)
    counters.stop_waiting("a")
    counters.wait("a")
    counters.wait("a")
    assert counters.counter("a") == 50
    counters.charge_prefill("b", 50)
    counters.stop_waiting("a")
    assert counters.counter("a") == 50


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused_by_name(weight: float) -> None:
    with pytest.raises(ValueError, match="tenant-7"):
        VirtualCounters({"tenant-7": weight})


def test_idle_accounts_that_a_lift_would_restore_are_forgotten() -> None:
    counters = VirtualCounters()
    counters.charge_prefill("debtor", 10_000)
    counters.wait("busy")
    counters.charge_prefill("busy", 10)
    for idx in range(3 * MIN_KEPT_TENANTS):
        counters.wait(f"passer-by {idx}")
        counters.stop_waiting(f"passer-by {idx}")
        counters.charge_prefill(f"passer-by {idx}", 1)
        counters.charge_prefill("busy", 2)
    assert len(counters.stats()) <= MIN_KEPT_TENANTS + 1
    assert counters.counter("debtor") == 10_000, "who had more than the others is remembered"


def test_an_account_is_kept_while_its_tenant_only_decodes() -> None:
    counters = VirtualCounters()
    for tenant in ("decodes", "busy"):
        counters.wait(tenant)
    counters.charge_prefill("busy", 10)
    counters.stop_waiting("decodes")
    counters.run("decodes")
    counters.charge_prefill("decodes", 4)
    for idx in range(3 * MIN_KEPT_TENANTS):
        counters.wait(f"passer-by {idx}")
        counters.stop_waiting(f"passer-by {idx}")
    counters.charge_decode("decodes", 100)
    counters.stop_running("decodes")
    counters.wait("decodes")
    assert counters.counter("decodes") == 4 * PREFILL_WEIGHT + 100 * DECODE_WEIGHT


@pytest.mark.parametrize("num_names", [1, 25])
def test_invented_tenants_of_one_account_get_together_what_one_gets(num_names: int) -> None:
    bench = Bench(max_rows=4, num_blocks=60)
    next_id = 1
    for _ in range(200):
        while bench.scheduler.num_waiting < 60:
            for tenant, account in ((f"invented {next_id % num_names}", "ipv4:6.6.6.6"), ("a", "a"), ("b", "b")):
                bench.add(make_request(next_id, prompt=4, max_tokens=4, tenant=tenant, charged_to=account))
                next_id += 1
        bench.step()
    service = {account.tenant: account.counter for account in bench.counters.stats()}
    assert sorted(service) == ["a", "b", "ipv4:6.6.6.6"]
    assert service["a"] == pytest.approx(service["b"], rel=0.1)
    assert service["ipv4:6.6.6.6"] == pytest.approx(service["a"], rel=0.1)


@pytest.mark.parametrize("policy", Policy)
def test_requests_of_a_lost_worker_neither_wait_nor_run_for_their_tenants(policy: Policy) -> None:
    counters = VirtualCounters()
    bench = Bench(SchedulerSettings(policy=policy), counters, max_rows=2)
    bench.add(*[make_request(i, max_tokens=9, tenant="abc"[i % 3]) for i in range(6)])
    bench.add(make_request(6, max_tokens=9, tenant="a", num_samples=2))
    bench.step()
    assert counters.num_waiting_by_tenant == {"a": 2, "b": 1, "c": 2}
    assert [counters.num_running(tenant) for tenant in "abc"] == [1, 1, 0]
    assert len(bench.scheduler.take_requests()) == 7
    assert counters.num_waiting_by_tenant == {}
    assert [counters.num_running(tenant) for tenant in "abc"] == [0, 0, 0]


def test_accounts_of_passers_by_are_forgotten_where_nobody_waits() -> None:
    counters = VirtualCounters()
    for idx in range(3 * MIN_KEPT_TENANTS):
        counters.wait(f"passer-by {idx}")
        counters.stop_waiting(f"passer-by {idx}")
        counters.charge_prefill(f"passer-by {idx}", 3)
    assert len(counters.stats()) <= MIN_KEPT_TENANTS
    counters.wait("late")
    assert counters.counter("late") == 9 * MIN_KEPT_TENANTS, "each was lifted to the one before"


def test_backlogged_tenants_get_service_within_the_bound_of_the_paper_whoever_joins_and_leaves() -> None:
    """One server, one request at a time: two tenants that wait all the time differ by two longest requests at most."""
    rng = random.Random(5)
    longest = 60
    counters = VirtualCounters({"double": 2.0})
    tenants = ["single", "double", "now and then"]
    served = dict.fromkeys(tenants, 0.0)
    waiting = {"single": 1, "double": 1, "now and then": 0}
    for tenant in ("single", "double"):
        counters.wait(tenant)
    for _ in range(4000):
        if waiting["now and then"] == 0 and rng.random() < 0.05:
            waiting["now and then"] = 1
            counters.wait("now and then")
        tenant = min((t for t in tenants if waiting[t]), key=lambda t: (counters.counter(t), t))
        num_tokens = rng.randint(1, longest)
        counters.charge_prefill(tenant, num_tokens)
        served[tenant] += num_tokens * PREFILL_WEIGHT
        if tenant == "now and then":
            waiting[tenant] = 0
            counters.stop_waiting(tenant)
        assert abs(served["single"] - served["double"] / 2) <= 2 * longest * PREFILL_WEIGHT
    assert served["now and then"] > 0
