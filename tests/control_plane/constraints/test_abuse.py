"""Abusive constraints: refused, or compiled within the limits, and then they end alone beside a row that goes on.

What a constraint may take is CPU time that the kernel counts (compilation) and work that llguidance counts (each
step), so no clock is read here. `benchmarks.engine.abusive_constraints` shows the times.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import llguidance
import numpy as np
import pytest
import torch

from benchmarks.engine.structured_output import VOCAB_SIZE, make_tokenizer
from control_plane.constraints.compile_process import grammar_of
from control_plane.constraints.compiler import ConstraintCompiler, ConstraintRefused
from control_plane.scheduler.types import Constraint, Vocabulary
from data_plane import plan
from data_plane.constraints.masks import forbid
from tests.control_plane.constraints.abuse import CORPUS, MAX_BYTES
from tests.data_plane.constraints.lanes import PatientRows, masks_of

NUM_STEPS = 40


@pytest.fixture
async def compiler() -> AsyncIterator[ConstraintCompiler]:
    compiler = ConstraintCompiler()
    yield compiler
    await compiler.close()


@pytest.mark.parametrize("name", CORPUS)
async def test_an_abusive_constraint_ends_alone(
    compiler: ConstraintCompiler, vocabulary: Vocabulary, name: str
) -> None:
    kind, value = CORPUS[name]
    assert (len(value) if isinstance(value, str) else sum(map(len, value))) <= MAX_BYTES
    neighbour = await compiler.compile("regex", "[a-z]{40}", vocabulary)
    try:
        abusive = await compiler.compile(kind, value, vocabulary)
    except ConstraintRefused as error:
        assert str(error)
        abusive = None
    again = await compiler.compile("regex", "[a-y]{40}", vocabulary, "another tenant")
    assert again.grammar != neighbour.grammar
    assert tokens_of(neighbour, abusive) == tokens_of(neighbour, None)


def tokens_of(neighbour: Constraint, abusive: Constraint | None) -> list[int]:
    """What the neighbour draws beside the other row, which draws among all that its grammar allows."""
    chance = {row: np.random.default_rng(row) for row in (0, 1)}
    constraints = {0: neighbour} if abusive is None else {0: neighbour, 1: abusive}
    size = neighbour.vocabulary.num_tokens
    rows = PatientRows(size)
    for row, constraint in constraints.items():
        rows.add(_new_row(row, constraint))
    tokens: list[int] = []
    live = np.array(sorted(constraints))
    for _ in range(NUM_STEPS):
        masks = masks_of(rows, live.tolist())
        assert 0 not in masks.failed
        drawn = np.stack([chance[row].gumbel(size=size).astype(np.float32) for row in live.tolist()])
        logits = torch.from_numpy(drawn)
        logits[:, 0] = -100.0  # the end, where anything else is allowed
        forbid(logits, masks)
        chosen = logits.argmax(-1).numpy().astype(np.int32)
        tokens.append(int(chosen[0]))
        rows.advance(masks, live, chosen)
        if len(live) == 2 and (1 in masks.failed or chosen[1] == 0):  # a failed or complete row ends, as in the engine
            rows.free(np.array([1], dtype=np.int32))
            live = live[:1]
    return tokens


def test_the_work_of_a_step_is_limited(vocabulary: Vocabulary) -> None:
    """A grammar that leaves thousands of ways open at one place fails there."""
    text, grammar = vocabulary.tokenizer, llguidance.LLMatcher.grammar_from_lark(CORPUS["many rules"][1])
    constraint = Constraint("g", grammar, Vocabulary("v", text, vocabulary.num_tokens, vocabulary.end_token_ids))
    rows, row = PatientRows(vocabulary.num_tokens), np.zeros(1, dtype=np.int64)
    rows.add(_new_row(0, constraint))
    a = np.array([ord("a") - ord("!") + 2], dtype=np.int32)
    for _ in range(10):
        masks = masks_of(rows, [0])
        if masks.failed:
            return
        rows.advance(masks, row, a)
    raise AssertionError("the grammar goes on beyond its limits")


def _new_row(row: int, constraint: Constraint) -> plan.NewRow:
    of = constraint.vocabulary
    vocabulary = plan.Vocabulary(of.digest, of.tokenizer, of.num_tokens, tuple(of.end_token_ids))
    return plan.NewRow(
        row=row,
        token_ids=np.ones(1, dtype=np.int32),
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=np.zeros(1, dtype=np.int32),
        slot=None,
        slot_generation=0,
        sampling=plan.RowSampling(),
        constraint=plan.RowConstraint(constraint.digest, constraint.grammar, vocabulary),
    )


@pytest.fixture(scope="module")
def large_vocabulary() -> Vocabulary:
    """With 264 tokens no schema comes near the limits."""
    return Vocabulary("large", make_tokenizer(), VOCAB_SIZE, (0,))


@pytest.mark.parametrize(("num_members", "seed"), [(100, 0), (100, 1), (300, 0), (300, 1)])
def test_a_schema_with_many_optional_members_never_fails(
    large_vocabulary: Vocabulary, num_members: int, seed: int
) -> None:
    """A walk that chooses among all that is allowed, as no model does: it goes through many places of the grammar."""
    members = {f"member_{number}": {"type": "string"} for number in range(num_members)}
    schema = {"type": "object", "properties": members, "additionalProperties": False}
    rows, row, chance = PatientRows(VOCAB_SIZE), np.zeros(1, dtype=np.int64), np.random.default_rng(seed)
    rows.add(
        _new_row(0, Constraint("g", grammar_of({"kind": "json_schema", "value": json.dumps(schema)}), large_vocabulary))
    )
    for _ in range(100):
        masks = masks_of(rows, [0])
        assert not masks.failed
        logits = torch.from_numpy(chance.gumbel(size=(1, VOCAB_SIZE)).astype(np.float32))
        logits[:, 0] = -100.0
        forbid(logits, masks)
        token = int(logits.argmax())
        if token == 0:
            return
        rows.advance(masks, row, np.array([token], dtype=np.int32))
