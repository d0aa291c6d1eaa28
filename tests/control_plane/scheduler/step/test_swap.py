"""Preemption by swap: what moves, who is swapped and who is computed once more, and the way back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.scheduler import PrefixKeys
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.step_costs import StepCosts
from control_plane.scheduler.types import BeamSearch, FinishReason, Request, RequestId, StepPlan, StepResult
from tests.control_plane.scheduler.factories import Bench, make_adapter, make_request
from tests.fakes.model_worker import oracle

CHEAP = SchedulerSettings(swap_us_per_block=0.0, watermark=0.0)  # moving a block costs nothing
EXPENSIVE = SchedulerSettings(swap_us_per_block=1e9, watermark=0.0)


def run_short_of_blocks(settings: SchedulerSettings, *requests: Request, **limits: int) -> Bench:
    """Run until the first preemption, with blocks for about one of the requests less than there are."""
    all_limits: dict[str, Any] = {"num_blocks": 6, "num_host_blocks": 8, "max_rows": 4, **limits}
    bench = Bench(settings, **all_limits)
    bench.add(*requests)
    while bench.scheduler.stats().num_preemptions == 0:
        assert bench.step() is not None, "everything ended and nobody was preempted"
    return bench


def three_requests() -> list[Request]:
    """Three blocks each for the first two, four for the third, which is preempted."""
    return [make_request(i, prompt=4, max_tokens=12 if i == 3 else 8) for i in (1, 2, 3)]


def test_a_victim_moves_out_and_comes_back_with_one_token_to_compute() -> None:
    requests = three_requests()
    bench = run_short_of_blocks(CHEAP, *requests)
    plan = bench.plans[-1]
    assert len(plan.swap_outs) == 2, "8 tokens of 4 a block"
    stats = bench.scheduler.stats()
    assert (stats.num_swapped, stats.num_swapped_out, stats.num_host_blocks_held) == (1, 1, 2)
    bench.run()
    (back,) = [plan for plan in bench.plans if plan.swap_ins]
    (new,) = back.new_rows
    assert new.request_id == 3 and new.num_computed_tokens == len(new.token_ids) - 1
    assert [bench.tokens[r.request_id] for r in requests] == [oracle(request, 64) for request in requests]
    assert bench.scheduler.stats().num_host_blocks_held == 0


def test_blocks_of_a_victim_are_free_for_the_plan_that_moves_them() -> None:
    bench = run_short_of_blocks(CHEAP, *three_requests(), plan_depth=2)
    plan = next(plan for plan in bench.plans if plan.swap_outs)
    moved = {block_id for block_id, _ in plan.swap_outs}
    assert {block_id for _, block_id in plan.appended_blocks} & moved


@pytest.mark.parametrize(("settings", "is_swapped"), [(CHEAP, True), (EXPENSIVE, False)])
def test_a_single_sequence_is_swapped_only_where_that_is_cheaper(settings: SchedulerSettings, is_swapped: bool) -> None:
    bench = run_short_of_blocks(settings, *three_requests())
    assert bench.scheduler.stats().num_swapped_out == is_swapped
    bench.run()


def test_a_request_with_several_completions_is_swapped_whatever_it_costs() -> None:
    requests = [make_request(1, prompt=40, max_tokens=20), make_request(2, prompt=6, max_tokens=20, num_samples=3)]
    bench = run_short_of_blocks(EXPENSIVE, *requests, num_blocks=20, num_host_blocks=20, max_step_tokens=64)
    assert bench.scheduler.stats().num_swapped_out == 1
    plan = next(plan for plan in bench.plans if plan.swap_outs)
    assert len({block_id for block_id, _ in plan.swap_outs}) == len(plan.swap_outs), "a shared block moves once"
    while not bench.plans[-1].swap_ins:
        bench.step()
    back = next(plan for plan in bench.plans if plan.swap_ins)
    tables = [new.block_ids for new in back.new_rows]
    assert len(tables) == 3 and len({table[0] for table in tables}) == 1, "and is shared again"


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_without_host_blocks_tokens_are_computed_once_more(num_host_blocks: int) -> None:
    bench = run_short_of_blocks(CHEAP, *three_requests(), num_host_blocks=num_host_blocks)
    assert bench.scheduler.stats().num_swapped_out == 0
    bench.run()


def test_fcfs_never_swaps() -> None:
    settings = SchedulerSettings(policy=Policy.FCFS, swap_us_per_block=0.0)
    bench = run_short_of_blocks(settings, *three_requests())
    assert bench.scheduler.stats().num_swapped_out == 0


def test_swapped_requests_come_back_before_any_that_waits() -> None:
    bench = run_short_of_blocks(CHEAP, *three_requests())
    bench.add(make_request(4, prompt=1, max_tokens=1))
    bench.run()
    order = [new.request_id for plan in bench.plans for new in plan.new_rows]
    assert order == [1, 2, 3, 3, 4]


@pytest.mark.parametrize(
    ("tenants", "priorities", "order"),
    [
        ("aaa", (0, 0, 0), [2, 3, 4]),  # by arrival
        ("aaa", (0, 0, 1), [4, 2, 3]),
        ("aab", (0, 0, 0), [4, 2, 3]),  # a got more service than b
        ("aba", (9, 0, 9), [3, 2, 4]),
    ],
)
def test_swapped_requests_come_back_in_turn_of_their_tenants(
    tenants: str, priorities: tuple[int, ...], order: list[int]
) -> None:
    """So who had most service, and gave way for that, is not the first to return."""
    bench = Bench(CHEAP, num_blocks=10, num_host_blocks=16, max_rows=4)
    bench.add(make_request(1, prompt=4, max_tokens=28, tenant="first"))
    for number, (tenant, priority) in enumerate(zip(tenants, priorities, strict=True), start=2):
        bench.add(make_request(number, prompt=4, max_tokens=12, tenant=tenant, priority=priority))
    for _ in range(2):
        bench.step()
    for number in (4, 2, 3):
        bench.probe.preempt(RequestId(number))
    assert bench.scheduler.stats().num_swapped == 3
    bench.counters.charge_decode("a", 1000)
    num_plans = len(bench.plans)
    bench.run()
    back = [new.request_id for plan in bench.plans[num_plans:] for new in plan.new_rows]
    assert back[:3] == order


def test_blocks_that_the_prefix_cache_still_has_are_shared_not_moved() -> None:
    """Request 3 ends up with its first block held by request 4, which has the same prompt."""
    bench = Bench(CHEAP, num_blocks=7, num_host_blocks=8)
    bench.add(make_request(1, max_tokens=12), make_request(2, max_tokens=3), make_request(3, [9] * 5, max_tokens=12))
    while not bench.scheduler.stats().num_swapped:
        bench.step()
    bench.run()
    moved_out = sum(len(plan.swap_outs) for plan in bench.plans)
    moved_in = sum(len(plan.swap_ins) for plan in bench.plans)
    assert 0 < moved_in < moved_out


def test_host_blocks_are_given_back_when_the_result_of_the_plan_that_swaps_in_came() -> None:
    bench = run_short_of_blocks(CHEAP, *three_requests())
    while not bench.plans[-1].swap_ins:
        bench.plan()
        if not bench.plans[-1].swap_ins:
            bench.return_result()
    assert bench.scheduler.stats().num_host_blocks_held == 2
    bench.return_result()
    assert bench.scheduler.stats().num_host_blocks_held == 0


def test_a_swapped_request_that_is_cancelled_leaves_nothing() -> None:
    bench = run_short_of_blocks(CHEAP, *three_requests())
    bench.scheduler.cancel(RequestId(3))
    check_scheduler(bench.scheduler)
    stats = bench.scheduler.stats()
    assert (stats.num_swapped, stats.num_host_blocks_held) == (0, 0)
    bench.run()
    assert sorted(bench.ends) == [1, 2]


def test_a_move_that_no_plan_carries_yet_is_forgotten_with_its_request() -> None:
    """Two requests in a row are moved to one host block between two plans: only the second move may be planned."""
    bench = Bench(CHEAP, num_blocks=16, num_host_blocks=1, num_slots=1)
    one, two = make_adapter("one"), make_adapter("two")
    bench.add(make_request(1, prompt=2, adapter=one, max_tokens=9))
    bench.step()
    for request_id in (1, 2):
        bench.scheduler.pause(RequestId(request_id))
        bench.add(make_request(10 * request_id, prompt=2, adapter=two if request_id == 1 else one, max_tokens=2))
        bench.scheduler.slot_commands()
        if request_id == 1:
            assert bench.scheduler.stats().num_swapped == 1
            bench.scheduler.cancel(RequestId(1))
            assert bench.probe.moves_to_come() == []


def bench_before_a_swap(*, num_in_flight: int = 1, **fields: Any) -> Bench:
    """8 blocks. Request 1 is to be swapped out by the next plan, for request 2 needs its slot. Three of its tokens are
    known, and so many steps that go on from there are in flight."""
    one, two = make_adapter("one"), make_adapter("two")
    bench = Bench(CHEAP, num_blocks=8, num_slots=1, plan_depth=2, num_host_blocks=8)
    bench.add(make_request(1, prompt=6, max_tokens=10, adapter=one, **fields))
    for _ in range(3):
        bench.step()
    for _ in range(num_in_flight):
        assert bench.plan() is not None
    bench.scheduler.pause(RequestId(1))
    bench.add(make_request(2, prompt=2, max_tokens=2, adapter=two))
    assert bench.scheduler.slot_commands() == []
    assert bench.probe.moves_to_come(), "no move is to come"
    check_scheduler(bench.scheduler)
    return bench


def tables(plans: Iterable[StepPlan | None]) -> list[set[int]]:
    """Blocks that the plans give to rows, by row."""
    blocks: dict[int, set[int]] = {}
    for plan in plans:
        assert plan is not None
        for new in plan.new_rows:
            blocks[new.row] = set(new.block_ids)
        for row, block_id in plan.appended_blocks:
            blocks.setdefault(row, set()).add(block_id)
    return [blocks[row] for row in sorted(blocks)]


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_blocks_of_a_request_that_ends_before_its_swap_is_planned_wait_for_its_steps(is_cancelled: bool) -> None:
    bench = bench_before_a_swap(deadline_s=50.0)
    (written,) = tables(bench.plans)
    assert len(written) == 3
    if is_cancelled:
        bench.scheduler.cancel(RequestId(1))
    else:
        bench.keep(bench.scheduler.expire(50.0))
    check_scheduler(bench.scheduler)
    bench.add(make_request(3, prompt=26, max_tokens=1))
    assert bench.plan() is None, "it takes 7 blocks, and a step in flight writes 3 of the 8"
    bench.scheduler.cancel(RequestId(3))
    bench.add(make_request(4, prompt=16, max_tokens=1))
    plan = bench.plan()
    assert tables([plan])[0].isdisjoint(written)
    assert plan is not None and plan.swap_outs == [], "nobody wants what the request computed"
    bench.run()
    assert bench.scheduler.stats().num_blocks_held == 0


def test_blocks_of_an_completion_that_ends_before_its_swap_is_planned_wait_for_its_steps() -> None:
    bench = bench_before_a_swap(num_samples=2)
    first, second = tables(bench.plans)
    assert len(first - second) == 2, "the block of the first four tokens is shared"
    bench.scheduler.cancel(RequestId(1), index=0)
    check_scheduler(bench.scheduler)
    bench.add(make_request(4, prompt=12, max_tokens=1))
    plan = bench.plan()
    assert tables([plan])[0].isdisjoint(first - second)
    assert plan is not None
    assert {block_id for block_id, _ in plan.swap_outs} == second, "the other completion goes on"


def test_blocks_of_a_request_that_samples_a_stop_token_before_its_swap_is_planned_wait_for_its_next_step() -> None:
    request = make_request(1, prompt=6, max_tokens=10, adapter=make_adapter("one"))
    bench = bench_before_a_swap(num_in_flight=2, stop_token_ids=frozenset([oracle(request, 64)[3]]))
    (written,) = tables(bench.plans)
    bench.return_result()
    assert 1 in bench.ends and len(bench.sent) == 1
    bench.add(make_request(4, prompt=16, max_tokens=1))
    assert tables([bench.plan()])[0].isdisjoint(written)


def test_a_beams_last_block_is_not_moved_and_waits_for_the_step_that_writes_it() -> None:
    bench = Bench(CHEAP, num_blocks=20, num_host_blocks=20, plan_depth=2)
    bench.add(make_request(1, prompt=6, max_tokens=10, beam=BeamSearch(2)))
    for _ in range(3):
        bench.step()
    assert bench.plan() is not None, "it computes the ninth token, the first in its block"
    written = {table[-1] for table in bench.probe.block_tables()}
    bench.probe.preempt(RequestId(1))
    bench.add(make_request(2, prompt=56, max_tokens=1))
    plan = bench.plan()
    assert plan is not None and plan.swap_outs
    assert written.isdisjoint(block_id for block_id, _ in plan.swap_outs)
    assert written.isdisjoint(tables([plan])[0])


def test_a_plan_may_hold_moves_alone() -> None:
    bench = bench_before_a_swap()
    bench.scheduler.cancel(RequestId(2))
    plan = bench.plan()
    assert plan is not None
    assert (plan.decode_rows, plan.prefills, len(plan.swap_outs)) == ([], [], 3)
    while bench.sent:
        bench.return_result()
    bench.scheduler.resume(RequestId(1))
    bench.run()
    assert len(bench.tokens[1]) == 10


def test_a_paused_request_stays_swapped_until_it_is_read_again() -> None:
    requests = three_requests()
    bench = run_short_of_blocks(CHEAP, *requests)
    bench.scheduler.pause(RequestId(3))
    for _ in range(20):
        bench.step()
    assert sorted(bench.ends) == [1, 2] and bench.scheduler.stats().num_swapped == 1
    bench.add(make_request(4, max_tokens=1))
    bench.step()
    assert 4 in bench.ends, "it holds up nobody meanwhile"
    bench.scheduler.resume(RequestId(3))
    bench.run()
    assert bench.tokens[3] == oracle(requests[2], 64)


def test_a_swapped_request_waits_for_its_adapter_like_any_other() -> None:
    one, two = make_adapter("one"), make_adapter("two")
    requests = [
        make_request(1, max_tokens=14),
        make_request(2, max_tokens=12),
        make_request(3, adapter=one, max_tokens=12),
    ]
    bench = Bench(CHEAP, num_blocks=6, num_host_blocks=8, num_slots=1)
    bench.add(*requests)
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    assert bench.scheduler.stats().num_swapped == 1
    bench.add(make_request(4, adapter=two, max_tokens=2))
    bench.run()
    assert bench.tokens[3] == oracle(requests[2], 64) and 4 in bench.ends


def test_a_swapped_request_whose_adapter_cannot_be_had_ends_with_its_tokens() -> None:
    one, two, three = (make_adapter(name) for name in ("one", "two", "three"))
    bench = Bench(CHEAP, num_blocks=16, num_host_blocks=8, num_slots=1)
    bench.add(make_request(1, adapter=one, max_tokens=9))
    for _ in range(3):
        bench.step()
    bench.scheduler.pause(RequestId(1))
    bench.add(make_request(2, adapter=two, max_tokens=1))
    bench.run_until_idle()
    assert bench.scheduler.stats().num_swapped == 1
    bench.scheduler.set_pinned({two.digest})
    bench.scheduler.resume(RequestId(1))
    bench.scheduler.slot_commands()
    (output,) = bench.scheduler.expire(0.0)
    assert output.finish_reason is FinishReason.ADAPTER_FAILED
    assert output.request is not None and list(output.request.generated_token_ids) == bench.tokens[1]
    assert bench.scheduler.stats().num_host_blocks_held == 0
    assert three.digest not in bench.probe.ready_digests()


def test_swapped_requests_go_on_elsewhere_with_the_same_tokens() -> None:
    requests = three_requests()
    bench, other = run_short_of_blocks(CHEAP, *requests), Bench()
    moved = bench.scheduler.take_requests()
    other.add(*moved)
    other.run()
    assert [other.tokens[r.request_id] for r in requests] == [oracle(request, 64) for request in requests]


def test_a_resumed_request_gains_a_token_before_it_is_preempted_again() -> None:
    bench = Bench(CHEAP, num_blocks=6, block_size=2, max_rows=5, num_host_blocks=20)
    requests = [make_request(i, prompt=2, max_tokens=10) for i in range(1, 6)]
    bench.add(*requests)
    tokens_when_out: dict[int, list[int]] = {r.request_id: [] for r in requests}
    before: set[int] = set()
    while bench.scheduler.request_ids:
        bench.step()
        held = set(bench.running_ids())
        for request_id in before - held - set(bench.ends):
            tokens_when_out[request_id].append(len(bench.tokens[request_id]))
        before = held
    assert bench.scheduler.stats().num_swapped_out == bench.scheduler.stats().num_preemptions > 2
    assert any(len(counts) > 1 for counts in tokens_when_out.values()), "nobody was preempted twice"
    assert all(counts == sorted(set(counts)) for counts in tokens_when_out.values())
    assert [bench.tokens[r.request_id] for r in requests] == [oracle(request, 64) for request in requests]


def test_prices_follow_the_times_that_the_worker_reports() -> None:
    costs = StepCosts(SchedulerSettings(prefill_us_per_token=25.0, swap_us_per_block=100.0, step_us=1000.0))
    assert not costs.is_swap_cheaper(num_blocks=10, num_tokens=80)
    costs.observe(step_time_us=640, num_decodes=0, num_prefill_tokens=20)
    assert costs.prefill_us_per_token == 25.0, "a short prefill says little"
    costs.observe(step_time_us=6400, num_decodes=2, num_prefill_tokens=128)
    assert costs.prefill_us_per_token == 50.0
    assert costs.is_swap_cheaper(num_blocks=10, num_tokens=80)
    costs.observe(step_time_us=400, num_decodes=32, num_prefill_tokens=0)
    assert costs.decode_step_us == 400.0
    costs.observe(step_time_us=800, num_decodes=32, num_prefill_tokens=0)
    assert 400 < costs.decode_step_us < 450


def test_the_price_of_a_swap_follows_the_moves_that_the_worker_reports() -> None:
    costs = StepCosts(SchedulerSettings(prefill_us_per_token=10.0, swap_us_per_block=100.0))
    assert not costs.is_swap_cheaper(num_blocks=10, num_tokens=100)
    costs.observe_moves(num_blocks=1, time_us=400)
    assert 100.0 < costs.swap_us_per_block < 120.0, "one block says little about many"
    costs.observe_moves(num_blocks=200, time_us=200 * 2000)
    assert 400.0 < costs.swap_us_per_block < 650.0, "one slow move is not a rule"
    for _ in range(40):
        costs.observe_moves(num_blocks=200, time_us=4000)
    assert costs.swap_us_per_block == pytest.approx(20.0, rel=1e-3)
    assert costs.is_swap_cheaper(num_blocks=10, num_tokens=100)


@pytest.mark.parametrize(("us_per_block", "num_swapped_out"), [(1, 1), (1000, 0)])
def test_the_next_victim_is_preempted_by_the_mode_that_the_measured_moves_favour(
    us_per_block: int, num_swapped_out: int
) -> None:
    bench = Bench(SchedulerSettings(prefill_us_per_token=25.0, swap_us_per_block=40.0), num_blocks=6, num_host_blocks=8)
    bench.add(*(make_request(i, prompt=4, max_tokens=12) for i in (1, 2, 3)))
    plan = bench.plan()
    assert plan is not None
    result = bench.worker.execute(bench.sent.pop(0))
    result = replace(result, num_moved_blocks=64, move_time_us=64 * us_per_block)
    bench.keep(bench.scheduler.apply(result))
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    assert bench.scheduler.stats().num_swapped_out == num_swapped_out
    bench.run()


def test_the_scheduler_learns_from_the_times_of_its_results() -> None:
    bench = Bench()
    bench.add(make_request(1, max_tokens=3))
    bench.step()
    plan = bench.plan()
    assert plan is not None
    bench.sent.clear()
    result = bench.worker.execute(plan)
    bench.scheduler.apply(StepResult(result.step_id, result.rows, result.token_ids, step_time_us=777))
    assert bench.scheduler.utilization(PrefixKeys(make_request(2))).step_us == 777
