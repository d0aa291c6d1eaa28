"""Grammars where the library that follows them is missing, and rows of one grammar whose lexer is used up."""

from __future__ import annotations

import logging
import sys

import llguidance
import numpy as np
import pytest

from contract.sampling import GRAMMAR_LIMITS
from data_plane.constraints.matchers import ConstraintFailed, LexersTaken, Matcher, Matchers
from data_plane.plan import Int32Array, RowConstraint, Vocabulary
from tests.data_plane.constraints.test_masks import END, NUM_TOKENS, row_of, vocabulary

__all__ = ["vocabulary"]  # a fixture
LENGTH = 300
# Each character is a state of the lexer. With the limit below, one text is within it and the two together are not.
TWO_LENGTHS = f"a[0-9]{{{LENGTH}}}|b[a-z]{{{LENGTH}}}"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few states, so that few tokens use them up."""
    monkeypatch.setitem(GRAMMAR_LIMITS, "max_lexer_states", 500)


def constraint_of(regex: str, vocabulary: Vocabulary) -> RowConstraint:
    return RowConstraint(regex, llguidance.LLMatcher.grammar_from_regex(regex), vocabulary)


def begin(matchers: Matchers, regex: str, vocabulary: Vocabulary) -> Matcher:
    found = matchers.find(constraint_of(regex, vocabulary))
    return found if isinstance(found, Matcher) else found()


def ids_of(text: str) -> list[int]:
    """Tokens of make_tokenizer for characters of ASCII."""
    return [ord(character) - ord("!") + 2 for character in text]


def go_on(matcher: Matcher) -> None:
    """As a worker does behind each token and mask."""
    if matcher.has_failed:
        matcher.check()
        for token_id in matcher.start_again():
            Matcher.follow_all([matcher], [token_id])
        matcher.check()


def mask(matcher: Matcher) -> Int32Array:
    words = np.zeros(-(-NUM_TOKENS // 32), dtype=np.int32)
    matcher.write_mask(words)
    if matcher.has_failed:
        go_on(matcher)
        matcher.write_mask(words)
        matcher.check()
    return words


def ids_in(words: Int32Array) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def follow(matcher: Matcher, text: str) -> None:
    """As a worker does: a mask, in which the token is, and then the token."""
    for token_id in ids_of(text):
        assert token_id in ids_in(mask(matcher))
        Matcher.follow_all([matcher], [token_id])
        go_on(matcher)


def test_a_constraint_fails_by_name_where_llguidance_is_missing(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = row_of(["yes", "no"], vocabulary).constraint
    assert constraint is not None
    monkeypatch.setitem(sys.modules, "llguidance", None)
    matchers = Matchers()
    matchers.read(vocabulary)  # is logged
    with pytest.raises(ConstraintFailed, match="the worker lacks the package llguidance: install it there"):
        matchers.find(constraint)


def test_a_row_is_not_failed_by_what_earlier_rows_took(
    vocabulary: Vocabulary, limits: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each text is within the limits, both together are not. Rows that run and rows that begin go on."""
    caplog.set_level(logging.INFO)
    matchers = Matchers()
    running = begin(matchers, TWO_LENGTHS, vocabulary)
    follow(running, "a" + "7" * 50)
    follow(begin(matchers, TWO_LENGTHS, vocabulary), "a" + "7" * LENGTH)
    follow(begin(matchers, TWO_LENGTHS, vocabulary), "b" + "q" * LENGTH)
    assert "grammar built anew for a row" in caplog.text
    # This one had followed 51 tokens when the lexer broke.
    alone = begin(Matchers(), TWO_LENGTHS, vocabulary)
    follow(alone, "a" + "7" * 50)
    assert mask(running).tolist() == mask(alone).tolist()
    follow(running, "7" * (LENGTH - 50))
    assert ids_in(mask(running)) == [END]
    follow(begin(matchers, TWO_LENGTHS, vocabulary), "b" + "q" * LENGTH)


def test_rows_whose_tokens_are_followed_together_go_on_alike(vocabulary: Vocabulary, limits: None) -> None:
    matchers = Matchers()
    rows = [begin(matchers, TWO_LENGTHS, vocabulary) for _ in range(3)]
    letters = ["a" + "7" * LENGTH, "b" + "q" * LENGTH, "b" + "z" * LENGTH]
    for tokens in zip(*[ids_of(text) for text in letters], strict=True):
        assert all(token in ids_in(mask(row)) for row, token in zip(rows, tokens, strict=True))
        Matcher.follow_all(rows, tokens)
        for row in rows:
            go_on(row)
    assert [ids_in(mask(row)) for row in rows] == [[END]] * 3


def test_a_text_beyond_the_limits_fails_and_leaves_the_grammar_to_others(
    vocabulary: Vocabulary, limits: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    matchers, regex = Matchers(), "[0-9]{900}"
    with pytest.raises(ConstraintFailed, match="too many states"):
        follow(begin(matchers, regex, vocabulary), "7" * 900)
    assert not caplog.records  # no other row had its lexer: it is not tried again
    beside = begin(matchers, regex, vocabulary)
    follow(beside, "7" * 50)
    with pytest.raises(ConstraintFailed, match="too many states"):
        follow(begin(matchers, regex, vocabulary), "7" * 900)
    assert len(caplog.records) == 1  # it was tried again, once
    follow(beside, "7" * 50)
    follow(begin(matchers, regex, vocabulary), "7" * 50)


def test_a_token_that_does_not_fit_fails_its_row_alone(
    vocabulary: Vocabulary, limits: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    matchers = Matchers()
    beside = begin(matchers, TWO_LENGTHS, vocabulary)
    failed = begin(matchers, TWO_LENGTHS, vocabulary)
    follow(failed, "a7")
    with pytest.raises(ConstraintFailed, match="doesn't satisfy the grammar"):
        Matcher.follow_all([failed], ids_of("q"))
        failed.check()
    follow(beside, "a7")
    assert isinstance(matchers.find(constraint_of(TWO_LENGTHS, vocabulary)), Matcher) and not caplog.records


def test_few_rows_have_a_lexer_of_their_own_and_a_further_one_waits_for_it(
    vocabulary: Vocabulary, limits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_plane.constraints.matchers.MAX_OWN_LEXERS", 1)
    matchers = Matchers()
    first, second = (begin(matchers, TWO_LENGTHS, vocabulary) for _ in range(2))
    for row in (first, second):
        Matcher.follow_all([row], ids_of("a"))
    follow(begin(matchers, TWO_LENGTHS, vocabulary), "a" + "7" * LENGTH)
    assert matchers.num_free_lexers() == 1
    breaks = begin(matchers, TWO_LENGTHS, vocabulary)
    follow(breaks, "b" + "q" * LENGTH)
    assert matchers.num_free_lexers() == 0
    del breaks
    words = np.zeros(-(-NUM_TOKENS // 32), dtype=np.int32)
    for row in (first, second):
        row.write_mask(words)
        assert row.has_failed
    follow(first, "7")
    with pytest.raises(LexersTaken, match="1 rows have a lexer of their own"):
        second.start_again()
    del first, row
    assert matchers.num_free_lexers() == 1
    follow(second, "7" * LENGTH)
    assert ids_in(mask(second)) == [END]
