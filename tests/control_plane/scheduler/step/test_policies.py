"""The order in which each policy fills a step, and the limits that hold while it does."""

from __future__ import annotations

import pytest

from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.types import RequestId, SlotReady, StepPlan
from tests.control_plane.scheduler.factories import Bench, make_adapter, make_request
from tests.fakes.model_worker import oracle

PREFILL_FIRST = SchedulerSettings(policy=Policy.PREFILL_FIRST)
FCFS = SchedulerSettings(policy=Policy.FCFS)


def shape(plan: StepPlan | None) -> list[tuple[int, int, bool]]:
    """(row, tokens, whether it decodes) of each row of a step."""
    assert plan is not None
    return [*((row, 1, True) for row in plan.decode_rows), *((row, count, False) for row, count in plan.prefills)]


def new_ids(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [new.request_id for new in plan.new_rows]


@pytest.mark.parametrize("policy", Policy)
def test_every_policy_gives_the_tokens_of_the_oracle(policy: Policy) -> None:
    bench = Bench(SchedulerSettings(policy=policy), num_blocks=8, plan_depth=2, max_step_tokens=7)
    requests = [make_request(i, prompt=3 * i, max_tokens=9) for i in range(1, 7)]
    bench.add(*requests)
    bench.run()
    assert [bench.tokens[r.request_id] for r in requests] == [oracle(request, 64) for request in requests]
    assert bench.scheduler.stats().num_preemptions > 0


# ---- prefill first ----


def test_prefill_first_keeps_decodes_waiting_while_whole_prompts_can_start() -> None:
    bench = Bench(PREFILL_FIRST)
    bench.add(make_request(1, prompt=4, max_tokens=6))
    bench.step()
    bench.add(make_request(2, prompt=5), make_request(3, prompt=6))
    assert shape(bench.step()) == [(1, 5, False), (2, 6, False)]
    assert shape(bench.step()) == [(0, 1, True), (1, 1, True), (2, 1, True)]


def test_prefill_first_never_cuts_a_prompt_that_fits_the_budget() -> None:
    bench = Bench(PREFILL_FIRST, max_step_tokens=8)
    bench.add(make_request(1, prompt=5), make_request(2, prompt=5))
    assert shape(bench.step()) == [(0, 5, False)]
    assert shape(bench.step()) == [(1, 5, False)]


def test_prefill_first_computes_a_prompt_above_the_budget_alone_and_at_once() -> None:
    bench = Bench(PREFILL_FIRST, max_step_tokens=4)
    bench.add(make_request(1, prompt=2, max_tokens=6))
    bench.step()
    bench.add(make_request(2, prompt=9))
    assert [shape(bench.step()) for _ in range(3)] == [[(1, 4, False)], [(1, 4, False)], [(1, 1, False)]]


# ---- first come, first served ----


def test_fcfs_lets_the_first_in_line_hold_up_all_others() -> None:
    bench = Bench(FCFS)
    cold = make_adapter("cold")
    bench.add(make_request(1, adapter=cold), make_request(2, tenant="other", priority=9))
    bench.scheduler.slot_commands()
    assert bench.plan() is None
    bench.scheduler.apply_slot_report(SlotReady(0, 1), 0.0)
    bench.worker.slots[0] = (1, cold.digest)
    assert new_ids(bench.plan()) == [1, 2]


def test_fcfs_makes_room_for_the_adapter_of_the_first_in_line_at_once() -> None:
    """One slot, held by an adapter that later requests want: order of arrival goes over it."""
    bench = Bench(FCFS, num_slots=1, max_rows=1)
    one, two = make_adapter("one"), make_adapter("two")
    bench.add(make_request(1, adapter=one), make_request(2, adapter=two))
    bench.add(*[make_request(i, adapter=one) for i in range(3, 8)])
    bench.run()
    assert list(bench.ends) == list(range(1, 8))


def test_fcfs_preempts_the_latest_whatever_its_tenant_had() -> None:
    bench = Bench(FCFS, num_blocks=6)
    bench.counters.charge_prefill("greedy", 10_000)
    bench.add(
        make_request(1, max_tokens=12), make_request(2, max_tokens=12, tenant="greedy"), make_request(3, max_tokens=12)
    )
    for _ in range(7):
        bench.step()
    assert bench.running_ids() == [1, 2]


# ---- chunked prefill ----


def test_an_unfinished_prefill_that_is_about_to_finish_goes_first() -> None:
    bench = Bench(SchedulerSettings(long_prefill_tokens=100), max_step_tokens=10, num_blocks=32)
    bench.add(make_request(1, prompt=30))
    bench.step()
    bench.scheduler.pause(RequestId(1))
    bench.add(make_request(2, prompt=14))
    bench.step()
    bench.scheduler.resume(RequestId(1))
    assert shape(bench.step()) == [(1, 4, False), (0, 6, False)]


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    """A prompt of 40 steps is under way; short ones that arrive get their first token one step later."""
    bench = Bench(max_step_tokens=8, num_blocks=200, max_model_len=400, max_rows=6)
    bench.add(make_request(1, prompt=320, max_tokens=1))
    bench.step()
    for request_id in range(2, 12):
        bench.add(make_request(request_id, prompt=4, max_tokens=1))
        plan = bench.step()
        assert shape(plan)[0][1] == 4 and list(bench.ends)[-1] == request_id
        assert shape(plan)[-1] == (0, 4, False), "what the short one leaves is the long one's"
    assert 1 not in bench.ends


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    """At least half of what decodes leave is a long prefill's: 4 tokens of 8 a step, whatever arrives."""
    bench = Bench(max_step_tokens=8, num_blocks=64, max_model_len=400, max_rows=20)
    bench.add(make_request(1, prompt=80, max_tokens=1))
    num_steps = 0
    while 1 not in bench.ends:
        bench.add(*[make_request(100 * num_steps + i, prompt=4, max_tokens=1) for i in (2, 3)])
        bench.step()
        num_steps += 1
        assert num_steps <= 80 // 4


def test_further_long_prompts_wait_and_short_ones_pass_them() -> None:
    bench = Bench(max_step_tokens=8, num_blocks=64)
    bench.add(make_request(1, prompt=40), make_request(2, prompt=40), make_request(3, prompt=3, max_tokens=1))
    bench.step()
    assert new_ids(bench.step()) == [3]
    bench.run()
    assert next(iter(bench.ends)) == 3


def test_several_long_prompts_are_computed_at_once_where_that_is_set() -> None:
    bench = Bench(SchedulerSettings(max_long_partial_prefills=2), max_step_tokens=8, num_blocks=64)
    bench.add(make_request(1, prompt=40), make_request(2, prompt=40))
    bench.step()
    assert new_ids(bench.step()) == [2]


@pytest.mark.parametrize(("max_partial_prefills", "admitted"), [(1, []), (2, [2])])
def test_no_more_prefills_are_unfinished_at_once_than_set(max_partial_prefills: int, admitted: list[int]) -> None:
    """Half of a step is kept for the long prefill: the second prompt would be cut, and the third does not pass it."""
    settings = SchedulerSettings(max_partial_prefills=max_partial_prefills, long_prefill_tokens=10)
    bench = Bench(settings, max_step_tokens=8, num_blocks=64)
    bench.add(make_request(1, prompt=40), make_request(2, prompt=6), make_request(3, prompt=2))
    bench.step()
    assert new_ids(bench.step()) == admitted
    bench.run()


def test_a_prefill_whose_reader_is_slow_keeps_nobody_from_beginning() -> None:
    bench = Bench(SchedulerSettings(max_partial_prefills=1, long_prefill_tokens=100), max_step_tokens=8, num_blocks=64)
    bench.add(make_request(1, prompt=20), make_request(2, prompt=20))
    bench.step()
    bench.scheduler.pause(RequestId(1))
    assert new_ids(bench.step()) == [2]


# ---- budgets of every policy ----


@pytest.mark.parametrize("policy", Policy)
def test_token_and_sequence_budgets_hold_below_the_workers_own(policy: Policy) -> None:
    bench = Bench(SchedulerSettings(policy=policy, max_step_tokens=6, max_sequences=2), max_rows=4)
    bench.add(*[make_request(i, prompt=5, max_tokens=3) for i in range(1, 6)])
    while bench.scheduler.request_ids:
        plan = bench.step()
        assert plan is None or sum(num_tokens for _, num_tokens, _ in shape(plan)) <= 6
        assert len(bench.probe.running_ids()) <= 2
    assert max(len(shape(plan)) for plan in bench.plans) == 2


@pytest.mark.parametrize("watermark", [0.25, 0.5])
def test_the_watermark_stays_free_while_others_run(watermark: float) -> None:
    bench = Bench(SchedulerSettings(watermark=watermark), num_blocks=16, max_rows=8)
    bench.add(*[make_request(i, prompt=8, max_tokens=1) for i in range(1, 9)])
    bench.plan()
    assert 16 - bench.scheduler.stats().num_blocks_held >= 16 * watermark
