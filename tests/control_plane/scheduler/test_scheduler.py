"""Batching, chunked prefill, preemption, cancellation, deadlines, pauses: one story each."""

from __future__ import annotations

import pytest

from control_plane.scheduler.errors import AdapterNeverFits, ContextNeverFits, RequestNeverFits, ResultMismatch
from control_plane.scheduler.fairness import DECODE_WEIGHT, PREFILL_WEIGHT, VirtualCounters
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.types import FinishReason, RequestId, StepResult
from tests.control_plane.scheduler.factories import Bench, make_adapter, make_request
from tests.fakes.model_worker import oracle


def test_one_request_gets_the_tokens_of_the_oracle() -> None:
    bench = Bench()
    request = make_request(1, prompt=6, max_tokens=9)
    bench.add(request)
    bench.run()
    assert bench.tokens[1] == oracle(request, 64)
    assert bench.ends[1].finish_reason is FinishReason.LENGTH


def test_requests_join_and_leave_a_running_batch() -> None:
    bench = Bench()
    bench.add(make_request(1, max_tokens=3), make_request(2, max_tokens=8))
    bench.step()
    bench.add(make_request(3, max_tokens=2))
    plan = bench.step()
    assert plan is not None
    assert (plan.decode_rows, plan.prefills) == ([0, 1], [(2, 4)])
    bench.run()
    assert sorted(bench.ends) == [1, 2, 3]


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    bench = Bench(max_step_tokens=5)
    bench.add(make_request(1, prompt=4, max_tokens=12))
    bench.step()
    bench.add(make_request(2, prompt=10, max_tokens=2))
    chunks = [bench.step() for _ in range(3)]
    assert [plan.prefills for plan in chunks if plan] == [[(1, 4)], [(1, 4)], [(1, 2)]]
    assert all(plan is not None and plan.decode_rows == [0] for plan in chunks)
    assert len(bench.tokens[2]) == 1


def test_a_decode_goes_before_a_prefill_when_the_budget_is_one_token() -> None:
    bench = Bench(max_step_tokens=1)
    bench.add(make_request(1, prompt=1, max_tokens=5), make_request(2, prompt=2, max_tokens=1))
    bench.run()
    assert list(bench.ends) == [1, 2]


def test_a_stop_token_ends_a_request_and_is_delivered() -> None:
    bench = Bench()
    tokens = oracle(make_request(1, max_tokens=10), 64)
    bench.add(make_request(1, max_tokens=10, stop_token_ids=frozenset([tokens[3]])))
    bench.run()
    assert bench.tokens[1] == tokens[: tokens.index(tokens[3]) + 1]
    assert bench.ends[1].finish_reason is FinishReason.STOP_TOKEN


def test_a_request_may_fill_the_context_and_is_never_cut_to_it() -> None:
    """A request for more tokens than there is room for must not get fewer without an error."""
    bench = Bench(max_model_len=10)
    bench.add(make_request(1, prompt=6, max_tokens=4))
    bench.run()
    assert len(bench.tokens[1]) == 4
    assert bench.ends[1].finish_reason is FinishReason.LENGTH
    with pytest.raises(ContextNeverFits, match="exceed the worker's context of 10 tokens"):
        bench.add(make_request(2, prompt=6, max_tokens=5))


def test_tokens_that_cannot_be_needed_are_never_planned_ahead() -> None:
    bench = Bench(plan_depth=3)
    bench.add(make_request(1, prompt=4, max_tokens=2))
    assert bench.plan() is not None
    assert bench.plan() is not None
    assert bench.plan() is None


def test_what_never_fits_is_refused_with_the_numbers() -> None:
    bench = Bench()
    with pytest.raises(RequestNeverFits) as too_many_blocks:
        Bench(max_model_len=200).add(make_request(1, prompt=60, max_tokens=10))
    assert (too_many_blocks.value.num_blocks_needed, too_many_blocks.value.num_blocks) == (18, 16)
    with pytest.raises(ContextNeverFits, match="context of 64"):
        bench.add(make_request(2, prompt=64))
    with pytest.raises(AdapterNeverFits, match="101 bytes"):
        bench.add(make_request(3, adapter=make_adapter("big", 101)))
    bench.add(make_request(4, prompt=60, max_tokens=4))  # 64 tokens, the last of them never stored
    bench.run()
    assert len(bench.tokens[4]) == 4


def test_a_request_that_fills_the_whole_pool_runs() -> None:
    bench = Bench(num_blocks=4, max_model_len=100)
    bench.add(make_request(1, prompt=15, max_tokens=2), make_request(2, prompt=3, max_tokens=2))
    bench.run()
    assert sorted(bench.ends) == [1, 2]


def test_preemption_takes_the_latest_arrival_and_changes_no_token() -> None:
    bench = Bench(num_blocks=6)
    requests = [make_request(i, prompt=4, max_tokens=12) for i in (1, 2, 3)]
    bench.add(*requests)
    for _ in range(6):
        bench.step()
    assert bench.running_ids() == [1, 2]
    assert bench.scheduler.stats().num_preemptions == 1
    bench.run()
    assert [bench.tokens[i] for i in (1, 2, 3)] == [oracle(request, 64) for request in requests]


def test_a_preempted_request_comes_back_with_its_prompt_and_what_it_generated_apart() -> None:
    """Penalties of the completion must not count as prompt what was generated before."""
    bench = Bench(num_blocks=4, block_size=2, max_rows=2)
    bench.add(*[make_request(i, prompt=2, max_tokens=6) for i in (1, 2)])
    bench.run()
    *_, back = [new for plan in bench.plans for new in plan.new_rows if new.request_id == 2]
    num_generated = len(back.generated_token_ids)
    assert (back.prompt_token_ids, back.generated_token_ids) == ((2, 2), bench.tokens[2][:num_generated])
    assert num_generated > 0


def test_a_prefill_is_charged_to_its_tenant_without_what_was_cached_and_so_is_the_token_behind_it() -> None:
    counters = VirtualCounters({"a": 2.0})
    bench = Bench(counters=counters)
    prompt = list(range(13))
    for request_id, num_charged in ((1, 13), (2, 13 - 12)):
        before = counters.counter("a")
        bench.add(make_request(request_id, prompt, max_tokens=1, tenant="a"))
        bench.plan()
        assert counters.counter("a") == before + (PREFILL_WEIGHT * num_charged + DECODE_WEIGHT) / 2.0
        bench.run()
    (account,) = counters.stats()
    assert (account.num_prefill_tokens, account.num_decode_tokens) == (14, 2)


def test_every_token_is_charged_once_however_often_a_request_is_preempted() -> None:
    counters = VirtualCounters()
    bench = Bench(counters=counters, num_blocks=4, block_size=2, max_rows=2)
    bench.add(*[make_request(i, prompt=2, max_tokens=6, tenant="a") for i in (1, 2)])
    bench.run()
    assert bench.scheduler.stats().num_preemptions > 0
    (account,) = counters.stats()
    assert account.num_decode_tokens == 12


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_is_cancelled_between_two_chunks_of_its_prompt_leaves_nothing(depth: int) -> None:
    bench = Bench(plan_depth=depth, max_step_tokens=8, num_blocks=10)
    bench.add(make_request(1, prompt=30, max_tokens=4))
    for _ in range(depth):
        bench.plan()
    bench.return_result()
    bench.scheduler.cancel(RequestId(1))
    check_scheduler(bench.scheduler)
    assert (len(bench.scheduler.request_ids), bench.scheduler.stats().num_blocks_held) == (0, 8 * (depth - 1))
    bench.add(make_request(2, prompt=33, max_tokens=2))
    bench.run()
    plans = bench.plans[depth:]
    assert all(row == 0 for plan in plans for row in plan.decode_rows), "no row of the first is planned any more"
    assert sum(num_tokens for plan in plans for _, num_tokens in plan.prefills) == 33
    assert bench.tokens == {1: [], 2: oracle(make_request(2, prompt=33, max_tokens=2), 64)}
    assert bench.scheduler.stats().num_blocks_held == 0


def test_only_requests_that_never_ran_are_offered_to_other_workers() -> None:
    """However many were preempted: those that wait behind them are found all the same."""
    bench = Bench(num_blocks=6, max_rows=3)
    bench.add(*(make_request(i, prompt=4, max_tokens=16) for i in (1, 2, 3)))
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    bench.add(*(make_request(i) for i in (4, 5, 6)))
    assert bench.probe.num_queued() > 3
    assert list(bench.scheduler.unstarted_ids) == [4, 5, 6]
    assert bench.scheduler.withdraw(RequestId(6)) is not None
    assert list(bench.scheduler.unstarted_ids) == [4, 5]


def test_a_resumed_request_gains_a_token_before_it_is_preempted_again() -> None:
    bench = Bench(num_blocks=6, block_size=2, max_rows=5)
    bench.add(*[make_request(i, prompt=2, max_tokens=10) for i in range(1, 6)])
    tokens_at_preemption: dict[int, list[int]] = {i: [] for i in range(1, 6)}
    before: set[int] = set()
    while bench.scheduler.request_ids:
        bench.step()
        held = set(bench.running_ids())
        for request_id in before - held - set(bench.ends):
            tokens_at_preemption[request_id].append(len(bench.tokens[request_id]))
        before = held
    preempted = [counts for counts in tokens_at_preemption.values() if len(counts) > 1]
    assert preempted, "nobody was preempted twice: the case did not occur"
    assert all(counts == sorted(set(counts)) for counts in preempted)


def test_an_admitted_request_is_not_preempted_before_its_first_token() -> None:
    bench = Bench(num_blocks=9, block_size=2, max_step_tokens=3)
    bench.add(make_request(1, prompt=2, max_tokens=12))
    bench.step()
    bench.add(make_request(2, prompt=11, max_tokens=4))
    while bench.scheduler.stats().num_preemptions == 0 and len(bench.plans) < 20:
        bench.step()
    assert bench.scheduler.stats().num_preemptions == 1
    assert len(bench.tokens[2]) == 1
    bench.run()
    assert bench.tokens[2] == oracle(make_request(2, prompt=11, max_tokens=4), 64)


def test_a_later_arrival_waits_for_blocks_rather_than_preempt_an_earlier_one() -> None:
    bench = Bench(num_blocks=3)
    bench.add(make_request(1, prompt=4, max_tokens=4), make_request(2, prompt=3, max_tokens=4))
    bench.run()
    assert list(bench.ends) == [1, 2]
    assert bench.scheduler.stats().num_preemptions == 0


def test_an_admission_leaves_a_block_for_those_who_run() -> None:
    bench = Bench(num_blocks=3)
    bench.add(make_request(1, prompt=4, max_tokens=4), make_request(2, prompt=8, max_tokens=2))
    bench.step()
    assert bench.running_ids() == [1]
    bench.run()
    assert bench.scheduler.stats().num_preemptions == 0


def test_a_preempted_request_keeps_tokens_of_plans_in_flight() -> None:
    bench = Bench(num_blocks=4, block_size=2, plan_depth=2, max_rows=2)
    requests = [make_request(i, prompt=2, max_tokens=6) for i in (1, 2)]
    bench.add(*requests)
    bench.run()
    assert bench.scheduler.stats().num_preemptions > 0
    assert [bench.tokens[i] for i in (1, 2)] == [oracle(request, 64) for request in requests]


def test_a_cancelled_request_says_nothing_more_and_holds_nothing() -> None:
    bench = Bench(plan_depth=2)
    bench.add(make_request(1, max_tokens=20), make_request(2, max_tokens=3))
    bench.plan()
    bench.plan()
    bench.scheduler.cancel(RequestId(1))
    bench.scheduler.cancel(RequestId(1))
    assert bench.scheduler.stats().num_blocks_held == 4, "plans in flight name its blocks"
    bench.run()
    assert bench.tokens[1] == [] and list(bench.ends) == [2]
    assert bench.scheduler.stats().num_blocks_held == 0


def test_the_row_of_an_ended_request_is_freed_once_its_last_result_came() -> None:
    bench = Bench(plan_depth=2, max_rows=1)
    tokens = oracle(make_request(1, max_tokens=10), 64)
    bench.add(make_request(1, max_tokens=10, stop_token_ids=frozenset([tokens[0]])), make_request(2, max_tokens=1))
    bench.plan()
    bench.plan()
    bench.return_result()
    assert 1 in bench.ends
    assert bench.plan() is None, "the wasted decode is in flight, the only row still named"
    bench.return_result()
    plan = bench.plan()
    assert plan is not None and plan.freed_rows == [0] and plan.new_rows[0].row == 0


def test_freed_rows_alone_make_no_plan() -> None:
    bench = Bench()
    bench.add(make_request(1, max_tokens=1))
    bench.step()
    assert bench.plan() is None
    assert bench.scheduler.stats().num_blocks_held == 0
    bench.add(make_request(2, max_tokens=1))
    plan = bench.plan()
    assert plan is not None and plan.freed_rows == [0]


def test_a_deadline_ends_requests_waiting_and_running() -> None:
    bench = Bench(max_rows=1)
    bench.add(make_request(1, max_tokens=20, deadline_s=5.0), make_request(2, deadline_s=4.0), make_request(3))
    bench.step()
    bench.keep(bench.scheduler.expire(3.9))
    assert not bench.ends
    bench.keep(bench.scheduler.expire(5.0))
    assert {i: end.finish_reason for i, end in bench.ends.items()} == {
        1: FinishReason.DEADLINE,
        2: FinishReason.DEADLINE,
    }
    bench.run()
    assert len(bench.tokens[3]) == 4


def test_a_request_past_its_deadline_is_never_scheduled() -> None:
    bench = Bench()
    bench.add(make_request(1, deadline_s=1.0))
    assert bench.plan(now_s=1.0) is None
    assert [output.finish_reason for output in bench.scheduler.expire(1.0)] == [FinishReason.DEADLINE]


def test_a_cancel_after_the_deadline_leaves_nothing_to_say() -> None:
    bench = Bench()
    bench.add(make_request(1, deadline_s=1.0))
    assert bench.plan(now_s=1.0) is None
    bench.scheduler.cancel(RequestId(1))
    assert list(bench.scheduler.expire(1.0)) == []


def test_a_paused_row_is_not_scheduled_until_it_is_read_again() -> None:
    bench = Bench()
    request = make_request(1, max_tokens=6)
    bench.add(request, make_request(2, max_tokens=6))
    bench.step()
    bench.scheduler.pause(RequestId(1))
    plan = bench.step()
    assert plan is not None and plan.decode_rows == [1]
    bench.scheduler.resume(RequestId(1))
    bench.run()
    assert bench.tokens[1] == oracle(request, 64)


def test_a_paused_request_that_waits_is_not_admitted() -> None:
    bench = Bench()
    bench.add(make_request(1), make_request(2))
    bench.scheduler.pause(RequestId(1))
    bench.step()
    assert bench.running_ids() == [2]
    assert bench.scheduler.stats().num_paused == 1
    bench.scheduler.resume(RequestId(1))
    bench.run()
    assert len(bench.tokens[1]) == 4


def test_paused_requests_are_preempted_for_those_short_of_blocks_or_rows() -> None:
    bench = Bench(num_blocks=8, max_rows=1)
    request = make_request(1, prompt=20, max_tokens=6)
    bench.add(request)
    bench.step()
    bench.scheduler.pause(RequestId(1))
    bench.add(make_request(2, prompt=20, max_tokens=2))
    bench.step()
    assert bench.running_ids() == [2]
    bench.scheduler.resume(RequestId(1))
    bench.run()
    assert bench.tokens[1] == oracle(request, 64)


def test_moved_requests_go_on_elsewhere_with_the_same_tokens() -> None:
    first, second = Bench(plan_depth=2, max_rows=2), Bench()
    requests = [make_request(i, prompt=5, max_tokens=9) for i in (2, 1, 3)]
    first.add(*requests)
    for _ in range(3):
        first.step()
    moved = first.scheduler.take_requests()
    assert [request.request_id for request in moved] == [1, 2, 3]
    second.add(*moved)
    second.run()
    assert [second.tokens[r.request_id] for r in requests] == [oracle(request, 64) for request in requests]


def test_rows_whose_logits_are_not_finite_end_alone() -> None:
    bench = Bench()
    bench.add(make_request(1), make_request(2))
    plan = bench.plan()
    assert plan is not None
    result = bench.worker.execute(plan)
    outputs = list(bench.scheduler.apply(StepResult(1, [1], result.token_ids[1:], failed_rows=[0])))
    bench.sent.clear()
    bench.keep(outputs)
    assert bench.ends[1].finish_reason is FinishReason.NOT_FINITE
    bench.run()
    assert len(bench.tokens[2]) == 4


def test_nobody_starts_from_blocks_of_a_request_whose_logits_were_not_finite() -> None:
    bench = Bench(max_step_tokens=4)
    bench.add(make_request(1, [3] * 9))
    bench.step()
    bench.step()
    plan = bench.plan()
    assert plan is not None
    bench.worker.execute(plan)
    bench.sent.clear()
    bench.keep(bench.scheduler.apply(StepResult(3, [], [], failed_rows=[0])))
    bench.add(make_request(2, [3] * 9))
    plan = bench.plan()
    assert plan is not None and plan.new_rows[0].num_computed_tokens == 0


@pytest.mark.parametrize(
    "result",
    [
        StepResult(2, [0], [5]),
        StepResult(1, [1], [5]),
        StepResult(1, [], []),
        StepResult(1, [0], [5, 6]),
        StepResult(1, [0], [5], failed_rows=[3]),
        StepResult(1, [0], [5], waiting_rows=frozenset({3})),
        StepResult(1, [0], [5], waiting_rows=frozenset({0})),
    ],
)
def test_a_result_that_is_not_that_of_the_oldest_plan_is_refused(result: StepResult) -> None:
    bench = Bench()
    with pytest.raises(ResultMismatch, match="no step is in flight"):
        bench.scheduler.apply(result)
    bench.add(make_request(1))
    bench.plan()
    with pytest.raises(ResultMismatch):
        bench.scheduler.apply(result)
    bench.return_result()


def test_first_scheduling_and_counts_are_returned() -> None:
    bench = Bench()
    bench.add(make_request(1, prompt=5, max_tokens=1))
    bench.plan(now_s=7.5)
    stats = bench.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_held, stats.num_plans_in_flight) == (1, 0, 2, 1)
    outputs = bench.return_result()
    assert outputs[0].first_scheduled_s == 7.5
    assert bench.scheduler.stats().num_tokens_sampled == 1


def test_order_is_by_arrival_even_for_requests_that_came_from_elsewhere() -> None:
    bench = Bench(max_rows=1)
    bench.add(make_request(5, max_tokens=1), make_request(2, max_tokens=1), make_request(9, max_tokens=1))
    bench.run()
    assert list(bench.ends) == [2, 5, 9]
