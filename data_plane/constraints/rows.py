"""The constrained rows of an engine. Each has a mask for its next token, which threads compute between two samples.

As soon as a row's token is known, a thread follows it and computes the next mask. A step takes the masks that are ready
when it samples. A row whose mask is not ready sits out the step.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from contract.sampling import MAX_GRAMMARS
from data_plane.constraints.lanes import SLOW_S, Lanes
from data_plane.constraints.masks import Masks
from data_plane.constraints.matchers import (
    ConstraintFailed,
    LexersTaken,
    Matcher,
    Matchers,
    following_threads,
)
from data_plane.constraints.patience import PATIENCE_S, PATIENCE_SHARE, Allowance
from data_plane.errors import PlanRefused
from data_plane.plan import Int32Array, NewRow, RowConstraint, Vocabulary

logger = logging.getLogger(__name__)

# How long a step in which no row has a mask, and nothing else is computed, waits for the first one.
IDLE_PATIENCE_S = 0.05
# Tasks that must be quick one after the other until a slow grammar counts as quick again. A token is one or two tasks.
FORGIVEN_AFTER = 2000
# Rows whose tokens are followed in one call. What the call takes is held against their grammar as if it were one row's.
MAX_TOGETHER = 32
# Grammars that were quick so far, those used last: more than the worker keeps, since to find out again takes time.
MAX_QUICK = 4 * MAX_GRAMMARS
# Tokens of one row that a task follows: then others have their turn. A row that starts again may have thousands, which
# take 20 us each.
FOLLOWED_AT_ONCE = 200
_Indices = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Row:
    """Written by the compute thread while the row is ready, else by the task that follows it."""

    number: int
    constraint: RowConstraint
    min_tokens: int
    banned: Int32Array | None  # before min_tokens
    to_follow: list[int]  # tokens that the matcher has not followed
    allowed: Int32Array  # [words] bit 1: the token may come next
    position: int  # of the next token, in the completion
    matcher: Matcher | None = None  # None: not made yet, or it failed
    build: Callable[[], Matcher] | None = None  # what makes it, where the grammar is new to the worker
    error: str = ""  # one line
    allows_only_banned: bool = False  # and the next token is before min_tokens
    starts_again: bool = False  # the matcher failed by the lexer that it shares, and has not caught up since
    is_ready: bool = field(default=False)  # what is above is of the next token


class ConstraintRows:
    """Used from the compute thread, but for the tasks that it gives to its lanes."""

    def __init__(self, vocab_size: int, *, lanes: Lanes | None = None) -> None:
        self._vocab_size = vocab_size
        self._lanes = lanes or Lanes()
        self._patience = Allowance(PATIENCE_S, PATIENCE_SHARE, self._lanes.now_s())
        self._matchers = Matchers()  # used by the thread that reads
        self._rows: dict[int, _Row] = {}
        # By digest of grammars that are being built, the further rows that have them.
        self._built: dict[str, list[_Row]] = {}
        # By digest of slow grammars, the latest last: quick tokens since the last slow one.
        self._slow: OrderedDict[str, int] = OrderedDict()
        self._quick: OrderedDict[str, None] = OrderedDict()  # digests of those that were quick so far
        self._learning = threading.Lock()  # of the three above
        self._parked: deque[_Row] = deque()  # they wait for a lexer of their own; lanes add, the compute thread takes

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, vocabulary: Vocabulary) -> None:
        """Read a vocabulary now: between two steps, so that no step waits for it."""
        self._lanes.read(lambda: self._matchers.read(vocabulary)).result()

    def add(self, new: NewRow, vocab_size: int | None = None) -> None:
        """Begin a row. `vocab_size` is that of the row's adapter; None: the base model's. Raises PlanRefused for a row
        whose tokens are chosen elsewhere, and for a constraint over more tokens than the row has."""
        constraint = new.constraint
        if constraint is None:
            return
        if new.is_host_fed or new.pooling is not None:
            raise PlanRefused(f"new row {new.row} has a constraint and does not sample")
        num_tokens, most = constraint.vocabulary.num_tokens, vocab_size or self._vocab_size
        if num_tokens > most:
            raise PlanRefused(f"new row {new.row} has a constraint over {num_tokens} tokens, its vocabulary has {most}")
        generated = new.token_ids[new.num_prompt_tokens :].tolist()
        row = _Row(
            number=new.row,
            constraint=constraint,
            min_tokens=new.sampling.min_tokens,
            banned=new.sampling.banned_token_ids,
            to_follow=generated,
            allowed=np.zeros(-(-most // 32), dtype=np.int32),
            position=len(generated),
        )
        self._rows[new.row] = row
        self._lanes.read(lambda: self._make(row))

    def free(self, rows: Int32Array) -> None:
        """End rows. What is computed for them comes to nothing."""
        if self._rows:
            for row in rows.tolist():
                self._rows.pop(row, None)

    def clear(self) -> None:
        """End every row."""
        self._rows.clear()
        self._parked.clear()
        with self._learning:
            self._slow.clear()
            self._quick.clear()

    def collect(self, rows: _Indices, *, is_alone: bool, is_verifying: bool = False) -> Masks | None:
        """Masks of those of the rows that have a constraint; None where none has.

        Waits a little for masks that should be ready soon; those that are not are `waiting`. `is_alone`: nothing but
        these rows is in the step, so that nobody is held up if the step waits longer for the first of them.
        `is_verifying`: the rows have drafts, as far as `may_draft` allowed them.
        """
        if self._parked:
            self._resume()
        if not self._rows:
            return None
        chosen = [(index, self._rows[row]) for index, row in enumerate(rows.tolist()) if row in self._rows]
        if not chosen:
            return None
        if is_verifying:
            self._await_drafting([row for _, row in chosen])
        else:
            self._await([row for _, row in chosen], is_alone=is_alone and len(chosen) == len(rows))
        # Looked at once: a mask may get ready meanwhile.
        waiting = [index for index, row in chosen if not row.is_ready]
        missing = set(waiting)
        ready = [(index, row) for index, row in chosen if index not in missing]
        own = [row.allowed.nbytes for _, row in ready]
        masks = Masks(
            np.array([index for index, _ in ready], dtype=np.int64),
            np.zeros((len(ready), max(own, default=-(-self._vocab_size // 8))), dtype=np.uint8),
            waiting=waiting,
        )
        if waiting:
            masks.indices[:] -= np.searchsorted(np.array(waiting), masks.indices)
        for place, (_, row) in enumerate(ready):
            if row.error:
                logger.warning("constraint failed row=%d: %s", row.number, row.error)
                masks.failed.append(int(masks.indices[place]))
                continue
            np.invert(row.allowed, out=masks.forbidden[place, : row.allowed.nbytes].view(np.int32))
            if row.allows_only_banned:
                masks.lifted.append(row.number)
        return masks

    def has_any(self, rows: _Indices) -> bool:
        """Whether one of these rows has a constraint."""
        return any(row in self._rows for row in rows.tolist())

    def has_each(self, rows: _Indices) -> npt.NDArray[np.bool_]:
        """bool [n]: which of these rows have a constraint."""
        return np.array([row in self._rows for row in rows.tolist()], dtype=np.bool_)

    def may_draft(self, rows: _Indices) -> bool:
        """Whether a pass may verify drafts of these rows: their grammars were quick so far, and their masks are ready.

        Waits a little for the masks. Such a pass needs a mask between two of its samples, so that a grammar of which
        nothing is known, or that is being built, would hold up every row of the pass.
        """
        chosen = [self._rows[row] for row in rows.tolist() if row in self._rows]
        if any(row.constraint.digest not in self._quick for row in chosen):
            return False
        return not chosen or self._await_drafting(chosen)

    def forced(self, rows: _Indices) -> dict[int, list[int]]:
        """By row, the tokens that its grammar forces next, where it forces any. Of rows that may draft."""
        found = {}
        for number in rows.tolist():
            row = self._rows.get(number)
            if row is not None and row.is_ready and row.matcher is not None and not row.error:
                found[number] = row.matcher.forced()
        return {number: tokens for number, tokens in found.items() if tokens}

    def advance(self, masks: Masks, rows: _Indices, token_ids: Int32Array) -> None:
        """Follow the tokens that were sampled, on other threads. `rows` are those that sampled."""
        of_grammar: dict[str, list[_Row]] = {}
        for index in masks.indices.tolist():
            row = self._rows[int(rows[index])]
            if row.error:
                continue  # it ends
            row.to_follow = [int(token_ids[index])]
            row.position += 1
            row.allows_only_banned = False
            row.is_ready = False
            of_grammar.setdefault(row.constraint.digest, []).append(row)
        for same in of_grammar.values():
            size = min(-(-len(same) // self._lanes.num_threads), MAX_TOGETHER)
            for begin in range(0, len(same), size):
                self._submit(same[begin : begin + size])

    # ---- on the compute thread ----

    def _resume(self) -> None:
        """Let rows that wait for a lexer go on, as far as lexers came free. Forget those that ended."""
        num_free = self._matchers.num_free_lexers()
        for _ in range(len(self._parked)):
            row = self._parked.popleft()
            if not self._is_live(row):
                continue
            if num_free > 0:
                num_free -= 1
                self._submit([row])
            else:
                self._parked.append(row)

    def _ready_soon(self, rows: Sequence[_Row]) -> list[_Row]:
        """Of rows whose masks are not ready, those that a step may wait for."""
        quick = [row for row in rows if not row.is_ready and row.constraint.digest in self._quick]
        return [row for row in quick if not row.starts_again]

    def _await(self, rows: Sequence[_Row], *, is_alone: bool) -> None:
        quick = self._ready_soon(rows)
        began_s = self._lanes.now_s()
        # Where every row of the step has a constraint, no other row is held up.
        patience_s = PATIENCE_S if is_alone else self._patience.left_s(began_s)
        if quick and patience_s > 0:
            self._lanes.wait(lambda: _all_ready(quick), patience_s)
        if is_alone:
            self._lanes.wait(lambda: any(row.is_ready for row in rows), IDLE_PATIENCE_S)
        elif quick:
            self._patience.spend(self._lanes.now_s() - began_s)

    def _await_drafting(self, rows: Sequence[_Row]) -> bool:
        """Wait for masks of rows with drafts, and learn whether all are ready.

        Only a wait that was in vain is spent: the others take what a mask takes, which is what the draft costs.
        """
        quick = self._ready_soon(rows)
        began_s = self._lanes.now_s()
        if quick and self._patience.left_s(began_s) > 0 and not self._lanes.wait(lambda: _all_ready(quick), PATIENCE_S):
            self._patience.spend(self._lanes.now_s() - began_s)
        return _all_ready(rows)

    # ---- on other threads ----

    def _make(self, row: _Row) -> None:
        """Find a row's matcher, or who builds it, and let another thread go on with it."""
        digest = row.constraint.digest
        with _failing(row, "grammar not read"):
            found = self._matchers.find(row.constraint)
            if isinstance(found, Matcher):
                row.matcher = found
            else:
                with self._learning:
                    if digest in self._built:
                        self._built[digest].append(row)
                        return
                    self._built[digest] = []
                row.build = found
        self._submit([row])

    def _submit(self, rows: Sequence[_Row]) -> None:
        """Let another thread follow rows of one grammar."""
        digest = rows[0].constraint.digest
        if digest in self._slow or rows[0].starts_again:
            self._lanes.run_slow(lambda: self._follow(rows))
        elif digest in self._quick:
            self._lanes.run_quick(lambda: self._follow(rows))
        else:
            self._lanes.run_new(lambda: self._follow(rows))

    def _follow(self, rows: Sequence[_Row]) -> None:
        """Follow the tokens of rows of one grammar and compute their next masks."""
        for place, row in enumerate(rows):
            if place and self._lanes.has_low_priority():
                self._submit(rows[place:])
                break
            goes_on = False
            with _failing(row, "constraint not followed"):
                if row.build is not None:
                    self._build(row)
                if place == 0 and len(rows) > 1:
                    self._timed(row, lambda: _follow_all([each for each in rows if self._is_live(each)]))
                if row.matcher is not None and self._is_live(row):
                    goes_on = not self._go_on(row, row.matcher)
            if not goes_on:
                row.is_ready = True
        self._lanes.notify()

    def _build(self, row: _Row) -> None:
        """Build the row's grammar. Rows that came with the same one meanwhile are looked at again."""
        build, row.build = row.build, None
        assert build is not None
        try:
            if self._is_live(row):
                self._lanes.begin(following_threads())
                row.matcher = build()
        finally:
            with self._learning:
                others = self._built.pop(row.constraint.digest)
            for other in others:
                self._lanes.read(functools.partial(self._make, other))

    def _go_on(self, row: _Row, matcher: Matcher) -> bool:
        """Follow the row's tokens and compute its mask. False: another task goes on, now or when there is a lexer."""
        if row.starts_again and matcher.has_failed:
            try:
                self._timed(row, lambda: _start_again(row, matcher))
            except LexersTaken as error:
                logger.info("row waits for a lexer row=%d: %s", row.number, error)
                self._parked.append(row)
                return False
        piece, row.to_follow = row.to_follow[:FOLLOWED_AT_ONCE], row.to_follow[FOLLOWED_AT_ONCE:]
        while piece and not matcher.has_failed:
            self._timed(row, functools.partial(Matcher.follow_all, [matcher], [piece.pop(0)]))
        row.to_follow[:0] = piece
        if not matcher.has_failed and not row.to_follow:
            self._timed(row, functools.partial(matcher.write_mask, row.allowed))
        if matcher.has_failed:
            matcher.check()
            row.starts_again = True
            with self._learning:
                self._count_slow(row.constraint.digest)
        if matcher.has_failed or row.to_follow:
            self._submit([row])
            return False
        row.starts_again = False
        if row.banned is not None and row.position < row.min_tokens:
            row.allows_only_banned = _has_only(row.allowed, row.banned)
        return True

    def _timed(self, row: _Row, part: Callable[[], None]) -> None:
        """Do a part of what a token takes, and learn from the CPU time."""
        self._lanes.begin(following_threads())
        try:
            part()
        finally:
            self._learn(row.constraint.digest, self._lanes.cpu_s())

    def _count_slow(self, digest: str) -> None:
        """Called under `_learning`."""
        self._quick.pop(digest, None)
        self._slow[digest] = 0
        while len(self._slow) > MAX_GRAMMARS:
            self._slow.popitem(last=False)

    def _is_live(self, row: _Row) -> bool:
        return self._rows.get(row.number) is row

    def _learn(self, digest: str, taken_s: float) -> None:
        """Count a part of a token's work that took so much CPU time."""
        with self._learning:
            if taken_s > SLOW_S:
                self._count_slow(digest)
                return
            num_quick = self._slow.get(digest)
            if num_quick is not None and num_quick < FORGIVEN_AFTER:
                self._slow[digest] = num_quick + 1
                return
            self._slow.pop(digest, None)
            self._quick[digest] = None
            self._quick.move_to_end(digest)
            while len(self._quick) > MAX_QUICK:
                self._quick.popitem(last=False)


def _start_again(row: _Row, matcher: Matcher) -> None:
    """Begin the row's grammar again: its tokens are to be followed once more. Raises LexersTaken."""
    row.to_follow = matcher.start_again() + row.to_follow


def _follow_all(rows: Sequence[_Row]) -> None:
    """Follow the one token of each row in one call. Another task may have done it, and left the masks to this one."""
    pairs = [(row.matcher, row.to_follow[0]) for row in rows if row.matcher is not None and row.to_follow]
    if pairs:
        Matcher.follow_all([matcher for matcher, _ in pairs], [token_id for _, token_id in pairs])
    for row in rows:
        row.to_follow = []


@contextmanager
def _failing(row: _Row, event: str) -> Iterator[None]:
    """The edge of a thread: an error of the block becomes that of the row, which must not wait for ever."""
    try:
        yield
        return
    except ConstraintFailed as error:
        reason = str(error)
    except Exception as error:
        logger.exception("%s row=%d", event, row.number)
        reason = f"{type(error).__name__}: {error}"
    # The beginning of it: llguidance's reason has the whole grammar.
    row.error = " ".join(reason[:1000].split())[:500]


def _all_ready(rows: Sequence[_Row]) -> bool:
    return all(row.is_ready for row in rows)


def _has_only(allowed: Int32Array, banned: Int32Array) -> bool:
    """Whether every token that is allowed is one of `banned`."""
    left = np.unpackbits(allowed.view(np.uint8), bitorder="little")
    left[banned] = 0
    return not left.any()
