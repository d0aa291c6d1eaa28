"""Which adapter is loaded next: accounts by the bytes that were loaded for them, and few loads under way."""

from __future__ import annotations

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.memory.load_queue import AdapterDemand, LoadQueue
from control_plane.scheduler.memory.slot_placement import MAX_LOADING
from control_plane.scheduler.types import AdapterRef, EvictSlot, LoadSlot, RequestId, SlotReady
from tests.control_plane.scheduler.factories import Bench, make_adapter, make_request


def make_queue(**weights: float) -> LoadQueue:
    return LoadQueue(VirtualCounters(weights))


def add(queue: LoadQueue, name: str, *accounts: str, arena_bytes: int = 10) -> AdapterDemand:
    demand = AdapterDemand(AdapterRef(name, arena_bytes))
    demand.num_waiting.update(accounts)
    queue.add(demand)
    queue.check_invariants()
    return demand


def load_all(queue: LoadQueue) -> list[str]:
    """Adapters in the order in which they are loaded, which is also the order that was foretold."""
    foretold = [demand.ref.digest for demand in queue.next_loads(100)]
    loaded = []
    while (demand := queue.head) is not None:
        queue.charge(demand)
        queue.remove(demand.ref.digest)
        queue.check_invariants()
        loaded.append(demand.ref.digest)
    assert loaded == foretold
    return loaded


def test_adapters_of_one_account_are_loaded_in_the_order_in_which_they_were_wanted() -> None:
    queue = make_queue()
    for name in ("c", "a", "b"):
        add(queue, name, "one")
    assert load_all(queue) == ["c", "a", "b"]


def test_accounts_take_turns_by_bytes_over_weight() -> None:
    queue = make_queue(heavy=2.0)
    for name in ("l1", "l2", "l3"):
        add(queue, name, "light")
    for name in ("h1", "h2", "h3"):
        add(queue, name, "heavy")
    add(queue, "large", "third", arena_bytes=100)
    add(queue, "small", "third")
    assert load_all(queue) == ["l1", "h1", "large", "h2", "l2", "h3", "l3", "small"]


def test_an_account_that_wants_many_delays_one_that_comes_later_by_one_load() -> None:
    queue = make_queue()
    for number in range(50):
        add(queue, f"cold {number}", "greedy")
    for _ in range(10):
        demand = queue.head
        assert demand is not None
        queue.charge(demand)
        queue.remove(demand.ref.digest)
    add(queue, "late", "modest")
    assert [demand.ref.digest for demand in queue.next_loads(3)] == ["cold 10", "late", "cold 11"]


def test_an_adapter_that_several_accounts_want_is_loaded_in_the_first_ones_turn_and_once() -> None:
    queue = make_queue()
    add(queue, "a1", "a")
    both = add(queue, "both", "a", "b")
    add(queue, "b1", "b")
    assert load_all(queue) == ["a1", "both", "b1"], "b pays for it, so b1 comes after it"
    add(queue, "a2", "a")
    both.num_waiting.clear()
    both.num_waiting["a"] = 1
    queue.add(both)
    queue.add_account(both, "b")
    both.num_waiting["b"] = 1
    queue.check_invariants()
    queue.remove_account(both, "a")
    del both.num_waiting["a"]
    queue.check_invariants()
    assert sorted(load_all(queue)) == ["a2", "both"]


def test_a_tenant_of_a_thousand_cold_adapters_does_not_put_anothers_behind_them() -> None:
    bench = Bench(num_slots=64, arena_bytes=1 << 30)
    for number in range(1000):
        bench.add(make_request(number, adapter=make_adapter(f"cold {number}"), tenant="greedy"))
    first = bench.scheduler.slot_commands()
    assert len(first) == MAX_LOADING, "what is sent can be overtaken no more"
    bench.add(make_request(5000, adapter=make_adapter("other"), tenant="modest"))
    digests: list[str] = []
    for command in first:
        assert isinstance(command, LoadSlot)
        bench.scheduler.apply_slot_report(SlotReady(command.slot_idx, command.generation), 0.0)
        digests += [command.digest for command in bench.scheduler.slot_commands()]
        check_scheduler(bench.scheduler)
    assert make_adapter("other").digest in digests[:2]


def test_what_is_evicted_for_loads_counts_among_those_under_way() -> None:
    bench = Bench(num_slots=2 * MAX_LOADING, arena_bytes=1 << 30, num_blocks=400, max_rows=64)
    for number in range(2 * MAX_LOADING):
        bench.add(make_request(number, max_tokens=1, adapter=make_adapter(f"warm {number}")))
    bench.run_until_idle()
    assert not bench.scheduler.request_ids
    for number in range(100, 200):
        bench.add(make_request(number, adapter=make_adapter(f"cold {number}")))
    commands = bench.scheduler.slot_commands()
    assert len(commands) == MAX_LOADING and all(isinstance(command, EvictSlot) for command in commands)
    for number in range(100, 200):
        bench.scheduler.cancel(RequestId(number))
    check_scheduler(bench.scheduler)
