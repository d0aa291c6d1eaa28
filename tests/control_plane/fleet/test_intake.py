"""Which requests are taken on: full queues, shares of tenants, quotas."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import grpc
import pytest

from control_plane.errors import (
    ContextTooLong,
    NoWorker,
    QueueFull,
    QuotaExceeded,
    QuotaTooSmall,
    ShuttingDown,
    status_of,
)
from control_plane.fleet.tenants import TenantLimits, TenantTable
from control_plane.scheduler.probe import SchedulerProbe
from control_plane.scheduler.types import StepPlan
from tests.fakes.fleet_rig import (
    CAPACITIES,
    FakeClock,
    LoopbackWorker,
    expected,
    make_fleet,
    make_request,
)
from tests.fakes.fleet_steps import run_all


async def test_full_queue_refuses_and_the_next_request_works(clock: FakeClock) -> None:
    fleet = make_fleet(clock, max_waiting_requests=3)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, max_rows=2))
    requests = [make_request(fleet, [i], 10) for i in range(5)]
    streams = [fleet.submit(request) for request in requests]  # 2 run, 3 wait
    with pytest.raises(QueueFull, match="3 requests wait"):
        fleet.submit(make_request(fleet, [9], 10))
    assert fleet.queue_snapshot().num_rejected == 1
    assert await run_all(worker, streams) == [expected(request) for request in requests]
    again = make_request(fleet, [9], 10)
    assert await run_all(worker, [fleet.submit(again)]) == [expected(again)]


async def test_a_refused_request_plans_nothing(clock: FakeClock) -> None:
    """A full queue that refuses again and again makes no session plan."""
    fleet = make_fleet(clock, max_waiting_requests=3)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, max_rows=2))
    for index in range(5):
        fleet.submit(make_request(fleet, [index], 10))
    with pytest.raises(QueueFull):
        fleet.submit(make_request(fleet, [9], 10))  # plans those that came in this turn
    num_plans = 0
    plan = worker.session.scheduler.plan

    def counted(now_s: float, max_steps: int = 1) -> StepPlan | None:
        nonlocal num_plans
        num_plans += 1
        return plan(now_s, max_steps)

    worker.session.scheduler.plan = counted  # type: ignore[method-assign]  # to see whether it is called
    for _ in range(10):
        with pytest.raises(QueueFull):
            fleet.submit(make_request(fleet, [9], 10))
    assert num_plans == 0


async def test_room_is_refused_as_a_request_would_be_and_takes_nothing(clock: FakeClock) -> None:
    limits = TenantLimits(max_running_requests=2, tokens_per_minute=60)
    fleet = make_fleet(clock, max_waiting_requests=3, tenants=TenantTable(default=limits))
    for _ in range(5):
        fleet.check_room("a", 50)
    with pytest.raises(QuotaTooSmall, match="tokens_per_minute 60"):
        fleet.check_room("a", 60)
    for _ in range(2):
        fleet.submit(make_request(fleet, [1], 5, tenant="a"))
    with pytest.raises(QuotaExceeded, match="max_running_requests"):
        fleet.check_room("a", 1)
    fleet.submit(make_request(fleet, [1], 5, tenant="b"))
    with pytest.raises(QueueFull):
        fleet.check_room("a", 1)
    fleet.check_room("c", 1)
    assert (fleet.queue_snapshot().num_requests, fleet.queue_snapshot().num_accepted) == (3, 3)
    await fleet.shut_down(0)
    with pytest.raises(ShuttingDown):
        fleet.check_room("c", 1)
    with pytest.raises(NoWorker):
        make_fleet(clock, worker_grace_s=0.0).check_room("a", 1)


async def test_a_request_that_placing_breaks_on_leaves_nothing_behind(clock: FakeClock) -> None:
    fleet = make_fleet(clock, tenants=TenantTable(default=TenantLimits(max_queued_tokens=10)))
    worker = LoopbackWorker(fleet)
    with pytest.raises(AssertionError, match="is over"):
        fleet.submit(make_request(fleet, [1] * 8, 1, generated_token_ids=(1,)))
    assert fleet.queue_snapshot().num_requests == 0
    (use,) = fleet.tenant_use()
    assert (use.num_requests, use.num_queued_tokens) == (0, 0)
    request = make_request(fleet, [1] * 8, 3)
    assert await run_all(worker, [fleet.submit(request)]) == [expected(request)]


@pytest.mark.parametrize("has_worker", [True, False])
async def test_a_tenant_that_keeps_the_queue_full_shuts_nobody_out(clock: FakeClock, *, has_worker: bool) -> None:
    fleet = make_fleet(clock, max_waiting_requests=12)
    if has_worker:
        LoopbackWorker(fleet, capacities=replace(CAPACITIES, max_rows=2))

    def flood(tenant: str) -> int:
        for num_taken in range(100):
            try:
                fleet.submit(make_request(fleet, [num_taken], 10, tenant=tenant))
            except QueueFull:
                return num_taken
        raise AssertionError("nobody is refused")

    assert flood("flooding") == 12 + 2 * has_worker
    assert flood("modest") == 6
    assert flood("third") == 4
    assert flood("flooding") == flood("modest") == 0
    for idx in range(20):
        flood(f"name {idx}")
    assert flood("one too many") == 0, "names have no end, the queue has"
    with pytest.raises(QueueFull, match=r"12 requests wait, and tenant modest has its equal part of them with 6"):
        fleet.submit(make_request(fleet, [1], 10, tenant="modest"))


@pytest.mark.parametrize("num_names", [1, 30])
async def test_invented_tenants_together_get_no_more_of_a_full_queue_than_one(clock: FakeClock, num_names: int) -> None:
    fleet = make_fleet(clock, max_waiting_requests=12, tenants=TenantTable({"named": TenantLimits()}))
    num_taken = dict.fromkeys(("ipv4:6.6.6.6", "ipv4:10.0.0.7", "named"), 0)
    for number in range(60):
        for host, tenant in (
            ("ipv4:6.6.6.6", f"invented {number % num_names}"),
            ("ipv4:10.0.0.7", "default"),
            ("ipv4:6.6.6.6", "named"),
        ):
            account = fleet.account_of(tenant, host)
            with contextlib.suppress(QueueFull):
                fleet.submit(make_request(fleet, [number], 10, tenant=tenant, charged_to=account))
                num_taken[account] += 1
    assert num_taken == dict.fromkeys(num_taken, 4)


async def test_authenticated_tenants_of_one_host_share_a_full_queue_as_if_of_many(clock: FakeClock) -> None:
    """None has an entry. Their names are of their credentials, so that each is an account of its own."""
    fleet = make_fleet(clock, max_waiting_requests=12)
    num_taken = dict.fromkeys(("acme", "labs", "third"), 0)
    for number in range(60):
        for tenant in num_taken:
            account = fleet.account_of(tenant, "ipv4:10.0.0.7", is_authenticated=True)
            with contextlib.suppress(QueueFull):
                fleet.submit(make_request(fleet, [number], 10, tenant=tenant, charged_to=account))
                num_taken[account] += 1
    assert num_taken == {"acme": 4, "labs": 4, "third": 4}


@pytest.mark.parametrize("has_worker", [True, False])
async def test_the_queue_is_bounded_by_prompt_tokens_too(clock: FakeClock, *, has_worker: bool) -> None:
    fleet = make_fleet(clock, max_waiting_tokens=100)
    worker = LoopbackWorker(fleet, capacities=replace(CAPACITIES, max_rows=2)) if has_worker else None
    streams = []

    def fill(tenant: str) -> int:
        for num_taken in range(100):
            try:
                streams.append(fleet.submit(make_request(fleet, [1] * 30, 10, tenant=tenant)))
            except QueueFull as error:
                assert "100 prompt tokens wait" in str(error) and error.retry_after_s > 0
                return num_taken
        raise AssertionError("nobody is refused")

    assert fill("long") == 4
    assert fill("modest") == 2, "50 are its share: 30 are less, 60 are not"
    assert fill("third") == 2
    if worker is not None:
        await run_all(worker, streams)
        assert fill("long") == 4, "what runs or ran does not wait"


async def test_quotas_are_charged_at_submit_and_given_back_at_every_end(clock: FakeClock) -> None:
    table = TenantTable({"a": TenantLimits(weight=2.0, max_running_requests=2, max_queued_tokens=6)})
    fleet = make_fleet(clock, tenants=table)
    worker = LoopbackWorker(fleet)
    with pytest.raises(ContextTooLong):
        fleet.submit(make_request(fleet, [1] * 5, 10_000, tenant="a"))
    first = fleet.submit(make_request(fleet, [1, 2, 3], 4, tenant="a"))
    second = fleet.submit(make_request(fleet, [1, 2, 4], 4, tenant="a"))
    with pytest.raises(QuotaExceeded) as caught:
        fleet.submit(make_request(fleet, [1], 4, tenant="a"))
    assert (caught.value.quota, status_of(caught.value)) == (
        "max_running_requests",
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
    assert fleet.tenant_use()[0].num_queued_tokens == 6
    await run_all(worker, [first])
    second.cancel()
    (use,) = fleet.tenant_use()
    assert (use.tenant, use.num_requests, use.num_queued_tokens) == ("a", 0, 0)
    assert (use.num_accepted, use.num_rejected, use.num_input_tokens) == (2, 1, 6)
    assert 4 <= use.num_generated_tokens <= 8
    probes = [SchedulerProbe(w.session.scheduler) for w in (worker, LoopbackWorker(fleet, "w1"))]
    assert probes[0].service_of("a") == probes[1].service_of("a") > 0, "one account of a tenant over all workers"


@pytest.mark.parametrize("num_turns", [None, 0, 4])
async def test_a_cancelled_request_gives_its_quota_back(clock: FakeClock, num_turns: int | None) -> None:
    """Without a worker, before its first plan, and while it runs."""
    limits = TenantLimits(max_running_requests=1, max_queued_tokens=3, tokens_per_minute=103)
    table = TenantTable({"a": limits})
    fleet = make_fleet(clock, tenants=table)
    worker = None if num_turns is None else LoopbackWorker(fleet)
    stream = fleet.submit(make_request(fleet, [1, 2, 3], 100, tenant="a"))
    for _ in range(num_turns or 0):
        assert worker is not None
        await worker.turn()
    with pytest.raises(QuotaExceeded):
        fleet.submit(make_request(fleet, [1], 1, tenant="a"))
    stream.cancel()
    (use,) = fleet.tenant_use()
    assert (use.num_requests, use.num_queued_tokens) == (0, 0)
    assert use.tokens_left == 100 - use.num_generated_tokens, "what it may still have generated"
    assert (use.num_generated_tokens > 0) == bool(num_turns)
    clock.advance(60.0)
    fleet.submit(make_request(fleet, [1, 2, 3], 100, tenant="a"))
