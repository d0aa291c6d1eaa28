"""Grammars over vocabularies: built once, copied for every row. Errors of llguidance become ConstraintFailed.

Following tokens and computing masks can take long, and both release Python's lock meanwhile. llguidance is imported
where a grammar is used, so that checks of a GPU run where it is not installed.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

from contract.sampling import GRAMMAR_LIMITS, MAX_GRAMMARS, MAX_VOCABULARIES
from data_plane.constraints.priorities import new_threads
from data_plane.plan import Int32Array, RowConstraint, Vocabulary

if TYPE_CHECKING:
    import llguidance

logger = logging.getLogger(__name__)

_of_thread = threading.local()

# Rows at once that began their grammar again with a lexer of their own. Such a lexer took 18 MB in a schema of long
# texts; without a bound, each of the rows of a worker could have one.
MAX_OWN_LEXERS = 16


class ConstraintFailed(Exception):
    """The grammar cannot be followed any further; the message says why."""


class LexersTaken(Exception):
    """As many rows as may have a lexer of their own: this one can begin again when one of them has ended."""


@dataclass(slots=True, eq=False)
class _Grammar:
    """One that is built. Its copies share its lexer, and what breaks the lexer stops all of them."""

    inner: llguidance.LLMatcher  # at the beginning, follows nothing itself
    num_rows: int = 0  # that were given a copy

    def is_broken(self) -> bool:
        """Whether the lexer is over a limit for good: then a text cannot even begin."""
        probe = self.inner.deep_copy()
        probe.compute_bitmask()
        return bool(probe.is_error())


class Matcher:
    """Where one completion is in its grammar. Used from one thread at a time.

    It fails by a limit of the lexer only where this completion needs that much by itself: if the lexer that it shares
    with other rows breaks, `check` allows it to start again with one of its own.
    """

    def __init__(
        self,
        inner: llguidance.LLMatcher,
        spare: llguidance.LLMatcher,
        num_tokens: int,
        may_renew: Callable[[], bool],
        renew: Callable[[Matcher], llguidance.LLMatcher],
    ) -> None:
        """`renew`: makes a matcher for this one, at the beginning, with a lexer of its own. `may_renew`: that helps."""
        self._inner = inner
        self._spare = spare  # one that failed: it takes no token, in no time
        self._num_words = -(-num_tokens // 32)
        self._may_renew = may_renew
        self._renew: Callable[[Matcher], llguidance.LLMatcher] | None = renew  # None: it has its own
        self._followed: list[int] = []  # tokens; forgotten with `renew`

    @property
    def has_failed(self) -> bool:
        """Whether a token could not be followed, or a mask not be computed."""
        return bool(self._inner.is_error())

    def check(self) -> None:
        """Raise ConstraintFailed where it has failed for good: starting again would not help."""
        if self.has_failed and (self._renew is None or not self._may_renew()):
            raise ConstraintFailed(self._inner.get_error())

    def start_again(self) -> list[int]:
        """Go to the beginning, with a lexer of its own, after it failed. Returns the tokens to follow once more.

        Raises LexersTaken and changes nothing where too many have one.
        """
        assert self._renew is not None, "it has started again"
        self._inner = self._renew(self)
        self._renew = None
        followed, self._followed = self._followed, []
        return followed

    def write_mask(self, words: Int32Array) -> None:
        """Set the bits of the tokens that may come next in the first words. `has_failed` says whether it could."""
        self._inner.unsafe_compute_mask_ptr(words.ctypes.data, self._num_words * 4)

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as there is no choice."""
        tokens: list[int] = self._inner.compute_ff_tokens()
        return tokens

    @staticmethod
    def follow_all(matchers: Sequence[Matcher], token_ids: Sequence[int]) -> None:
        """Let each matcher go on behind a token. `has_failed` says of each whether it could."""
        for matcher, token_id in zip(matchers, token_ids, strict=True):
            if matcher._renew is not None:
                matcher._followed.append(token_id)
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
        self._grammars: OrderedDict[str, _Grammar] = OrderedDict()
        self._own: WeakSet[Matcher] = WeakSet()  # those with a lexer of their own
        self._lock = threading.Lock()  # of the grammars and `_own`

    def num_free_lexers(self) -> int:
        """How many matchers may start again now. Any thread may ask."""
        return MAX_OWN_LEXERS - len(self._own)

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
                return self._copy(found, vocabulary, constraint)
        return lambda: self._build(constraint, vocabulary)

    def _build(self, constraint: RowConstraint, vocabulary: llguidance.LLTokenizer) -> Matcher:
        built = _Grammar(_new(constraint, vocabulary))
        with self._lock:
            self._grammars[constraint.digest] = built
            while len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
            return self._copy(built, vocabulary, constraint)

    def _copy(self, grammar: _Grammar, vocabulary: llguidance.LLTokenizer, constraint: RowConstraint) -> Matcher:
        import llguidance

        grammar.num_rows += 1
        spare = llguidance.LLMatcher(vocabulary, "", log_level=0)
        return Matcher(
            grammar.inner.deep_copy(),
            spare,
            constraint.vocabulary.num_tokens,
            lambda: self._may_renew(grammar, constraint),
            lambda matcher: self._renew(matcher, grammar, vocabulary, constraint),
        )

    def _may_renew(self, grammar: _Grammar, constraint: RowConstraint) -> bool:
        """For a row that failed: whether the lexer did, by what other rows took of it, too."""
        if not grammar.is_broken():
            return False
        with self._lock:
            # The next row builds it anew.
            if self._grammars.get(constraint.digest) is grammar:
                del self._grammars[constraint.digest]
            return grammar.num_rows > 1

    def _renew(
        self, matcher: Matcher, grammar: _Grammar, vocabulary: llguidance.LLTokenizer, constraint: RowConstraint
    ) -> llguidance.LLMatcher:
        with self._lock:
            if len(self._own) >= MAX_OWN_LEXERS:
                raise LexersTaken(f"{MAX_OWN_LEXERS} rows have a lexer of their own")
            self._own.add(matcher)
        logger.info("grammar built anew for a row digest=%s rows=%d", constraint.digest[:12], grammar.num_rows)
        return _new(constraint, vocabulary)

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


def _new(constraint: RowConstraint, vocabulary: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    import llguidance

    limits = llguidance.LLParserLimits(**GRAMMAR_LIMITS)
    built = llguidance.LLMatcher(vocabulary, constraint.grammar, log_level=0, limits=limits)
    if built.is_error():
        raise ConstraintFailed(built.get_error())
    return built
