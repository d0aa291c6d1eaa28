"""Drafts beside constraints: a mask that is late holds up its own row alone, and changes no token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import llguidance
import pytest

from data_plane.constraints.lanes import Lanes
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.plan import RowConstraint, RowSampling, StepPlan, Vocabulary
from tests.data_plane.constraints.lanes import DrawnLanes, in_time
from tests.data_plane.constraints.test_rows import HeldLanes, run_all
from tests.data_plane.engine.planner import make_plan
from tests.data_plane.engine.test_oracle import worker_config
from tests.data_plane.engine.test_speculation import BLOCK, BLOCKS_OF_ROW, LOOP, Request, run
from tests.makers import make_tokenizer

GRAMMAR = 'start: ("alpha" | "beta") " and a long text that is forced" /[a-z]+/'
DRAWN = RowSampling(temperature=1.0, top_k=0, top_p=1.0, seed=5)
PROMPT = [5, 9, 31]


class NeverInVain(HeldLanes):
    """Held lanes, for steps that must not wait until a task is done: nothing runs it."""

    def __init__(self) -> None:
        super().__init__()
        self._num_waits = 0

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        self._num_waits += 1
        assert self._num_waits < 1000, "a step waits until a mask is ready"
        return condition()


class WheneverLanes(DrawnLanes):
    """A draw decides which tasks run also where nobody waits for one: whenever the time is read."""

    def __init__(self, seed: int, *, is_slow: bool) -> None:
        self._is_begun = False
        super().__init__(seed, 0.3, is_slow=is_slow)
        self._is_begun = True

    def now_s(self) -> float:
        if self._is_begun:
            self.wait(lambda: True, 0.0)
        return super().now_s()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=256)
    return (directory / "tokenizer.json").read_text(encoding="utf-8")


def make_engine(checkpoint: Path, lanes: Lanes, speculative: str = "ngram") -> TorchEngine:
    return build_engine(worker_config(checkpoint, block_size=BLOCK, speculative=speculative), lanes=lanes)


def constraint_of(tokenizer: str, engine: TorchEngine) -> RowConstraint:
    grammar = llguidance.LLMatcher.grammar_from_lark(GRAMMAR)
    return RowConstraint(grammar, grammar, Vocabulary("v", tokenizer, engine.capacities.vocab_size, (0,)))


def begun(engine: TorchEngine, constraint: RowConstraint) -> None:
    """Row 0 repeats itself, row 1 has the constraint; both have room for a plan of four steps."""
    rows = [Request(LOOP).new_row(0), Request(PROMPT, DRAWN, constraint=constraint).new_row(1)]
    output = engine.execute(make_plan(1, new=rows, prefills=[(0, len(LOOP)), (1, len(PROMPT))]))
    assert output.waiting_rows.tolist() == [1]


def plan_of_four(
    engine: TorchEngine, step_id: int, appended: list[tuple[int, int]]
) -> list[tuple[list[int], list[int]]]:
    """By step, the rows that sampled and those that sat out."""
    first = replace(make_plan(step_id, appended=appended), num_more=3)
    later = [StepPlan(step_id + 1 + index, num_more=2 - index) for index in range(3)]
    outputs = [engine.execute(plan) for plan in (first, *later)]
    return [(output.rows.tolist(), output.waiting_rows.tolist()) for output in outputs]


FIRST_BLOCKS = [(0, 5), (0, 6), (1, BLOCKS_OF_ROW + 1), (1, BLOCKS_OF_ROW + 2)]


def test_a_grammar_that_is_being_built_holds_up_its_own_row_alone(checkpoint: Path, tokenizer: str) -> None:
    engine = make_engine(checkpoint, NeverInVain())
    begun(engine, constraint_of(tokenizer, engine))
    assert plan_of_four(engine, 2, FIRST_BLOCKS) == [([0], [1])] * 4


def test_a_grammar_that_was_quick_and_is_late_holds_up_its_own_row_alone(checkpoint: Path, tokenizer: str) -> None:
    """Its mask is there when the drafts are made, and the one for the token behind them never comes."""
    lanes = NeverInVain()
    engine = make_engine(checkpoint, lanes)
    begun(engine, constraint_of(tokenizer, engine))
    lanes.read_all()
    run_all(lanes.new)
    steps = plan_of_four(engine, 2, FIRST_BLOCKS)
    assert steps == [([0, 1], []), *[([0], [1])] * 3]
    run_all(lanes.quick)
    steps = plan_of_four(engine, 6, [(0, 7), (1, BLOCKS_OF_ROW + 3)])
    assert steps[0] == ([0, 1], []), "the row does not go on"


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_do_not_depend_on_when_masks_are_ready(
    checkpoint: Path, tokenizer: str, seed: int, is_slow: bool
) -> None:
    """Whenever masks come, every row has the first tokens of a run in which they are never late."""
    in_order = make_engine(checkpoint, in_time(), "off")
    drafting = make_engine(checkpoint, WheneverLanes(seed, is_slow=is_slow))
    constraint = constraint_of(tokenizer, in_order)
    requests = [
        Request(LOOP),
        Request(PROMPT, DRAWN, constraint=constraint),
        Request(LOOP[:9], replace(DRAWN, seed=seed), constraint=constraint),
    ]
    _, expected = run(in_order, requests, num_steps=60, seed=seed, preempts=False)
    outputs, found = run(drafting, requests, num_steps=60, seed=seed, preempts=False)
    assert any(len(output.waiting_rows) for output in outputs)
    assert not any(len(output.failed_rows) for output in outputs)
    assert is_slow or sum(output.num_accepted for output in outputs) > 0
    for one, other in zip(found, expected, strict=True):
        assert len(one.tokens) > 8
        assert one.tokens == other.tokens[: len(one.tokens)]
