"""Grammars over vocabularies: built once, copied for every row. Errors of llguidance become ConstraintFailed."""

from __future__ import annotations

import logging
from collections import OrderedDict

import llguidance

from contract.sampling import GRAMMAR_LIMITS
from data_plane.plan import RowConstraint, Vocabulary

logger = logging.getLogger(__name__)

MAX_VOCABULARIES = 8  # about 50 MB each for 128,000 tokens
MAX_GRAMMARS = 256


class ConstraintFailed(Exception):
    """The grammar cannot be followed any further; the message says why."""


class Matchers:
    """The vocabularies and grammars that were used last. Used from one thread."""

    def __init__(self) -> None:
        self._vocabularies: OrderedDict[str, llguidance.LLTokenizer] = OrderedDict()
        self._grammars: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def read(self, vocabulary: Vocabulary) -> None:
        """Have a vocabulary ready. One that cannot be read fails the rows that name it."""
        try:
            self._vocabulary(vocabulary)
        except ConstraintFailed as error:
            logger.warning("vocabulary not read digest=%s: %s", vocabulary.digest[:12], error)

    def make(self, constraint: RowConstraint, generated: list[int]) -> llguidance.LLMatcher:
        """A matcher of its own for one row that generated these tokens. Raises ConstraintFailed."""
        # Each row uses its vocabulary, also where its grammar is kept: what the control plane takes for the oldest
        # vocabulary is the oldest one here, so that one it does not send again is still here.
        vocabulary = self._vocabulary(constraint.vocabulary)
        matcher = self._grammar(constraint, vocabulary).deep_copy()
        if generated and not matcher.consume_tokens(generated):
            raise ConstraintFailed(f"the tokens generated before do not follow the grammar: {matcher.get_error()}")
        return matcher

    def _grammar(self, constraint: RowConstraint, vocabulary: llguidance.LLTokenizer) -> llguidance.LLMatcher:
        found = self._grammars.get(constraint.digest)
        if found is None:
            limits = llguidance.LLParserLimits(**GRAMMAR_LIMITS)
            found = llguidance.LLMatcher(vocabulary, constraint.grammar, log_level=0, limits=limits)
            if found.is_error():
                raise ConstraintFailed(found.get_error())
            self._grammars[constraint.digest] = found
            while len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(constraint.digest)
        return found

    def _vocabulary(self, vocabulary: Vocabulary) -> llguidance.LLTokenizer:
        found = self._vocabularies.get(vocabulary.digest)
        if found is None:
            try:
                found = llguidance.LLTokenizer(
                    vocabulary.tokenizer, n_vocab=vocabulary.num_tokens, eos_token=list(vocabulary.end_token_ids)
                )
            except ValueError as error:
                raise ConstraintFailed(f"the tokenizer cannot be used: {error}") from error
            self._vocabularies[vocabulary.digest] = found
            while len(self._vocabularies) > MAX_VOCABULARIES:
                self._vocabularies.popitem(last=False)
        self._vocabularies.move_to_end(vocabulary.digest)
        return found
