"""How far plans run ahead of results, and where they may not."""

from __future__ import annotations

from typing import Any

import pytest

from contract.plan_stream.plan_bounds import MAX_PLAN_STEPS
from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.types import BeamSearch, FinishReason, Request
from tests.control_plane.scheduler.factories import Bench, make_request
from tests.fakes.model_worker import oracle

LONG = 30  # tokens: no request of a test ends before it is over


def decoding(*requests: Request, **limits: int) -> Bench:
    """A bench on which the results of the requests' prefills came."""
    all_limits: dict[str, Any] = {"plan_depth": 2, "num_blocks": 64, **limits}
    bench = Bench(**all_limits)
    bench.add(*requests)
    bench.step()
    return bench


def tokens_of(request: Request) -> list[int]:
    return oracle(request, max_model_len=64)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_depth_k_keeps_k_plans_in_flight_and_each_result_brings_the_next(depth: int) -> None:
    request = make_request(1, max_tokens=LONG)
    bench = Bench(plan_depth=depth)
    bench.add(request)
    for step_id in range(1, depth + 1):
        plan = bench.plan()
        assert plan is not None and plan.step_id == step_id
    assert bench.plan() is None
    while not bench.ends:
        oldest = bench.sent[0].step_id
        bench.return_result()
        plan = bench.plan()
        assert plan is None or plan.step_id == oldest + depth
    assert bench.tokens[1] == tokens_of(request)
    assert len(bench.plans) == LONG  # an end by length is known ahead: nothing is computed beyond it


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_stop_token_wastes_at_most_depth_minus_one_rows(depth: int) -> None:
    expected = tokens_of(make_request(1, max_tokens=LONG))
    stop = next(token for idx, token in enumerate(expected) if idx > 5 and token not in expected[:idx])
    request = make_request(1, max_tokens=LONG, stop_token_ids=frozenset([stop]))
    bench = Bench(plan_depth=depth)
    bench.add(request)
    while not bench.ends or bench.sent:
        while bench.plan() is not None:
            pass
        bench.return_result()
    num_tokens = expected.index(stop) + 1
    assert bench.tokens[1] == expected[:num_tokens] and bench.ends[1].finish_reason is FinishReason.STOP_TOKEN
    assert len(bench.plans) - num_tokens == depth - 1
    assert bench.scheduler.stats().num_blocks_held == 0


def test_a_plan_stands_for_several_steps_while_nothing_is_to_be_decided() -> None:
    requests = [make_request(i, max_tokens=LONG) for i in (1, 2, 3)]
    bench = decoding(*requests, plan_depth=1)
    plan = bench.plan(max_steps=4)
    assert plan is not None and (plan.step_id, plan.num_steps) == (2, 4)
    assert [step.step_id for step in bench.sent] == [2, 3, 4, 5]
    while bench.sent:
        outputs = bench.return_result()
        assert [len(output.token_ids) for output in outputs] == [1, 1, 1]  # each step has its own result
    while len(bench.ends) != 3:
        bench.plan(max_steps=4)
        bench.return_result()
    assert [bench.tokens[i] for i in (1, 2, 3)] == [tokens_of(request) for request in requests]


def test_the_room_ahead_is_counted_in_steps() -> None:
    bench = decoding(make_request(1, max_tokens=LONG))
    made = [bench.plan(max_steps=3) for _ in range(3)]
    assert [plan and plan.num_steps for plan in made] == [3, 3, None]
    assert bench.scheduler.stats().num_plans_in_flight == 2
    for _ in range(2):
        bench.return_result()
        assert bench.plan(max_steps=3) is None  # 5 and 4 steps are in flight, one plan's worth is 3
    bench.return_result()
    assert bench.plan(max_steps=3) is not None
    assert bench.plan(max_steps=1) is None  # the round trip became short: first what was sent


def test_plans_of_one_step_take_the_room_where_steps_cannot_be_repeated() -> None:
    bench = Bench(plan_depth=2, max_step_tokens=8)
    bench.add(make_request(1, max_tokens=LONG), make_request(2, prompt=40, max_tokens=2))
    made = [bench.plan(max_steps=3) for _ in range(5)]  # the second one's prefill goes on for several steps
    assert [plan and plan.num_steps for plan in made] == [1, 1, 1, 1, None]


def test_no_row_reaches_its_length_before_the_last_step() -> None:
    bench = decoding(make_request(1, max_tokens=LONG), make_request(2, max_tokens=3), plan_depth=1)
    plan = bench.plan(max_steps=4)
    assert plan is not None and plan.num_steps == 2  # the first token came with the prefill
    bench.return_result()
    bench.return_result()
    assert 2 in bench.ends and 1 not in bench.ends


def test_a_request_that_could_be_admitted_is_not_kept_waiting() -> None:
    bench = Bench(plan_depth=1, max_step_tokens=4)
    bench.add(make_request(1, prompt=3, max_tokens=LONG), make_request(2, prompt=3, max_tokens=LONG))
    bench.step()  # all of the first, a part of the second
    plan = bench.plan(max_steps=4)
    assert plan is not None and plan.num_steps == 1 and plan.prefills


def test_plans_stand_for_one_step_while_a_request_waits_that_others_pass() -> None:
    """What it needs may come free in any of them."""
    bench = Bench(SchedulerSettings(max_blocked_steps=1), plan_depth=1, num_blocks=20, max_rows=4)
    bench.add(make_request(1, max_tokens=LONG), make_request(2, max_tokens=1, num_samples=4))
    while not bench.probe.set_aside_ids():
        bench.step()
    plan = bench.plan(max_steps=4)
    assert plan is not None and plan.num_steps == 1


def test_who_waits_for_a_row_sees_it_the_step_after_it_is_free() -> None:
    bench = decoding(make_request(1, max_tokens=4), make_request(2, max_tokens=LONG), max_rows=2)
    bench.add(make_request(3, max_tokens=LONG))
    assert [plan and plan.num_steps for plan in (bench.plan(max_steps=4), bench.plan(max_steps=4))] == [3, 1]
    while 1 not in bench.ends:
        bench.return_result()
    plan = bench.plan(max_steps=4)
    assert plan is not None and [new.request_id for new in plan.new_rows] == [3]


def test_blocks_that_cannot_be_had_without_preemption_shorten_the_plan() -> None:
    # 2 blocks of 4 tokens each: the first token is sampled with 4 planned, so 4 more steps fit into the tables.
    bench = decoding(make_request(1, max_tokens=9), make_request(2, max_tokens=9), num_blocks=4, plan_depth=1)
    plan = bench.plan(max_steps=3)
    assert plan is not None and plan.num_steps == 3 and len(plan.appended_blocks) == 2
    while bench.sent:
        bench.return_result()
    plan = bench.plan(max_steps=4)
    assert plan is not None and plan.num_steps == 1 and bench.scheduler.stats().num_preemptions == 0
    bench.return_result()
    bench.run()
    assert [len(bench.tokens[i]) for i in (1, 2)] == [9, 9]


def test_a_paused_request_in_its_prefill_keeps_plans_at_one_step() -> None:
    bench = Bench(plan_depth=1, max_step_tokens=8, num_blocks=64)
    bench.add(make_request(1, max_tokens=LONG), make_request(2, prompt=40, max_tokens=2))
    bench.step()
    bench.scheduler.pause(make_request(2).request_id)
    plan = bench.plan(max_steps=4)
    assert plan is not None and plan.num_steps == 1  # the worker repeats no step while a prefill is unfinished


def test_a_host_fed_row_is_planned_once_its_last_token_is_here() -> None:
    search = make_request(1, max_tokens=LONG, beam=BeamSearch(1))
    bench = Bench(plan_depth=2, max_model_len=200, num_blocks=40)
    bench.add(search, make_request(2, max_tokens=LONG))
    first, second = bench.plan(max_steps=4), bench.plan()
    assert first is not None and [row for row, _ in first.prefills] == [0, 1]
    assert second is not None and second.decode_rows == [1]
    bench.return_result()
    plan = bench.plan()
    assert plan is not None and plan.decode_rows == [0, 1]
    assert all(plan.num_steps == 1 for plan in bench.plans)


def test_a_request_that_is_cancelled_within_a_repeated_plan_gives_its_blocks_back_after_it() -> None:
    bench = decoding(make_request(1, max_tokens=LONG), make_request(2, max_tokens=LONG), plan_depth=1)
    bench.plan(max_steps=MAX_PLAN_STEPS)
    bench.return_result()
    bench.scheduler.cancel(make_request(2).request_id)
    held = bench.scheduler.stats().num_blocks_held
    for _ in range(MAX_PLAN_STEPS - 1):
        assert bench.scheduler.stats().num_blocks_held == held
        bench.return_result()
    assert bench.scheduler.stats().num_blocks_held == held // 2
    assert len(bench.tokens[1]) == 1 + MAX_PLAN_STEPS and len(bench.tokens[2]) == 2
