"""Order of arrival among those who may be admitted, without looking at those who may not."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.scheduler.sequence_group import SequenceGroup
from control_plane.scheduler.waiting_queue import WaitingQueue
from tests.control_plane.scheduler.factories import make_adapter, make_request

ADAPTERS = [None, make_adapter("one"), make_adapter("two")]


def make_group(serial: int, adapter_idx: int = 0, arrival_s: float = 0.0) -> SequenceGroup:
    request = make_request(serial, adapter=ADAPTERS[adapter_idx], arrival_s=arrival_s)
    return SequenceGroup(request=request, order=(arrival_s, serial), cache_root=b"")


def test_one_that_may_not_be_admitted_is_skipped_until_it_may() -> None:
    ready: set[str | None] = {None}
    queue = WaitingQueue(lambda digest: digest in ready)
    first, second = make_group(1, 1), make_group(2, 0)
    queue.add(first)
    queue.add(second)
    assert queue.peek() is second
    ready.add(first.digest)
    queue.offer(first.digest)
    assert queue.peek() is first


def test_a_preempted_request_goes_back_to_its_place() -> None:
    queue = WaitingQueue(lambda digest: True)
    first, second = make_group(1), make_group(2)
    queue.add(second)
    queue.add(first)
    assert queue.peek() is first


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "toggle", "peek"]), st.integers(0, 99)), max_size=80))
def test_the_queue_agrees_with_a_sorted_list(moves: list[tuple[str, int]]) -> None:
    ready: set[str | None] = {None}
    queue = WaitingQueue(lambda digest: digest in ready)
    model: list[SequenceGroup] = []
    for serial, (move, number) in enumerate(moves):
        if move == "add":
            group = make_group(serial, number % 3, arrival_s=float(number % 7))
            queue.add(group)
            model.append(group)
        elif move == "remove" and model:
            queue.remove(model.pop(number % len(model)))
        elif move == "toggle":
            adapter = ADAPTERS[1 + number % 2]
            assert adapter is not None
            ready ^= {adapter.digest}
            queue.offer(adapter.digest)
        allowed = sorted((g for g in model if g.digest in ready), key=lambda g: g.order)
        assert queue.peek() is (allowed[0] if allowed else None)
        assert len(queue) == len(model)
        queue.check_invariants()
