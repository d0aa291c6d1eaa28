"""The vocabulary that constraints of a request are over."""

from __future__ import annotations

from pathlib import Path

import pytest
from motet.v1 import constraints_pb2, generation_pb2

from control_plane.api.generation import constraints as module
from control_plane.api.generation.constraints import Constraints
from control_plane.api.text.codec import TextCodec
from control_plane.constraints.compiler import ConstraintCompiler
from tests.makers import make_tokenizer

NUM_TOKENS = 264


async def test_workers_begin_with_the_vocabulary_that_requests_of_the_base_model_name(tmp_path: Path) -> None:
    codec = TextCodec.load(make_tokenizer(tmp_path, vocab_size=NUM_TOKENS), tmp_path / "unused.json")
    compiler = ConstraintCompiler()
    constraints = Constraints(compiler)
    early = await constraints.vocabulary_of(codec, (0, 1, NUM_TOKENS), NUM_TOKENS)
    message = generation_pb2.GenerateRequest(constraint=constraints_pb2.Constraint(regex="a"))
    used = await constraints.of(message, codec, (1, 0), NUM_TOKENS, "")
    assert early is not None and used is not None and used.vocabulary is early
    await compiler.close()
    await codec.close()


async def test_no_vocabulary_is_sent_where_every_constraint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = TextCodec.load(make_tokenizer(tmp_path / "with", vocab_size=NUM_TOKENS), tmp_path / "unused.json")
    (tmp_path / "without").mkdir()
    bare = TextCodec.load(tmp_path / "without", tmp_path / "unused.json")
    constraints = Constraints(ConstraintCompiler())
    assert await constraints.vocabulary_of(codec, (NUM_TOKENS,), NUM_TOKENS) is None
    assert await constraints.vocabulary_of(bare, (0,), NUM_TOKENS) is None
    monkeypatch.setattr(module, "MAX_TOKENIZER_BYTES", 10)
    assert await constraints.vocabulary_of(codec, (0,), NUM_TOKENS) is None
    await codec.close()
    await bare.close()
