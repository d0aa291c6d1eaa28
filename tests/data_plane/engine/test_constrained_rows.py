"""Rows under constraints leave blocks to be made finite where KV may not be, whatever became of the constraint."""

from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from control_plane.registry.model.base_model import BaseModel
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.plan import RowConstraint, Vocabulary
from tests.data_plane.constraints.test_rows import HeldLanes, run_all
from tests.data_plane.engine.planner import GREEDY, array, make_plan
from tests.data_plane.engine.test_engine import PROMPT, new_row
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import ingested
from tests.makers import make_adapter, make_tokenizer


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


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:.*embedding layer has been resized")
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_constraints_beside_and_of_an_adapter_with_more_tokens(
    checkpoint: Path, tmp_path: Path, tokenizer: str, on_device: bool
) -> None:
    """Either ended the session of the worker, and with it every other tenant's requests on that worker."""
    parts = build_engine(worker_config(checkpoint, num_blocks=64))
    wide = make_adapter(tmp_path / "wide", checkpoint, rank=4, resize=300, modules_to_save=["embed_tokens", "lm_head"])
    packed = ingested(wide, BaseModel.load(checkpoint))
    parts.slots.load(0, 1, packed.info.digest, packed)
    lanes = HeldLanes()
    engine = TorchEngine(
        parts.model, parts.kv_cache, parts.arena, parts.capacities, lanes=lanes, decodes_on_device=on_device
    )
    known = Tokenizer.from_str(tokenizer)
    known.add_tokens([f"new{index}" for index in range(256, 300)])
    of_base = Vocabulary("base", tokenizer, 256, (0,))
    of_adapter = Vocabulary("wide", known.to_str(), 300, (0,))
    new_tokens = "start: " + " | ".join(f'"new{index}"' for index in (270, 299))
    liked = replace(GREEDY, biased_token_ids=array([299]), biases=np.full(1, 50, dtype=np.float32))
    slot = {"slot": 0, "slot_generation": 1}
    rows = [
        new_row(0, block_ids=array([0, 1, 2]), constraint=RowConstraint("a", "start: /[a-z]+/", of_base)),
        new_row(
            1, block_ids=array([3, 4, 5]), sampling=liked, constraint=RowConstraint("n", new_tokens, of_adapter), **slot
        ),
        new_row(2, block_ids=array([6, 7, 8]), **slot),
    ]
    outputs = [engine.execute(make_plan(1, new=rows, prefills=[(row, len(PROMPT)) for row in range(3)]))]
    lanes.read_all()
    for number in range(2):
        run_all(lanes.new)
        run_all(lanes.quick)
        outputs.append(engine.execute(make_plan(2 + number)))
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for output in outputs:
        assert len(output.failed_rows) == 0
        for row, token in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True):
            tokens[row].append(token)
    letters = {known.token_to_id(letter) for letter in string.ascii_lowercase}
    assert len(tokens[0]) == 2 and set(tokens[0]) <= letters
    assert tokens[1] == [299, 0] and len(tokens[2]) == 3


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
