"""Steps are submitted while earlier ones are under way: the results are those of one step after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from data_plane.engine.engine import TorchEngine
from data_plane.engine.rows import BoolArray
from data_plane.engine.sampling.results import ResultCopy
from data_plane.plan import Int32Array, RowSampling
from tests.data_plane.engine.planner import GREEDY, Job, array, make_plan
from tests.data_plane.engine.test_engine import PROMPT, complete, new_row, poisoned

__all__ = ["poisoned"]  # a fixture

DRAWN = RowSampling(temperature=0.9, top_k=50, top_p=0.95, seed=7, repetition_penalty=1.3)


class LateCopies:
    """Results that come when they are waited for, or when the test says so."""

    def __init__(self) -> None:
        self.started: list[LateCopy] = []

    def start(self, tokens: torch.Tensor, finite: torch.Tensor) -> ResultCopy:
        self.started.append(LateCopy(tokens.numpy().astype(np.int32), finite.numpy().copy()))
        return self.started[-1]


class LateCopy:
    def __init__(self, tokens: Int32Array, finite: BoolArray) -> None:
        self._results = tokens, finite
        self.has_come = False

    def is_done(self) -> bool:
        return self.has_come

    def read(self) -> tuple[Int32Array, BoolArray]:
        self.has_come = True
        return self._results


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Late:
    """An engine on the parts of another, whose results are late."""

    def __init__(self, engine: TorchEngine) -> None:
        self.copies, self.clock = LateCopies(), Clock()
        self.engine = TorchEngine(
            engine.model, engine.kv_cache, engine.arena, engine.capacities, copies=self.copies, clock=self.clock
        )


@pytest.fixture
def late(engine: TorchEngine) -> Late:
    return Late(engine)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_steps_ahead_of_their_results_have_the_tokens_of_steps_one_by_one(
    engine: TorchEngine, late: Late, sampling: RowSampling
) -> None:
    """Among them a prompt in two pieces, and a row that begins while others decode."""
    expected = complete(engine, [Job(PROMPT, 6, sampling=sampling), Job(PROMPT[2:], 4, sampling=sampling)])
    rows = [
        new_row(0, block_ids=array([0, 1]), sampling=sampling),
        new_row(1, block_ids=array([2, 3]), token_ids=array(PROMPT[2:]), num_prompt_tokens=5, sampling=sampling),
    ]
    plans = [
        make_plan(1, new=rows[:1], prefills=[(0, 7)]),
        make_plan(2, new=rows[1:], prefills=[(1, 3)]),
        make_plan(3, prefills=[(1, 2)]),
        *(make_plan(step) for step in (4, 5, 6)),
    ]
    pending = [late.engine.submit(plan) for plan in plans]
    assert not any(step.is_done() for step in pending), "a step waited for its results"
    outputs = [step.wait() for step in pending]
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for output in outputs:
        for row, token in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True):
            tokens[row].append(token)
    assert [tokens[0], tokens[1]] == expected


def test_a_row_that_ends_before_its_results_come_leaves_its_blocks_to_be_made_finite(late: Late, poisoned: int) -> None:
    expected = late.engine.execute(make_plan(1, new=[new_row(3)], prefills=[(3, 7)])).token_ids
    bad = new_row(0, token_ids=array([4, poisoned, 6]), num_prompt_tokens=3, block_ids=array([20]))
    first = late.engine.submit(make_plan(2, freed=[3], new=[bad], prefills=[(0, 3)]))
    heir = new_row(0, block_ids=array([20]))
    second = late.engine.submit(make_plan(3, freed=[0], new=[heir], prefills=[(0, 7)]))
    assert first.wait().failed_rows.tolist() == [0]
    output = second.wait()
    assert (output.rows.tolist(), output.token_ids.tolist()) == ([0], expected.tolist())
    assert torch.isfinite(late.engine.kv_cache.keys[1][20]).all()


def test_results_of_a_row_that_ended_are_not_those_of_the_row_with_its_number(late: Late, poisoned: int) -> None:
    """Slot reuse, one level up: the first row was finite, the second one is not known to be."""
    good = new_row(0, block_ids=array([20]))
    first = late.engine.submit(make_plan(1, new=[good], prefills=[(0, 7)]))
    bad = new_row(0, token_ids=array([4, poisoned, 6, 7]), num_prompt_tokens=4, block_ids=array([21]))
    late.engine.submit(make_plan(2, freed=[0], new=[bad], prefills=[(0, 3)])).wait()
    assert len(first.wait().failed_rows) == 0
    late.engine.submit(make_plan(3, freed=[0])).wait()
    late.engine.submit(make_plan(4, new=[new_row(1, block_ids=array([21]))], prefills=[(1, 7)])).wait()
    assert torch.isfinite(late.engine.kv_cache.keys[1][21]).all()


def test_a_row_that_is_known_to_be_finite_leaves_nothing_to_do(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[int] = []
    monkeypatch.setattr(late.engine.kv_cache, "mark_dirty", lambda blocks: marked.extend(blocks.tolist()))
    late.engine.submit(make_plan(1, new=[new_row(0), new_row(1)], prefills=[(0, 7), (1, 7)]))
    late.copies.started[-1].has_come = True
    late.engine.submit(make_plan(2, freed=[0]))
    assert marked == []
    late.engine.submit(make_plan(3, freed=[1]))
    assert marked == [1], "row 1 was in step 2, too, whose results have not come"


@pytest.mark.parametrize(
    "sampling", [replace(GREEDY, num_logprobs=2), replace(GREEDY, num_prompt_logprobs=0)], ids=["sampled", "prompt"]
)
def test_a_step_whose_tokens_the_host_needs_waits_for_its_own_results(late: Late, sampling: RowSampling) -> None:
    first = late.engine.submit(make_plan(1, new=[new_row(0)], prefills=[(0, 7)]))
    row = new_row(1, sampling=sampling)
    second = late.engine.submit(make_plan(2, new=[row], prefills=[(1, 7)]))
    assert second.is_done()
    assert first.wait().rows.tolist() == [0]
    output = second.wait()
    assert output.rows.tolist() == [0, 1] and bool(output.sampled_logprobs or output.prompt_logprobs)


def test_the_time_of_a_step_begins_where_the_step_before_ended(late: Late) -> None:
    first = late.engine.submit(make_plan(1, new=[new_row(0)], prefills=[(0, 7)]))
    late.clock.now_s += 0.25
    second = late.engine.submit(make_plan(2))
    late.clock.now_s += 0.5
    assert first.wait().step_time_us == 750_000
    late.clock.now_s += 0.125
    assert second.wait().step_time_us == 125_000


def test_reset_forgets_steps_under_way(late: Late) -> None:
    stale = late.engine.submit(make_plan(1, new=[new_row(0)], prefills=[(0, 7)]))
    late.engine.reset()
    fresh = late.engine.submit(make_plan(1, new=[new_row(0)], prefills=[(0, 7)]))
    assert stale.wait().token_ids.tolist() == fresh.wait().token_ids.tolist()
    assert late.engine.inspect(0).is_used
