"""Requests that lack rows or blocks hold up others for a few steps only, and get their turn all the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.probe import SchedulerProbe
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.settings import DEFAULT_SETTINGS, Policy, SchedulerSettings
from control_plane.scheduler.step.backfill import NUM_PARTS
from control_plane.scheduler.types import Request, RequestId, RequestOutput, StepResult, WorkerLimits
from tests.control_plane.scheduler.factories import Bench, make_adapter, make_request
from tests.control_plane.scheduler.ledger import Ledger

MOST = 4  # steps
FEW = SchedulerSettings(max_blocked_steps=MOST, watermark=0.0)
PASSING = [Policy.CHUNKED_PREFILL, Policy.PREFILL_FIRST]


class WideBench(Bench):
    """A bench for requests with several completions: `ends` names those that got all of their tokens, in that order."""

    def __init__(
        self, settings: SchedulerSettings = FEW, counters: VirtualCounters | None = None, **limits: Any
    ) -> None:
        super().__init__(settings, counters, **{"num_blocks": 200, "max_model_len": 200, **limits})
        self.ledger = Ledger(self.limits.max_model_len)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.ledger.open(request)
            self.scheduler.add(request)

    def keep(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            for request_id in self.ledger.take([output]):
                self.ends[request_id] = output


class Server:
    """A scheduler whose worker returns for every row the same token; steps are numbered from 1."""

    def __init__(self, limits: WorkerLimits, policy: Policy) -> None:
        self.scheduler = Scheduler(limits, SchedulerSettings(policy=policy))
        self.num_steps = 0
        self.started: dict[int, int] = {}  # request -> step
        self.ended: dict[int, int] = {}
        self.tenants: dict[int, str] = {}

    def add(self, request_id: int, max_tokens: int, *, tenant: str, prompt: int = 10, num_samples: int = 1) -> None:
        request = Request(
            RequestId(request_id), tuple(range(10, 10 + prompt)), max_tokens, tenant=tenant, num_samples=num_samples
        )
        self.tenants[request_id] = tenant
        self.scheduler.add(request)

    def num_unfinished(self, tenant: str) -> int:
        return sum(self.tenants[request_id] == tenant for request_id in self.scheduler.request_ids)

    def step(self) -> None:
        self.num_steps += 1
        plan = self.scheduler.plan(0.0)
        assert plan is not None, "requests wait and nothing is computed"
        for new in plan.new_rows:
            self.started.setdefault(new.request_id, self.num_steps)
        rows = SchedulerProbe(self.scheduler).sampled_rows()
        for output in self.scheduler.apply(StepResult(plan.step_id, rows, [5] * len(rows))):
            if output.finish_reason is not None:
                self.ended[output.request_id] = self.num_steps


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("policy", PASSING)
def test_one_request_that_needs_nearly_everything_stops_nobody_and_gets_its_turn(policy: Policy, is_wide: bool) -> None:
    """Beside one stream of 4 000 tokens, a request for a completion in each row, or with a prompt of nearly all blocks,
    and behind it 200 small requests of 20 other tenants."""
    limits = WorkerLimits(
        num_blocks=4096 if is_wide else 512,
        block_size=16,
        max_rows=256,
        max_step_tokens=2048,
        num_slots=4,
        arena_bytes=0,
        max_model_len=8192,
    )
    server = Server(limits, policy)
    server.add(1, 4000, tenant="stream")
    for _ in range(3):
        server.step()
    if is_wide:
        server.add(2, 1, tenant="wide", num_samples=256)
    else:
        server.add(2, 1, tenant="wide", prompt=8100)
    small = range(3, 203)
    for request_id in small:
        server.add(request_id, 8, tenant=f"tenant {request_id % 20}")
    most = DEFAULT_SETTINGS.max_blocked_steps
    while server.scheduler.request_ids:
        server.step()
    assert max(server.started[request_id] for request_id in small) <= 3 + most + 2
    assert max(server.ended[request_id] for request_id in small) <= 3 + most + 2 + 10
    assert server.ended[1] < server.started[2] <= server.ended[1] + most + 2


@pytest.mark.parametrize("policy", PASSING)
def test_a_request_that_lacks_rows_is_waited_for_as_long_as_they_come_free_soon(policy: Policy) -> None:
    bench = WideBench(SchedulerSettings(policy=policy, max_blocked_steps=MOST), max_rows=3)
    bench.add(make_request(1, max_tokens=MOST), make_request(2, max_tokens=20))
    bench.step()
    bench.add(make_request(3, max_tokens=5, num_samples=2), make_request(4, max_tokens=1))
    bench.run()
    order = [new.request_id for plan in bench.plans for new in plan.new_rows]
    assert order == [1, 2, 3, 3, 4]


def test_first_come_first_served_lets_nobody_pass() -> None:
    bench = WideBench(SchedulerSettings(policy=Policy.FCFS, max_blocked_steps=1), max_rows=3)
    bench.add(make_request(1, max_tokens=30))
    bench.step()
    bench.add(make_request(2, max_tokens=1, num_samples=3), make_request(3, max_tokens=1))
    bench.run()
    assert list(bench.ends) == [1, 2, 3]


@pytest.mark.parametrize("policy", PASSING)
@pytest.mark.parametrize("num_host_blocks", [0, 64])
def test_a_request_that_passed_is_preempted_once_earlier_ones_have_ended(policy: Policy, num_host_blocks: int) -> None:
    settings = SchedulerSettings(policy=policy, max_blocked_steps=MOST, swap_us_per_block=0.0)
    bench = WideBench(settings, max_rows=4, num_host_blocks=num_host_blocks)
    bench.add(make_request(1, max_tokens=20))
    bench.step()
    bench.add(make_request(2, max_tokens=2, num_samples=4), make_request(3, max_tokens=150))
    while 1 not in bench.ends:
        bench.step()
    assert bench.running_ids() == [3], "it passed"
    for _ in range(MOST + 1):
        bench.step()
    assert bench.running_ids() == [2, 2, 2, 2]
    assert bench.scheduler.stats().num_preemptions == 1
    assert bench.scheduler.stats().num_swapped == (num_host_blocks > 0)
    bench.run()
    assert sorted(bench.ends) == [1, 2, 3]


def test_a_request_is_preempted_for_room_once_in_its_life() -> None:
    """Requests 3 and 5 do so for request 2. Request 4 then waits for their ends, as if they had run before it."""
    bench = WideBench(max_rows=4)
    bench.add(make_request(1, max_tokens=20))
    bench.step()
    bench.add(make_request(2, max_tokens=2, num_samples=4), make_request(3, max_tokens=150))
    bench.add(make_request(4, max_tokens=2, num_samples=4), make_request(5, max_tokens=150))
    bench.run(1000)
    assert list(bench.ends) == [1, 2, 3, 5, 4]
    assert bench.scheduler.stats().num_preemptions == 2, "3 and 5 for 2"


def test_no_request_is_preempted_where_those_that_ran_before_leave_too_little() -> None:
    bench = WideBench(max_rows=4)
    bench.add(make_request(1, max_tokens=100))
    bench.step()
    bench.add(make_request(2, max_tokens=2, num_samples=4), make_request(3, max_tokens=60))
    while 3 not in bench.ends:
        bench.step()
    assert bench.scheduler.stats().num_preemptions == 0


def test_small_requests_that_never_end_coming_do_not_starve_one_that_needs_all_rows() -> None:
    bench = WideBench(max_rows=4)
    bench.add(make_request(1, max_tokens=30), make_request(2, max_tokens=40))
    bench.step()
    bench.add(make_request(3, max_tokens=1, num_samples=4, tenant="wide"))
    next_id, num_steps = 4, 0
    while 3 not in bench.ends:
        while bench.scheduler.num_waiting < 4:
            bench.add(make_request(next_id, max_tokens=5 + next_id % 40, tenant=f"tenant {next_id % 3}"))
            next_id += 1
        bench.step()
        num_steps += 1
    assert num_steps < 40 + 3 * MOST


def test_blocks_add_up_for_those_that_need_more_than_comes_free_at_once() -> None:
    """Request 3 needs 30 blocks while a request that needs all of them waits for a long stream, and small requests take
    every two that come free."""
    bench = WideBench(max_rows=40, num_blocks=52, max_step_tokens=200)
    bench.add(make_request(1, max_tokens=100))
    for _ in range(8):
        bench.step()
    bench.add(make_request(2, prompt=196, max_tokens=1, tenant="giant"))
    next_id = 10
    for num_steps in range(60):
        if num_steps == 20:
            assert bench.probe.set_aside_ids()[0] == 2
            bench.add(make_request(3, prompt=120, max_tokens=1, tenant="large"))
        while bench.scheduler.num_waiting < 15:
            bench.add(make_request(next_id, prompt=5, max_tokens=3, tenant=f"tenant {next_id % 3}"))
            next_id += 1
        bench.step()
        if 3 in bench.ends:
            break
    assert 3 in bench.ends and 2 not in bench.ends
    assert num_steps <= 20 + NUM_PARTS * MOST + MOST


def test_nobody_waits_for_the_end_of_a_request_whose_reader_is_slow() -> None:
    bench = WideBench(max_rows=4)
    bench.add(make_request(1, max_tokens=100))
    bench.step()
    bench.add(make_request(2, max_tokens=2, num_samples=4), make_request(3, max_tokens=150))
    while not bench.probe.set_aside_ids():
        bench.step()
    bench.scheduler.pause(RequestId(1))
    for _ in range(MOST + 5):
        bench.step()
    assert 2 in bench.ends
    bench.scheduler.resume(RequestId(1))
    bench.run()
    assert sorted(bench.ends) == [1, 2, 3]


@pytest.mark.parametrize("how", ["cancelled", "paused"])
def test_room_is_reserved_for_the_next_when_the_first_is_gone(how: str) -> None:
    bench = WideBench(max_rows=4)
    bench.add(make_request(1, max_tokens=30))
    bench.step()
    bench.add(*[make_request(i, max_tokens=2, num_samples=4) for i in (2, 3)], make_request(4, max_tokens=4))
    for _ in range(MOST + 3):
        bench.step()
    assert bench.probe.set_aside_ids() == [2, 3]
    if how == "cancelled":
        bench.scheduler.cancel(RequestId(2))
    else:
        bench.scheduler.pause(RequestId(2))
    while 3 not in bench.ends:
        bench.step()
    assert len(bench.scheduler.request_ids) == (how == "paused")
    bench.scheduler.resume(RequestId(2))
    bench.run()
    assert (2 in bench.ends) == (how == "paused")


def test_a_request_that_is_set_aside_waits_for_its_adapter_like_any_other() -> None:
    one, two = make_adapter("one"), make_adapter("two")
    bench = WideBench(max_rows=4, num_slots=1)
    bench.add(make_request(1, max_tokens=40, adapter=one))
    for _ in range(2):
        bench.step()
    bench.add(make_request(2, max_tokens=2, num_samples=4, adapter=one))
    for _ in range(MOST + 2):
        bench.step()
    assert bench.probe.set_aside_ids() == [2]
    bench.add(make_request(3, max_tokens=3, adapter=two), make_request(4, max_tokens=3))
    bench.run()
    assert sorted(bench.ends) == [1, 2, 3, 4]


def test_a_tenant_of_requests_that_need_all_rows_gets_no_more_than_its_share() -> None:
    counters = VirtualCounters()
    bench = WideBench(counters=counters, max_rows=8, max_step_tokens=64)
    next_id = 1
    for _ in range(400):
        waiting = {account.tenant: account.num_waiting for account in counters.stats()}
        for tenant, num_samples in (("wide", 8), ("a", 1), ("b", 1)):
            for _ in range(6 - waiting.get(tenant, 0)):
                max_tokens = 2 if tenant == "wide" else 12
                request = make_request(next_id, prompt=4, max_tokens=max_tokens, num_samples=num_samples, tenant=tenant)
                bench.add(request)
                next_id += 1
        bench.step()
    service = {account.tenant: account.counter for account in counters.stats()}
    assert service["a"] == pytest.approx(service["b"], rel=0.1)
    assert service["wide"] <= 1.1 * service["a"]
    assert service["wide"] >= 0.7 * service["a"], "it is not starved either"


@pytest.mark.parametrize("num_wide", [1, 8])
def test_many_completions_of_one_token_buy_no_more_than_their_share(num_wide: int) -> None:
    """Each takes all rows for a step, and before that rows are kept free for it: both are charged to its account."""
    limits = WorkerLimits(
        num_blocks=1024,
        block_size=16,
        max_rows=64,
        max_step_tokens=512,
        num_slots=4,
        arena_bytes=0,
        max_model_len=1024,
    )
    server = Server(limits, Policy.CHUNKED_PREFILL)
    next_id = 1
    for _ in range(700):
        server.add(next_id, 30, tenant=f"tenant {next_id % 10}")  # half of what the worker can do
        next_id += 1
        for _ in range(num_wide - server.num_unfinished("wide")):
            server.add(next_id, 1, tenant="wide", num_samples=64)
            next_id += 1
        server.step()
    num_ended = sum(server.tenants[request_id] != "wide" for request_id in server.ended)
    assert num_ended > 620
