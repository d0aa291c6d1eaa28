"""Tokenizers with more tokens than their model: constraints are over those that the model has."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import llguidance
import pytest
from tokenizers import Tokenizer, models

from control_plane.constraints.compiler import ConstraintCompiler
from control_plane.constraints.known_tokens import without_unknown_tokens
from control_plane.scheduler.types import Vocabulary
from tests.control_plane.constraints.conftest import END, NUM_TOKENS

UNIGRAM = models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("b", -1.0), ("ab", -0.5)], unk_id=0)
WORD_PIECE = models.WordPiece({"[UNK]": 0, "</s>": 1, "a": 2, "b": 3, "##b": 4}, unk_token="[UNK]")


def ids_of(text: str) -> set[int]:
    return set(Tokenizer.from_str(text).get_vocab(with_added_tokens=True).values())


def test_a_tokenizer_of_the_models_tokens_stays_as_it_is(vocabulary: Vocabulary) -> None:
    for num_tokens in (NUM_TOKENS, NUM_TOKENS + 100):
        assert without_unknown_tokens(vocabulary.tokenizer, num_tokens) is vocabulary.tokenizer


@pytest.mark.parametrize("pairs_are_texts", [False, True])
def test_added_tokens_and_merges_behind_the_models_last_token_are_left_out(
    vocabulary: Vocabulary, pairs_are_texts: bool
) -> None:
    known = Tokenizer.from_str(vocabulary.tokenizer)
    known.add_special_tokens(["<pad>"])
    known.add_tokens(["and so on"])
    document: dict[str, Any] = json.loads(known.to_str())
    if pairs_are_texts:
        document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]
    text = json.dumps(document)
    assert ids_of(text) == set(range(NUM_TOKENS + 2))
    for num_tokens in (NUM_TOKENS + 1, NUM_TOKENS, NUM_TOKENS - 3):
        left = without_unknown_tokens(text, num_tokens)
        assert ids_of(left) == set(range(num_tokens))
        llguidance.LLTokenizer(left, n_vocab=num_tokens, eos_token=[END])
        assert len(json.loads(left)["model"]["merges"]) == len(document["model"]["merges"]) - max(
            NUM_TOKENS - num_tokens, 0
        )


@pytest.mark.parametrize("model", [UNIGRAM, WORD_PIECE], ids=["unigram", "word-piece"])
def test_every_form_of_a_vocabulary_is_cut_off(model: Any) -> None:
    known = Tokenizer(model)
    known.add_special_tokens(["<pad>"])
    assert ids_of(without_unknown_tokens(known.to_str(), 5)) == set(range(5))
    assert ids_of(without_unknown_tokens(known.to_str(), 4)) == set(range(4))


def test_merges_of_continued_words_stay() -> None:
    vocab = {"a": 0, "##b": 1, "ab": 2, "##c": 3, "abc": 4, "zz": 5}
    model = models.BPE(vocab=vocab, merges=[("a", "##b"), ("ab", "##c")], continuing_subword_prefix="##")
    left = Tokenizer.from_str(without_unknown_tokens(Tokenizer(model).to_str(), 5))
    assert left.encode("abc").ids == [4]


def test_an_unknown_token_of_its_own_that_is_cut_off_leaves_a_tokenizer_that_loads() -> None:
    pieces = [("</s>", 0.0), ("a", -1.0), ("b", -1.0), ("<unk>", 0.0)]
    left = without_unknown_tokens(Tokenizer(models.Unigram(pieces, unk_id=3)).to_str(), 3)
    assert ids_of(left) == {0, 1, 2}


def test_added_tokens_keep_their_ids_behind_a_gap() -> None:
    known = Tokenizer(models.WordLevel({"a": 0, "b": 1, "far": 9}, unk_token="a"))
    known.add_special_tokens(["</s>"])
    number = known.token_to_id("</s>")
    left = Tokenizer.from_str(without_unknown_tokens(known.to_str(), 9))
    assert left.token_to_id("</s>") == number and left.token_to_id("far") is None


async def test_constraints_of_a_model_with_fewer_tokens_than_its_tokenizer_are_compiled(vocabulary: Vocabulary) -> None:
    known = Tokenizer.from_str(vocabulary.tokenizer)
    known.add_special_tokens(["<pad>"])
    compiler = ConstraintCompiler()
    try:
        text = without_unknown_tokens(known.to_str(), NUM_TOKENS)
        found = await compiler.compile("json_object", True, replace(vocabulary, digest="padded", tokenizer=text))
        assert found.grammar
    finally:
        await compiler.close()
