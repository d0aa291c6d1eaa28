"""The fake engine: a block that was moved, copied, shared or fed wrongly must give a wrong token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from data_plane.errors import PlanRefused
from data_plane.plan import Int32Array, NewRow, RowSampling, StepPlan
from tests.fakes.fleet_rig import CAPACITIES
from tests.fakes.hash_engine import HashEngine, oracle
from tests.fakes.hash_model import chain_next, chain_start, logprob_of, ranking

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
SMALL = replace(CAPACITIES, block_size=4, num_blocks=16, num_host_blocks=4)
PROMPT = [5, 9, 200, 31, 77, 12]


def array(*values: object, width: int = 0) -> Int32Array:
    return np.array(values, dtype=np.int32).reshape((-1, width) if width else -1)


def pairs(*values: tuple[int, int]) -> Int32Array:
    return array(*values, width=2)


def new_row(row: int, blocks: list[int], tokens: list[int] | None = None, **changes: Any) -> NewRow:
    values: dict[str, object] = {
        "row": row,
        "token_ids": array(*(tokens or PROMPT)),
        "num_prompt_tokens": len(PROMPT),
        "num_computed_tokens": 0,
        "block_ids": array(*blocks),
        "slot": None,
        "slot_generation": 0,
        "sampling": GREEDY,
    }
    return NewRow(**(values | changes))  # type: ignore[arg-type]


def begun(blocks: list[int], **changes: Any) -> HashEngine:
    """An engine after the prefill of PROMPT in row 0."""
    engine = HashEngine(SMALL)
    engine.execute(StepPlan(1, new_rows=[new_row(0, blocks, **changes)], prefills=pairs((0, len(PROMPT)))))
    return engine


def completion(num_tokens: int, **options: object) -> list[int]:
    return oracle(SMALL.model_fingerprint, "", PROMPT, num_tokens, vocab_size=SMALL.vocab_size, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_fork_may_begin_after_its_parent_was_freed_unless_the_block_is_anothers_by_then(is_taken: bool) -> None:
    engine = begun([1, 2])
    heirs = [new_row(3, [2], [7, 7], num_prompt_tokens=2)] if is_taken else []
    engine.execute(StepPlan(2, freed_rows=array(0), new_rows=heirs, prefills=pairs(*[(3, 2)] * is_taken)))
    child = new_row(1, [1, 9], num_computed_tokens=len(PROMPT) - 1)
    output = engine.execute(StepPlan(3, new_rows=[child], prefills=pairs((1, 1)), block_copies=pairs((2, 9))))
    token = output.token_ids[output.rows.tolist().index(1)]
    assert (token == completion(1)[0]) is not is_taken


def test_attention_to_a_block_of_a_freed_row_gives_a_wrong_token() -> None:
    engine = begun([1, 2])
    engine.execute(StepPlan(2, freed_rows=array(0)))
    reader = new_row(1, [1, 2], num_computed_tokens=len(PROMPT) - 1)
    output = engine.execute(StepPlan(3, new_rows=[reader], prefills=pairs((1, 1))))
    assert output.token_ids.tolist() != completion(1)


def test_fork_continues_its_parent_where_its_last_block_was_copied() -> None:
    expected = completion(4)
    for source, is_right in ((2, True), (9, False)):
        engine = begun([1, 2])
        child = new_row(1, [1, 7], num_computed_tokens=len(PROMPT) - 1)
        plan = StepPlan(2, new_rows=[child], prefills=pairs((1, 1)), block_copies=pairs((source, 7)))
        first = engine.execute(plan)
        assert first.rows.tolist() == [0, 1]
        assert first.token_ids[0] == expected[1]
        assert (first.token_ids.tolist()[1] == expected[0]) is is_right
        second = engine.execute(StepPlan(3))
        assert (second.token_ids.tolist() == [expected[2], expected[1]]) is is_right


@pytest.mark.parametrize(("back", "is_right"), [([(0, 8), (1, 9)], True), ([(1, 8), (0, 9)], False)])
def test_swapped_row_finds_its_blocks_again(back: list[tuple[int, int]], is_right: bool) -> None:
    """Its blocks go to another row while it is away, in the very plan that swaps them out."""
    expected = completion(3)
    engine = begun([1, 2])
    other = new_row(3, [1, 2], [7] * 6)
    engine.execute(
        StepPlan(
            2,
            freed_rows=array(0),
            new_rows=[other],
            prefills=pairs((3, 6)),
            swap_outs=pairs((1, 0), (2, 1)),
        )
    )
    known = [*PROMPT, expected[0]]
    again = new_row(0, [8, 9], known, num_computed_tokens=len(PROMPT))
    plan = StepPlan(3, freed_rows=array(3), new_rows=[again], prefills=pairs((0, 1)), swap_ins=pairs(*back))
    assert (engine.execute(plan).token_ids.tolist() == expected[1:2]) is is_right
    # A host block is spent once it was read.
    twice = new_row(0, [10, 11], known, num_computed_tokens=len(PROMPT))
    plan = StepPlan(4, array(0), [twice], prefills=pairs((0, 1)), swap_ins=pairs((0, 10), (1, 11)))
    assert engine.execute(plan).token_ids.tolist() != expected[1:2]


def test_freed_block_that_is_read_gives_another_token() -> None:
    engine = begun([1, 2])
    engine.execute(StepPlan(2, freed_rows=array(0)))
    heir = new_row(1, [1, 2], num_computed_tokens=len(PROMPT) - 1)
    output = engine.execute(StepPlan(3, new_rows=[heir], prefills=pairs((1, 1))))
    assert output.token_ids.tolist() != completion(1)


def test_block_with_two_writers_is_refused() -> None:
    """Even if they write the same."""
    engine = begun([1, 2])
    twins = [new_row(row, [3 + row, 2], PROMPT) for row in (1, 2)]
    with pytest.raises(PlanRefused, match="two tokens of the step would be written to place 0 of block 2"):
        engine.execute(StepPlan(2, freed_rows=array(0), new_rows=twins, prefills=pairs((1, 6), (2, 6))))


def test_host_fed_row_decodes_what_it_is_fed_and_only_then() -> None:
    engine = begun([1, 2], is_host_fed=True)
    assert engine.execute(StepPlan(2)).rows.tolist() == []
    output = engine.execute(StepPlan(3, fed_tokens=pairs((0, 42))))
    expected = oracle(SMALL.model_fingerprint, "", [*PROMPT, 42], 1, vocab_size=SMALL.vocab_size)
    assert (output.rows.tolist(), output.token_ids.tolist()) == ([0], expected)
    with pytest.raises(PlanRefused, match="row 1, which is not a host-fed row"):
        engine.execute(StepPlan(4, fed_tokens=pairs((1, 42))))


def test_seeds_draw_apart_and_survive_a_return() -> None:
    drawn = replace(GREEDY, temperature=1.0, seed=7)
    expected = completion(3, seed=7)
    assert expected not in (completion(3), completion(3, seed=8))
    engine = begun([1, 2], sampling=drawn)
    second = engine.execute(StepPlan(2)).token_ids.tolist()
    again = new_row(0, [3, 4], [*PROMPT, *expected[:2]], sampling=drawn)
    third = engine.execute(StepPlan(3, array(0), [again], prefills=pairs((0, 8)))).token_ids.tolist()
    assert [*second, *third] == expected[1:]


def test_banned_tokens_wait_for_min_tokens() -> None:
    free = completion(3)
    banned = completion(3, min_tokens=2, banned=free)
    assert not set(banned[:2]) & set(free)
    engine = begun([1, 2], sampling=replace(GREEDY, min_tokens=2, banned_token_ids=array(*free)))
    assert [engine.execute(StepPlan(step)).token_ids.tolist()[0] for step in (2, 3)] == banned[1:]


def test_logprobs_of_prompt_and_completion_are_the_models() -> None:
    engine = HashEngine(SMALL)
    asking = replace(GREEDY, num_logprobs=3, num_prompt_logprobs=1)
    outputs = [
        engine.execute(StepPlan(1, new_rows=[new_row(0, [1, 2], sampling=asking)], prefills=pairs((0, 4)))),
        engine.execute(StepPlan(2, prefills=pairs((0, 2)))),
    ]
    returned = [part for output in outputs for part in output.prompt_logprobs]
    assert [part.first_position for part in returned] == [1, 5]
    assert [token for part in returned for token in part.token_ids.tolist()] == PROMPT[1:]
    value = chain_start(SMALL.model_fingerprint, "")
    for token, logprob in zip(PROMPT[1:], [x for part in returned for x in part.logprobs.tolist()], strict=True):
        value = chain_next(value, PROMPT[PROMPT.index(token) - 1])
        assert logprob == pytest.approx(logprob_of(value, token, SMALL.vocab_size)[0])
    [sampled] = outputs[1].sampled_logprobs
    top = ranking(chain_next(value, PROMPT[-1]), 3, SMALL.vocab_size)
    assert (sampled.first_position, sampled.token_ids.tolist(), sampled.ranks.tolist()) == (6, [top[0][0]], [1])
    assert sampled.top_token_ids.tolist() == [[token for token, _ in top]]
