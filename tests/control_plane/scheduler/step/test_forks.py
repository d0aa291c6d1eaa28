"""Several completions of one prompt: the prompt is computed once, and its blocks are shared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from control_plane.scheduler.errors import RequestNeverFits, ResultMismatch
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.types import Completion, FinishReason, Request, RequestId, RequestOutput, Sampling
from tests.control_plane.scheduler.factories import Bench, make_adapter, make_request
from tests.control_plane.scheduler.ledger import Ledger


def make_samples(request_id: int, num_samples: int, prompt: list[int] | int = 6, **changes: Any) -> Request:
    """A request for several completions that differ."""
    changes.setdefault("sampling", Sampling(temperature=1.0, seed=request_id))
    return make_request(request_id, prompt, num_samples=num_samples, **changes)


class GroupBench(Bench):
    """A bench whose outputs are checked against what each completion is due."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.ledger = Ledger(self.limits.max_model_len)
        self.outputs: list[RequestOutput] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            account = self.ledger.open(request)
            for index, completion in enumerate(request.completions):
                account.got[index] = list(completion.token_ids)
                if completion.is_ended:
                    account.live.discard(index)
            account.got[0] += request.generated_token_ids
            self.scheduler.add(request)

    def keep(self, outputs: Iterable[RequestOutput]) -> None:
        self.outputs += outputs
        self.ledger.take(outputs)

    def run(self, max_steps: int = 500) -> None:
        """Until everything ended, to the last token, and nothing is held."""
        super().run(max_steps)
        assert not self.ledger.accounts, "a request ended short of its tokens"
        assert self.scheduler.stats().num_blocks_held == 0


def test_the_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    bench = GroupBench()
    bench.add(make_samples(1, 3, prompt=10, max_tokens=5))
    bench.step()
    bench.step()
    first, second = bench.plans
    assert (first.decode_rows, first.prefills) == ([], [(0, 10)])
    assert (second.decode_rows, second.prefills) == ([0], [(1, 1), (2, 1)])
    source = first.new_rows[0].block_ids
    assert [new.num_computed_tokens for new in second.new_rows] == [9, 9]
    for new in second.new_rows:
        assert new.block_ids[:2] == source[:2] and new.block_ids[2] != source[2]
    assert second.block_copies == [(source[2], new.block_ids[2]) for new in second.new_rows]
    assert len({new.sampling.seed for new in [*first.new_rows, *second.new_rows]}) == 3
    bench.run()


def test_nothing_is_copied_where_the_last_token_begins_a_block() -> None:
    bench = GroupBench()
    bench.add(make_samples(1, 2, prompt=9))
    bench.run()
    assert not any(plan.block_copies for plan in bench.plans)


@pytest.mark.parametrize("max_step_tokens", [1, 2, 5])
@pytest.mark.parametrize("plan_depth", [1, 3])
def test_forks_wait_for_budget_and_for_nothing_else(max_step_tokens: int, plan_depth: int) -> None:
    bench = GroupBench(max_step_tokens=max_step_tokens, plan_depth=plan_depth, num_blocks=9)
    bench.add(make_samples(1, 4, prompt=6, max_tokens=4))
    bench.run()


@pytest.mark.parametrize("plan_depth", [1, 2])
def test_the_others_fork_although_the_first_completion_ended_with_its_first_token(plan_depth: int) -> None:
    bench = GroupBench(plan_depth=plan_depth)
    bench.add(make_samples(1, 3, prompt=6, max_tokens=1), make_samples(2, 2, prompt=8, max_tokens=1))
    bench.run()


def test_a_group_waits_until_rows_and_blocks_for_all_its_completions_are_free() -> None:
    bench = GroupBench(max_rows=4)
    bench.add(make_request(1, max_tokens=6), make_samples(2, 4, max_tokens=2), make_request(3, max_tokens=2))
    bench.step()
    assert bench.running_ids() == [1]
    bench.run()


def test_a_group_that_could_never_run_is_refused_with_the_numbers() -> None:
    bench = Bench(num_blocks=8)
    with pytest.raises(RequestNeverFits, match="5 sequences at once, the worker has 4 rows"):
        bench.add(make_samples(1, 5, max_tokens=1))
    with pytest.raises(RequestNeverFits) as refused:  # 2 blocks of prompt, then 3 for each of three completions
        bench.add(make_samples(2, 3, prompt=9, max_tokens=12))
    assert (refused.value.num_blocks_needed, refused.value.num_blocks) == (11, 8)
    bench.add(make_samples(3, 2, prompt=9, max_tokens=12))


def test_a_preempted_group_comes_back_with_every_completion_and_shares_its_prompt_again() -> None:
    bench = GroupBench(num_blocks=14, max_rows=5)
    bench.add(make_request(1, prompt=4, max_tokens=30), make_samples(2, 3, prompt=9, max_tokens=16))
    bench.run()
    assert bench.scheduler.stats().num_preemptions > 0
    again = [new for plan in bench.plans for new in plan.new_rows if new.request_id == 2 and len(new.token_ids) > 9]
    assert len(again) >= 3 and again[0].block_ids[:2] == again[1].block_ids[:2] == again[2].block_ids[:2]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_one_completion_is_cancelled_and_the_others_go_on(num_steps: int) -> None:
    bench = GroupBench(max_step_tokens=4, plan_depth=2)
    bench.add(make_samples(1, 3, prompt=7, max_tokens=5))
    for _ in range(num_steps):
        bench.step()
    bench.scheduler.cancel(RequestId(1), 0)
    bench.ledger.accounts[RequestId(1)].live.discard(0)
    bench.run()


def test_a_request_is_over_when_its_last_completion_is_cancelled() -> None:
    bench = GroupBench()
    bench.add(make_samples(1, 2))
    bench.step()
    for index in (0, 1):
        bench.scheduler.cancel(RequestId(1), index)
    assert not bench.scheduler.request_ids and bench.scheduler.stats().num_blocks_held == 0
    assert bench.plan() is None


def test_moved_completions_go_on_elsewhere_and_ended_ones_are_not_run_again() -> None:
    first, second = GroupBench(plan_depth=2), GroupBench()
    request = make_samples(1, 3, prompt=5, max_tokens=6, adapter=make_adapter("one"))
    due = Ledger(64).open(request).due
    first.add(replace(request, stop_token_ids=frozenset([due[1][1]]) - {*due[0][:3], *due[2][:3]}))
    for _ in range(5):
        first.step()
    (moved,) = first.scheduler.take_requests()
    assert moved.completions[1] == Completion(tuple(due[1][:2]), True)
    assert 0 < len(moved.completions[0].token_ids) < 6
    second.add(moved)
    second.run()
    assert [new.num_computed_tokens for plan in second.plans for new in plan.new_rows] == [0, 5]


def test_an_end_from_outside_is_returned_once_with_an_completion_that_has_not_ended() -> None:
    bench = GroupBench()
    bench.add(make_samples(1, 2, max_tokens=9, deadline_s=5.0))
    bench.step()
    bench.scheduler.cancel(RequestId(1), 0)
    bench.ledger.accounts[RequestId(1)].live.discard(0)
    ended = list(bench.scheduler.expire(5.0))
    assert [(output.index, output.finish_reason) for output in ended] == [(1, FinishReason.DEADLINE)]


def test_an_completion_whose_logits_are_not_finite_ends_its_request_and_nobody_starts_from_its_blocks() -> None:
    bench = GroupBench()
    bench.add(make_samples(1, 2, prompt=9))
    bench.step()
    plan = bench.plan()
    assert plan is not None
    bench.sent.clear()
    result = bench.worker.execute(plan)
    result = replace(result, rows=result.rows[:1], token_ids=result.token_ids[:1], failed_rows=[1])
    bench.keep(bench.scheduler.apply(result))
    assert bench.outputs[-1].finish_reason is FinishReason.NOT_FINITE
    assert bench.scheduler.stats().num_blocks_held == 0 and bench.probe.num_cache_blocks() == 0


@pytest.mark.parametrize("max_step_tokens", [3, 32])
def test_logprobs_are_returned_with_their_tokens_and_those_of_the_prompt_once(max_step_tokens: int) -> None:
    bench = GroupBench(max_step_tokens=max_step_tokens)
    sampling = Sampling(temperature=1.0, num_logprobs=3, num_prompt_logprobs=2)
    bench.add(make_request(1, [3] * 9, max_tokens=2))
    bench.run()
    bench.add(make_samples(2, 2, [3] * 9, sampling=sampling))
    bench.run()
    returned = [output for output in bench.outputs if output.prompt_logprobs is not None]
    assert [(output.request_id, output.index, len(output.prompt_logprobs or ())) for output in returned] == [(2, 0, 8)]
    assert returned[0].num_cached_tokens == 0, "all of the prompt is computed"


def test_a_resumed_request_does_not_return_its_prompt_again() -> None:
    bench = GroupBench()
    request = make_request(1, 9, sampling=Sampling(num_prompt_logprobs=1))
    due = Ledger(64).open(request).due[0]
    bench.add(replace(request, generated_token_ids=tuple(due[:2])))
    bench.run()
    assert bench.plans[0].new_rows[0].sampling.num_prompt_logprobs is None


def test_a_result_without_the_logprobs_that_were_requested_is_refused() -> None:
    bench = GroupBench()
    bench.add(make_request(1, sampling=Sampling(num_logprobs=0)))
    plan = bench.plan()
    assert plan is not None
    result = bench.worker.execute(plan)
    with pytest.raises(ResultMismatch, match="step 1"):
        bench.scheduler.apply(replace(result, logprobs={}))


def test_a_result_with_more_of_the_prompt_than_is_due_is_refused() -> None:
    bench = GroupBench()
    bench.add(make_request(1, sampling=Sampling(num_prompt_logprobs=0)))
    plan = bench.plan()
    assert plan is not None
    result = bench.worker.execute(plan)
    returned = result.prompt_logprobs[0]
    with pytest.raises(ResultMismatch, match="log-probabilities of 6 prompt tokens; 3 are due"):
        bench.scheduler.apply(replace(result, prompt_logprobs={0: [*returned, *returned]}))


@pytest.mark.parametrize("num_returned", [0, 1])
@pytest.mark.parametrize("max_step_tokens", [5, 32], ids=["in a chunk", "in a prefill that samples"])
def test_a_prompt_that_is_returned_in_part_ends_its_request_alone(max_step_tokens: int, num_returned: int) -> None:
    """A worker leaves out what is not finite; a chunk samples nothing, so no failed row says so."""
    bench = GroupBench(max_step_tokens=max_step_tokens, max_rows=2)
    bench.add(make_request(1, 1, max_tokens=9))
    bench.step()
    bench.add(make_request(2, 9, sampling=Sampling(num_prompt_logprobs=0)))
    plan = bench.plan()
    assert plan is not None and plan.prefills[0][1] == min(9, max_step_tokens - 1)
    bench.sent.clear()
    result = bench.worker.execute(plan)
    result.prompt_logprobs[1] = result.prompt_logprobs[1][:num_returned]
    bench.keep(bench.scheduler.apply(result))
    ends = [(output.request_id, output.finish_reason) for output in bench.outputs if output.finish_reason]
    assert ends == [(2, FinishReason.NOT_FINITE)]
    check_scheduler(bench.scheduler)
    assert bench.probe.num_cache_blocks() == 0, "nobody may start from its blocks"
    bench.run()
    assert bench.outputs[-1].request_id == 1 and bench.outputs[-1].finish_reason is FinishReason.LENGTH


def test_no_completion_ends_with_a_stop_token_before_its_least_length() -> None:
    bench = GroupBench()
    stop_token_ids = frozenset(range(0, 50, 2))
    sampling = Sampling(temperature=1.0, seed=4, min_tokens=3)
    bench.add(make_samples(1, 3, max_tokens=8, stop_token_ids=stop_token_ids, sampling=sampling))
    bench.run()
    assert bench.plans[0].new_rows[0].banned_token_ids == tuple(sorted(stop_token_ids))
    ends = [output.finish_reason for output in bench.outputs if output.finish_reason is not None]
    assert FinishReason.STOP_TOKEN in ends
