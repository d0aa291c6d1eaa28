"""Masks of constrained rows against a brute-force check over a small vocabulary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import llguidance
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer

from contract.sampling import MAX_VOCABULARIES
from data_plane.constraints.masks import Masks, forbid, maskable
from data_plane.errors import PlanRefused
from data_plane.plan import NewRow, RowConstraint, RowSampling, Vocabulary
from tests.data_plane.constraints.lanes import PatientRows, masks_of
from tests.makers import make_tokenizer

NUM_TOKENS = 270
END = 0


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    directory: Path = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=264)
    return Vocabulary("v", (directory / "tokenizer.json").read_text(encoding="utf-8"), NUM_TOKENS, (END,))


def row_of(texts: list[str], vocabulary: Vocabulary, row: int = 0, generated: list[int] | None = None) -> NewRow:
    grammar = llguidance.LLMatcher.grammar_from_lark(
        "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    )
    tokens = np.array([1, *(generated or [])], dtype=np.int32)
    return NewRow(
        row=row,
        token_ids=tokens,
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=np.zeros(1, dtype=np.int32),
        slot=None,
        slot_generation=0,
        sampling=RowSampling(),
        constraint=RowConstraint(grammar, grammar, vocabulary),
    )


def allowed(masks: Masks, place: int = 0) -> set[int]:
    logits = torch.zeros(int(masks.indices.max()) + 1, NUM_TOKENS)
    forbid(logits, masks)
    return set(torch.nonzero(logits[masks.indices[place]] == 0).flatten().tolist())


@given(st.lists(st.text("ab\u00e9 1", min_size=1, max_size=4), min_size=1, max_size=4), st.randoms())
@settings(max_examples=40, deadline=None)
def test_every_step_allows_exactly_the_tokens_that_go_on_to_a_choice(
    vocabulary: Vocabulary, texts: list[str], random: object
) -> None:
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer)
    spelled = {"</s>": b"", "<s>": b""}
    for symbol in (s for s, number in tokenizer.get_vocab().items() if number > 1):
        spelled[symbol] = _bytes_of(symbol)
    tokens = {number: spelled[symbol] for symbol, number in tokenizer.get_vocab().items()}
    rows = PatientRows(NUM_TOKENS)
    rows.add(row_of(texts, vocabulary))
    encoded, text = [each.encode() for each in texts], b""
    while True:
        masks = masks_of(rows, [0])
        expected = {
            t for t, spelling in tokens.items() if t > 1 and any(e.startswith(text + spelling) for e in encoded)
        }
        if text in encoded:
            expected.add(END)
        assert allowed(masks) == expected
        token = random.choice(sorted(expected))  # type: ignore[attr-defined]
        if token == END:
            return
        rows.advance(masks, np.array([0]), np.array([token], dtype=np.int32))
        text += tokens[token]


def test_a_row_goes_on_behind_the_tokens_that_it_generated_before(vocabulary: Vocabulary) -> None:
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer)
    b, z = _id_of(tokenizer, "b"), _id_of(tokenizer, "z")
    rows = PatientRows(NUM_TOKENS)
    rows.add(row_of(["bz"], vocabulary, row=3, generated=[b]))
    masks = masks_of(rows, [5, 3])
    assert masks.indices.tolist() == [1] and allowed(masks) == {z}


def test_a_row_that_fails_leaves_the_others_alone(vocabulary: Vocabulary) -> None:
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer)
    b, z = _id_of(tokenizer, "b"), _id_of(tokenizer, "z")
    rows = PatientRows(NUM_TOKENS)
    rows.add(row_of(["b"], vocabulary, row=0, generated=[z]))
    rows.add(row_of(["b"], vocabulary, row=1))
    masks = masks_of(rows, [0, 1])
    assert masks.failed == [0]
    assert allowed(masks, 1) == {b}


def test_a_ban_is_lifted_only_where_nothing_else_is_allowed(vocabulary: Vocabulary) -> None:
    b = _id_of(Tokenizer.from_str(vocabulary.tokenizer), "b")
    rows = PatientRows(NUM_TOKENS)
    for row, min_tokens in enumerate((9, 1)):  # the end is the token at position 1: banned for the first row only
        sampling = RowSampling(min_tokens=min_tokens, banned_token_ids=np.array([END], dtype=np.int32))
        rows.add(replace(row_of(["b"], vocabulary, row), sampling=sampling))
    masks = masks_of(rows, [0, 1])
    assert masks.lifted == []
    rows.advance(masks, np.arange(2), np.full(2, b, dtype=np.int32))
    assert masks_of(rows, [0, 1]).lifted == [0]


def test_logits_that_are_not_finite_are_found_below_a_mask(vocabulary: Vocabulary) -> None:
    rows = PatientRows(NUM_TOKENS)
    rows.add(row_of(["b"], vocabulary))
    logits = torch.zeros(1, NUM_TOKENS)
    assert forbid(logits, masks_of(rows, [0])).tolist() == [True]
    logits[0, 200] = torch.nan
    assert forbid(logits, masks_of(rows, [0])).tolist() == [False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_penalty_lifts_a_token_above_those_that_are_allowed(vocabulary: Vocabulary, dtype: torch.dtype) -> None:
    """The lowest repetition penalty for what is forbidden, the highest frequency penalty for what is allowed."""
    rows = PatientRows(NUM_TOKENS)
    rows.add(row_of(["b"], vocabulary))
    masks = masks_of(rows, [0])
    logits = maskable(torch.zeros(1, NUM_TOKENS, dtype=dtype))
    forbid(logits, masks)
    penalised = logits.float()[0] * 0.01
    (b,) = allowed(masks)
    penalised[b] = -2.0 * 1_000_000
    assert int(penalised.argmax()) == b


def test_tokens_of_an_adapter_that_the_constraint_does_not_know_are_forbidden(vocabulary: Vocabulary) -> None:
    """The adapter has 64 tokens more than the vocabulary that the grammar was compiled over."""
    rows = PatientRows(NUM_TOKENS)
    rows.add(row_of(["b"], vocabulary), NUM_TOKENS + 64)
    logits = torch.zeros(1, NUM_TOKENS + 64)
    forbid(logits, masks_of(rows, [0]))
    assert torch.nonzero(logits[0] == 0).flatten().tolist() == [_id_of(Tokenizer.from_str(vocabulary.tokenizer), "b")]


def test_a_host_fed_row_has_no_constraint(vocabulary: Vocabulary) -> None:
    with pytest.raises(PlanRefused, match="constraint"):
        PatientRows(NUM_TOKENS).add(replace(row_of(["b"], vocabulary), is_host_fed=True))


def _id_of(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.token_to_id(text)
    assert found is not None
    return found


def _bytes_of(symbol: str) -> bytes:
    """The bytes of a token as byte-level BPE writes them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
    return bytes(codes[character] for character in symbol)


def test_a_step_never_reads_a_vocabulary_that_was_read_before(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it after the rows of a session ended."""
    rows = PatientRows(NUM_TOKENS)
    rows.read(vocabulary)
    monkeypatch.setattr(llguidance, "LLTokenizer", _unexpected)
    rows.clear()
    rows.read(vocabulary)
    for row, text in enumerate(("ab", "cd")):
        rows.add(row_of([text], vocabulary, row))
    assert not masks_of(rows, [0, 1]).failed
    rows.add(row_of(["ab"], replace(vocabulary, digest="another"), 2))
    assert masks_of(rows, [2]).failed == [0]


def test_the_vocabulary_used_last_is_kept_the_longest(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with a kept grammar use their vocabulary, too: the control plane counts them, and does not send it again."""
    rows = PatientRows(NUM_TOKENS)
    rows.add(row_of(["ab"], vocabulary))
    for number in range(MAX_VOCABULARIES - 1):
        rows.read(replace(vocabulary, digest=f"v{number}"))
    rows.add(row_of(["ab"], vocabulary))
    rows.read(replace(vocabulary, digest="one more"))
    monkeypatch.setattr(llguidance, "LLTokenizer", _unexpected)
    rows.add(row_of(["another grammar"], vocabulary))
    assert not masks_of(rows, [0]).failed


def test_a_vocabulary_that_cannot_be_read_fails_its_rows_alone(vocabulary: Vocabulary) -> None:
    rows, torn = PatientRows(NUM_TOKENS), replace(vocabulary, digest="torn", tokenizer="{")
    rows.read(torn)
    rows.add(row_of(["ab"], torn))
    rows.add(row_of(["ab"], vocabulary, 1))
    assert masks_of(rows, [0, 1]).failed == [0]


def _unexpected(*_: object, **__: object) -> None:
    raise ValueError("a step reads a tokenizer")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_lowered_where_a_token_is_forbidden_and_nowhere_else(dtype: torch.dtype, share: float) -> None:
    """Whatever the share of forbidden tokens is, for some of the rows, of which some are not finite."""
    draw = np.random.default_rng(3)
    logits = torch.from_numpy(draw.standard_normal((5, 1001), dtype=np.float32)).to(dtype)
    logits[1, 7], logits[4, 1000] = float("nan"), float("-inf")
    forbidden = draw.random((3, 1001)) < share
    packed = np.packbits(np.pad(forbidden, ((0, 0), (0, 23))), axis=1, bitorder="little")
    expected = logits.clone()
    expected[[1, 2, 4]] = expected[[1, 2, 4]].masked_fill(torch.from_numpy(forbidden), -1e30)
    finite = forbid(logits, Masks(np.array([1, 2, 4]), packed))
    assert finite.tolist() == [False, True, False]
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)
