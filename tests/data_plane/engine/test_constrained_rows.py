"""Rows under constraints leave blocks to be made finite where KV may not be, whatever became of the constraint."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_plane.engine.engine import TorchEngine
from data_plane.plan import RowConstraint, Vocabulary
from tests.data_plane.constraints.test_rows import HeldLanes, run_all
from tests.data_plane.engine.planner import make_plan
from tests.data_plane.engine.test_engine import PROMPT, new_row
from tests.makers import make_tokenizer


def begun(engine: TorchEngine, grammar: str, tokenizer: str) -> TorchEngine:
    """An engine on the parts of another, with a row that sat out step 1. It has a mask for one token, not for more."""
    lanes = HeldLanes()
    own = TorchEngine(engine.model, engine.kv_cache, engine.arena, engine.capacities, lanes=lanes)
    vocabulary = Vocabulary("v", tokenizer, engine.capacities.vocab_size, (0,))
    row = new_row(constraint=RowConstraint(grammar, grammar, vocabulary))
    own.execute(make_plan(1, new=[row], prefills=[(0, len(PROMPT))]))
    lanes.read_all()
    run_all(lanes.new)
    return own


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return (make_tokenizer(tmp_path / "tokenizer", vocab_size=256) / "tokenizer.json").read_text(encoding="utf-8")


@pytest.fixture
def marked(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that are remembered as ones that may not be finite."""
    found: list[int] = []
    monkeypatch.setattr(engine.kv_cache, "mark_dirty", lambda blocks: found.extend(blocks.tolist()))
    return found


def test_a_row_whose_constraint_failed_leaves_nothing_to_do(
    engine: TorchEngine, tokenizer: str, marked: list[int]
) -> None:
    """To make its blocks finite would take time of the step of every other row."""
    held = begun(engine, "start: is_not_a_rule", tokenizer)
    output = held.execute(make_plan(2))
    assert output.unconstrained_rows.tolist() == output.failed_rows.tolist() == [0]
    held.execute(make_plan(3, freed=[0]))
    assert marked == []


def test_a_row_that_ends_while_it_sits_out_steps_leaves_its_blocks_to_be_made_finite(
    engine: TorchEngine, tokenizer: str, marked: list[int]
) -> None:
    """It was finite when it sampled last. Nobody looked at what it computed since."""
    held = begun(engine, "start: /[a-z]+/", tokenizer)
    assert held.execute(make_plan(2)).rows.tolist() == [0]
    assert held.execute(make_plan(3)).waiting_rows.tolist() == [0]
    held.execute(make_plan(4, freed=[0]))
    assert marked == [0]
