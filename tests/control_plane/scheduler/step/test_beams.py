"""Beam searches on rows of the worker: the right hypotheses, one row for each beam, and nothing planned too early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from control_plane.scheduler.types import BeamSearch, FinishReason, Request, RequestId, StepPlan
from tests.control_plane.scheduler.factories import make_adapter, make_request
from tests.control_plane.scheduler.step.test_forks import GroupBench


def make_search(request_id: int, width: int, prompt: list[int] | int = 6, **changes: Any) -> Request:
    """A beam search."""
    return make_request(request_id, prompt, beam=BeamSearch(width), **changes)


def rows_of(plan: StepPlan) -> list[int]:
    return [*plan.decode_rows, *(row for row, _ in plan.prefills)]


@pytest.mark.parametrize("beam", [BeamSearch(2), BeamSearch(4, -1.0), BeamSearch(3, 0.0, True), BeamSearch(3, 0.5)])
@pytest.mark.parametrize("max_step_tokens", [1, 4, 32])
def test_all_hypotheses_are_returned_at_the_end_and_the_best_first(beam: BeamSearch, max_step_tokens: int) -> None:
    bench = GroupBench(max_step_tokens=max_step_tokens, plan_depth=3)
    request = make_request(1, 7, 9, beam=beam, stop_token_ids=frozenset(range(0, 50, 3)))
    bench.add(request)
    bench.run()
    assert [output.index for output in bench.outputs] == list(range(beam.width))
    scores = [output.score for output in bench.outputs if output.score is not None]
    assert scores == sorted(scores, reverse=True) and len(scores) == beam.width
    assert FinishReason.STOP_TOKEN in [output.finish_reason for output in bench.outputs]


def test_nothing_of_a_search_is_planned_until_the_results_of_all_beams_came_and_others_run_meanwhile() -> None:
    bench = GroupBench(plan_depth=3)
    bench.add(make_search(1, 3, max_tokens=4), make_request(2, max_tokens=12))
    while len(bench.scheduler.request_ids) == 2:
        while bench.plan() is not None:
            pass
        named = [row for plan in bench.sent for row in rows_of(plan) if row != 3]
        assert len(named) == len(set(named)) <= 3
        bench.return_result()
    assert len([plan for plan in bench.plans if rows_of(plan) == [3]]) >= 4
    bench.run()


def test_the_row_of_a_beam_that_came_to_nothing_begins_again_in_the_same_plan() -> None:
    bench = GroupBench()
    bench.add(make_search(1, 4, max_tokens=8))
    bench.run()
    again = [plan for plan in bench.plans[2:] if plan.new_rows]
    assert again, "no beam was dropped: the case did not occur"
    for plan in again:
        assert sorted(new.row for new in plan.new_rows) == sorted(plan.freed_rows)
        assert all(new.is_host_fed and len(new.token_ids) == new.num_computed_tokens + 1 for new in plan.new_rows)
    assert max(row for plan in bench.plans for row in rows_of(plan)) == 3


def test_beams_share_the_prompt_and_their_own_blocks_are_not_cached() -> None:
    bench = GroupBench(num_blocks=18)
    bench.add(make_search(1, 3, prompt=9, max_tokens=9))
    bench.step()
    bench.step()
    assert bench.scheduler.stats().num_blocks_held == 2 + 3
    bench.run()
    assert bench.probe.num_cache_blocks() == 2
    bench.add(make_search(2, 3, prompt=[1] * 9, max_tokens=2))
    bench.run()
    assert bench.plans[-2].new_rows[0].num_computed_tokens == 8, "the prompt of the first is found"


def test_a_search_that_was_preempted_goes_on_with_its_beams() -> None:
    bench = GroupBench(num_blocks=17, max_rows=6, plan_depth=2)
    others = [make_request(request_id, prompt=4, max_tokens=30) for request_id in (1, 2)]
    bench.add(*others, make_search(3, 3, prompt=9, max_tokens=18))
    bench.run()
    assert bench.scheduler.stats().num_preemptions > 0
    known = [len(new.token_ids) for plan in bench.plans for new in plan.new_rows if new.num_computed_tokens == 0]
    assert max(known) > 9, "it began again from its prompt"


def test_a_search_that_was_swapped_out_comes_back_with_all_its_beams() -> None:
    bench = GroupBench(num_blocks=17, max_rows=6, plan_depth=2, num_host_blocks=17)
    others = [make_request(request_id, prompt=4, max_tokens=30) for request_id in (1, 2)]
    bench.add(*others, make_search(3, 3, prompt=9, max_tokens=18))
    bench.run()
    assert bench.scheduler.stats().num_swapped_out > 0
    back = [plan for plan in bench.plans if len([new for new in plan.new_rows if new.request_id == 3]) == 3]
    assert back, "the beams return together"
    for plan in back:
        assert all(new.num_computed_tokens == len(new.token_ids) - 1 for new in plan.new_rows if new.request_id == 3)
        assert len({host for host, _ in plan.swap_ins}) == len(plan.swap_ins), "a block travels once"


def test_a_moved_search_begins_again_elsewhere() -> None:
    first, second = GroupBench(), GroupBench()
    request = make_search(1, 3, max_tokens=6, adapter=make_adapter("one"))
    first.add(request)
    for _ in range(4):
        first.step()
    assert first.scheduler.take_requests() == [request]
    second.add(request)
    second.run()


def test_a_search_is_cancelled_as_a_whole_and_one_completion_of_it_cannot_be() -> None:
    bench = GroupBench(plan_depth=2)
    bench.add(make_search(1, 3, max_tokens=6), make_request(2, max_tokens=9))
    bench.step()
    bench.step()
    bench.scheduler.cancel(RequestId(1), 1)
    bench.step()
    assert len(bench.scheduler.request_ids) == 2
    bench.scheduler.cancel(RequestId(1))
    bench.ledger.close(RequestId(1))
    bench.run()


def test_a_beam_whose_logits_are_not_finite_ends_its_search() -> None:
    bench = GroupBench()
    bench.add(make_search(1, 2))
    bench.step()
    plan = bench.plan()
    assert plan is not None and rows_of(plan) == [0, 1]
    bench.sent.clear()
    result = bench.worker.execute(plan)
    result = replace(result, rows=result.rows[:1], token_ids=result.token_ids[:1], failed_rows=[1])
    bench.keep(bench.scheduler.apply(result))
    assert [output.finish_reason for output in bench.outputs] == [FinishReason.NOT_FINITE]
    assert bench.scheduler.stats().num_blocks_held == 0


def test_a_paused_search_stays_where_it_is() -> None:
    bench = GroupBench()
    bench.add(make_search(1, 3))
    bench.step()
    bench.scheduler.pause(RequestId(1))
    assert bench.plan() is None
    bench.scheduler.resume(RequestId(1))
    bench.run()


def test_fewer_tokens_than_beams_leave_the_last_indices_empty() -> None:
    bench = GroupBench()
    bench.add(make_search(1, 4, max_tokens=1, stop_token_ids=frozenset(range(48)), sampling=_at_least(1)))
    bench.run()
    assert [len(output.token_ids) for output in bench.outputs] == [1, 1, 0, 0]


def _at_least(min_tokens: int) -> Any:
    return replace(make_request(1).sampling, min_tokens=min_tokens)
