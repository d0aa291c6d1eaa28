"""The vocabulary that constraints of a request are over."""

from __future__ import annotations

from pathlib import Path

import pytest
from motet.v1 import constraints_pb2, generation_pb2
from tokenizers import Tokenizer

from control_plane.api.generation import constraints as module
from control_plane.api.generation.constraints import Constraints
from control_plane.api.text.codec import TextCodec
from control_plane.constraints.compiler import ConstraintCompiler
from control_plane.constraints.known_tokens import find_known_tokens
from control_plane.errors import Unavailable
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


async def test_a_tokenizer_with_more_tokens_than_the_model_can_be_used(tmp_path: Path) -> None:
    """A checkpoint whose tokenizer got a token for padding, and whose embedding did not."""
    file = make_tokenizer(tmp_path, vocab_size=NUM_TOKENS) / "tokenizer.json"
    padded = Tokenizer.from_file(str(file))
    padded.add_special_tokens(["<pad>"])
    padded.save(str(file))
    codec = TextCodec.load(tmp_path, tmp_path / "unused.json")
    assert codec.has_tokens_from(NUM_TOKENS) and not codec.has_tokens_from(NUM_TOKENS + 1)
    compiler = ConstraintCompiler()
    constraints = Constraints(compiler)
    message = generation_pb2.GenerateRequest(constraint=constraints_pb2.Constraint(regex="a"))
    used = await constraints.of(message, codec, (0,), NUM_TOKENS, "")
    assert used is not None and "<pad>" not in used.vocabulary.tokenizer
    whole = await constraints.vocabulary_of(codec, (0,), NUM_TOKENS + 1)
    assert whole is not None and "<pad>" in whole.tokenizer
    await compiler.close()
    await codec.close()


async def test_a_process_that_cannot_read_a_tokenizer_says_try_again() -> None:
    with pytest.raises(Unavailable, match="try again"):
        find_known_tokens("no JSON", NUM_TOKENS)
