"""Grammars over vocabularies: built once, copied for every row. Errors of llguidance become ConstraintFailed.

Following tokens and computing masks can take long, and both release Python's lock meanwhile. llguidance is imported
where a grammar is used, so that checks of a GPU run where it is not installed.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from contract.sampling import GRAMMAR_LIMITS
from data_plane.constraints.priorities import new_threads
from data_plane.plan import Int32Array, RowConstraint, Vocabulary

if TYPE_CHECKING:
    import llguidance

logger = logging.getLogger(__name__)

_of_thread = threading.local()

MAX_VOCABULARIES = 8  # about 50 MB each for 128,000 tokens
MAX_GRAMMARS = 256


class ConstraintFailed(Exception):
    """The grammar cannot be followed any further; the message says why."""


class Matcher:
    """Where one completion is in its grammar. Used from one thread at a time."""

    def __init__(self, inner: llguidance.LLMatcher, spare: llguidance.LLMatcher, num_tokens: int) -> None:
        self._inner = inner
        self._spare = spare  # one that failed: it takes no token, in no time
        self._num_words = -(-num_tokens // 32)

    def follow(self, token_id: int) -> None:
        """Go on behind a token. Raises ConstraintFailed."""
        Matcher.follow_all([self], [token_id])
        self.check()

    def check(self) -> None:
        """Raise ConstraintFailed where a token could not be followed."""
        if self._inner.is_error():
            raise ConstraintFailed(self._inner.get_error())

    def write_mask(self, words: Int32Array) -> None:
        """Set the bits of the tokens that may come next in the first words. Raises ConstraintFailed."""
        self._inner.unsafe_compute_mask_ptr(words.ctypes.data, self._num_words * 4)
        self.check()

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as there is no choice."""
        tokens: list[int] = self._inner.compute_ff_tokens()
        return tokens

    @staticmethod
    def follow_all(matchers: Sequence[Matcher], token_ids: Sequence[int]) -> None:
        """Let each matcher go on behind a token. `check` says of each whether it could."""
        pairs = [(matcher._inner, token_id) for matcher, token_id in zip(matchers, token_ids, strict=True)]
        # llguidance releases Python's lock in this call only, and only for more than one matcher (1.9.1).
        spare = [(matchers[0]._spare, 0)] if len(pairs) == 1 else []
        _executor().consume_token_par([*pairs, *spare])


def following_threads() -> list[int]:
    """Ids of the threads that follow tokens for this one."""
    _executor()
    found: list[int] = _of_thread.ids
    return found


def _executor() -> llguidance.LLExecutor:
    """This thread's own: the tasks of one executor wait for one another."""
    import llguidance

    found: llguidance.LLExecutor | None = getattr(_of_thread, "executor", None)
    if found is None:
        with new_threads() as ids:
            found = _of_thread.executor = llguidance.LLExecutor(1)
        _of_thread.ids = ids
    return found


class Matchers:
    """The vocabularies and grammars that were used last. Used from one thread, but for `build`."""

    def __init__(self) -> None:
        self._vocabularies: OrderedDict[str, llguidance.LLTokenizer] = OrderedDict()
        self._grammars: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # of the grammars

    def read(self, vocabulary: Vocabulary) -> None:
        """Have a vocabulary ready. One that cannot be read fails the rows that name it."""
        try:
            self._vocabulary(vocabulary)
        except ConstraintFailed as error:
            logger.warning("vocabulary not read digest=%s: %s", vocabulary.digest[:12], error)

    def find(self, constraint: RowConstraint) -> Matcher | Callable[[], Matcher]:
        """A matcher for one row, at the beginning of its completion, or what builds it, for any thread.

        Both raise ConstraintFailed.
        """
        # Each row uses its vocabulary, also where its grammar is kept: what the control plane takes for the oldest
        # vocabulary is the oldest one here, so that one it does not send again is still here.
        vocabulary = self._vocabulary(constraint.vocabulary)
        with self._lock:
            found = self._grammars.get(constraint.digest)
            if found is not None:
                self._grammars.move_to_end(constraint.digest)
                return _copy(found, vocabulary, constraint)
        return lambda: self._build(constraint, vocabulary)

    def _build(self, constraint: RowConstraint, vocabulary: llguidance.LLTokenizer) -> Matcher:
        import llguidance

        limits = llguidance.LLParserLimits(**GRAMMAR_LIMITS)
        built = llguidance.LLMatcher(vocabulary, constraint.grammar, log_level=0, limits=limits)
        if built.is_error():
            raise ConstraintFailed(built.get_error())
        with self._lock:
            self._grammars[constraint.digest] = built
            while len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
            return _copy(built, vocabulary, constraint)

    def _vocabulary(self, vocabulary: Vocabulary) -> llguidance.LLTokenizer:
        try:
            import llguidance
        except ModuleNotFoundError as error:
            raise ConstraintFailed("the worker lacks the package llguidance: install it there") from error
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


def _copy(grammar: llguidance.LLMatcher, vocabulary: llguidance.LLTokenizer, constraint: RowConstraint) -> Matcher:
    import llguidance

    spare = llguidance.LLMatcher(vocabulary, "", log_level=0)
    return Matcher(grammar.deep_copy(), spare, constraint.vocabulary.num_tokens)
