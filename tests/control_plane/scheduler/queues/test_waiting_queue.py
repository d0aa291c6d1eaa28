"""Whose turn it is: tenants by service, requests by priority and arrival; nobody waits for who may not be admitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from control_plane.scheduler.admission import make_group
from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.queues.arrival_queue import ArrivalQueue
from control_plane.scheduler.queues.waiting_queue import WaitingQueue, queue_key
from control_plane.scheduler.requests.sequence import SequenceGroup
from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.types import Completion
from tests.control_plane.scheduler.factories import Bench, make_adapter, make_limits, make_request

ADAPTERS = [None, make_adapter("one"), make_adapter("two")]
LONG_TOKENS = 8


def make_waiting(serial: int, adapter_idx: int = 0, arrival_s: float = 0.0, **changes: Any) -> SequenceGroup:
    request = make_request(serial, adapter=ADAPTERS[adapter_idx], arrival_s=arrival_s, **changes)
    return make_group(request, make_limits(), serial)


def is_long(group: SequenceGroup) -> bool:
    return len(group.request.prompt_token_ids) > LONG_TOKENS


def make_queue(
    counters: VirtualCounters | None = None,
    is_admissible: Callable[[str | None], bool] = lambda digest: True,
    is_active: Callable[[str | None], bool] = lambda digest: digest is None,
) -> WaitingQueue:
    return WaitingQueue(
        counters or VirtualCounters(), is_admissible=is_admissible, is_active=is_active, long_tokens=LONG_TOKENS
    )


def test_one_that_may_not_be_admitted_is_skipped_until_it_may() -> None:
    ready: set[str | None] = {None}
    queue = make_queue(is_admissible=lambda digest: digest in ready)
    first, second = make_waiting(1, 1), make_waiting(2, 0)
    queue.add(first)
    queue.add(second)
    assert queue.peek() is second
    ready.add(first.digest)
    queue.mark_ready(first.digest)
    assert queue.peek() is first


def test_a_preempted_request_goes_back_to_its_place() -> None:
    queue = make_queue()
    first, second = make_waiting(1), make_waiting(2)
    queue.add(second)
    queue.add(first)
    assert queue.peek() is first


@pytest.mark.parametrize("is_first_long", [False, True])
def test_a_request_is_as_long_as_its_first_completion_that_goes_on(is_first_long: bool) -> None:
    """After a move or a preemption the first completion may be over: it will not be computed again."""
    long, short = tuple(range(3, 3 + LONG_TOKENS)), (3,)
    ended, live = (long, short) if is_first_long else (short, long)
    completions = (Completion(ended, is_ended=True), Completion(live))
    queue = make_queue()
    queue.add(make_waiting(1, max_tokens=20, num_samples=2, completions=completions))
    assert (queue.peek(may_be_long=False) is not None) == is_first_long
    queue.check_invariants()


def test_a_request_keeps_its_size_class_when_its_first_completion_is_cancelled() -> None:
    bench = Bench(SchedulerSettings(long_prefill_tokens=LONG_TOKENS), num_blocks=64)
    bench.add(make_request(1, prompt=4, max_tokens=30))
    completions = (Completion(tuple(range(3, 3 + LONG_TOKENS))), Completion((3,)), Completion((3, 4)))
    several = make_request(2, prompt=4, max_tokens=20, num_samples=3, completions=completions)
    bench.add(several)
    bench.scheduler.cancel(several.request_id, index=0)
    check_scheduler(bench.scheduler)
    bench.scheduler.cancel(several.request_id)
    check_scheduler(bench.scheduler)
    assert bench.probe.num_queued() == 1
    bench.run()


def test_the_tenant_with_the_least_service_is_next_whoever_came_first() -> None:
    counters = VirtualCounters()
    queue = make_queue(counters)
    for serial in (1, 2, 3):
        queue.add(make_waiting(serial, tenant="early"))
    queue.add(make_waiting(4, tenant="late"))
    assert queue.peek() is not None and queue.peek().request.request_id == 1  # type: ignore[union-attr]
    counters.charge_prefill("early", 10)
    assert queue.peek().request.tenant == "late"  # type: ignore[union-attr]
    counters.charge_prefill("late", 20)
    assert queue.peek().request.tenant == "early"  # type: ignore[union-attr]


def test_priority_counts_inside_a_tenant_only() -> None:
    counters = VirtualCounters()
    queue = make_queue(counters)
    urgent = make_waiting(3, tenant="a", priority=9)
    for group in (make_waiting(1, tenant="a"), make_waiting(2, tenant="b"), urgent):
        queue.add(group)
    counters.charge_prefill("b", 1)
    assert queue.peek() is urgent
    counters.charge_prefill("a", 2)
    assert queue.peek().request.tenant == "b"  # type: ignore[union-attr]


def test_short_prompts_pass_long_ones_where_no_long_one_may_begin() -> None:
    queue = make_queue()
    long, short = make_waiting(1, prompt=LONG_TOKENS + 1), make_waiting(2, prompt=LONG_TOKENS)
    queue.add(long)
    queue.add(short)
    assert queue.peek() is long
    assert queue.peek(may_be_long=False) is short
    queue.remove(short)
    assert queue.peek(may_be_long=False) is None


def test_priority_decides_between_the_long_and_the_short_of_one_tenant() -> None:
    queue = make_queue()
    long, short = make_waiting(1, prompt=LONG_TOKENS + 1), make_waiting(2, priority=1)
    queue.add(long)
    queue.add(short)
    assert queue.peek() is short


def test_an_active_adapter_of_the_same_tenant_is_found_behind_one_that_is_not() -> None:
    active: set[str | None] = {None}
    queue = make_queue(is_active=lambda digest: digest in active)
    first, second, other = make_waiting(1, 1), make_waiting(2, 2), make_waiting(3, 0, tenant="b")
    for group in (first, second, other):
        queue.add(group)
    assert queue.peek_active(first) is None
    active.add(second.digest)
    queue.mark_ready(second.digest)
    assert queue.peek_active(first) is second


def test_a_request_that_is_set_aside_is_passed_and_goes_on_waiting() -> None:
    counters = VirtualCounters()
    queue = make_queue(counters)
    first, second = make_waiting(1, 1), make_waiting(2)
    queue.add(first)
    queue.add(second)
    assert queue.set_aside(first)
    queue.check_invariants()
    assert queue.peek() is second
    assert (len(queue), list(queue), queue.of_digest(first.digest)) == (2, [second, first], [first])
    assert counters.num_waiting_by_tenant == {"default": 2}
    queue.remove(second)
    assert queue.peek() is None and queue.is_awaited
    queue.remove(first)
    assert not queue.aside and not queue.is_awaited and counters.num_waiting_by_tenant == {}


def test_strictly_by_arrival_the_first_holds_up_all_others() -> None:
    ready: set[str | None] = {None}
    counters = VirtualCounters()
    queue = ArrivalQueue(counters, is_admissible=lambda digest: digest in ready)
    first, second = make_waiting(1, 1, tenant="a"), make_waiting(2, 0, tenant="b", priority=5)
    queue.add(second)
    queue.add(first)
    counters.charge_prefill("a", 1000)
    assert queue.peek() is None and queue.urgent_digest == first.digest
    ready.add(first.digest)
    assert queue.peek() is first
    queue.remove(first)
    assert queue.peek() is second and queue.urgent_digest is None


MOVES = st.tuples(st.sampled_from(["add", "remove", "toggle", "activate", "charge"]), st.integers(0, 1000))


@given(st.lists(MOVES))
@settings(max_examples=150)
def test_the_queue_agrees_with_a_sorted_list(moves: list[tuple[str, int]]) -> None:
    ready: set[str | None] = {None}
    active: set[str | None] = {None}
    counters = VirtualCounters({"b": 2.0})
    queue = make_queue(counters, lambda digest: digest in ready, lambda digest: digest in active)
    model: list[SequenceGroup] = []
    for serial, (move, number) in enumerate(moves):
        digest = (ADAPTERS[1 + number % 2] or make_adapter("one")).digest
        if move == "add":
            kind = {"prompt": 4 if number % 4 else LONG_TOKENS + 2, "tenant": "abc"[number % 3]}
            group = make_waiting(serial, number % 3, float(number % 7), priority=number % 2, **kind)
            queue.add(group)
            model.append(group)
        elif move == "remove" and model:
            queue.remove(model.pop(number % len(model)))
        elif move == "toggle":
            ready ^= {digest}
            queue.mark_ready(digest)
        elif move == "activate":
            active ^= {digest}
            queue.mark_ready(digest)
        elif move == "charge":
            counters.charge_prefill("abc"[number % 3], number)
        queue.check_invariants()
        assert len(queue) == len(model)
        for may_be_long in (True, False):
            allowed = [g for g in model if g.digest in ready and (may_be_long or not is_long(g))]
            group_or_none = queue.peek(may_be_long=may_be_long)
            assert (group_or_none is None) == (not allowed)
            if group_or_none is None:
                continue
            tenant = group_or_none.request.tenant
            assert counters.counter(tenant) == min(counters.counter(g.request.tenant) for g in allowed)
            own = [g for g in allowed if g.request.tenant == tenant]
            assert group_or_none is min(own, key=queue_key)
            alike = [g for g in own if g.digest in active and is_long(g) == is_long(group_or_none)]
            assert queue.peek_active(group_or_none) is (min(alike, key=queue_key) if alike else None)


@pytest.mark.parametrize("num_tenants", [1, 200])
def test_a_choice_looks_at_no_more_of_a_long_queue_than_of_a_short_one(num_tenants: int) -> None:
    looked_at: list[int] = []
    for num_waiting in (400, 4000):
        num_calls = 0

        def is_admissible(digest: str | None) -> bool:
            nonlocal num_calls
            num_calls += 1
            return True

        counters = VirtualCounters()
        queue = make_queue(counters, is_admissible)
        for serial in range(num_waiting):
            queue.add(make_waiting(serial, serial % 3, tenant=str(serial % num_tenants)))
        num_calls = 0
        for _ in range(100):
            group = queue.peek()
            assert group is not None
            queue.remove(group)
            counters.charge_prefill(group.request.tenant, 4)
        looked_at.append(num_calls)
    assert looked_at[1] <= 1.3 * looked_at[0]  # some lists of the short queue run empty
