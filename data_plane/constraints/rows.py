"""The constrained rows of an engine. Each has a mask for its next token, which threads compute between two samples.

As soon as a row's token is known, a thread follows it and computes the next mask. A step takes the masks that are ready
when it samples. A row whose mask is not ready sits out the step.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from data_plane.constraints.lanes import Lanes
from data_plane.constraints.masks import Masks
from data_plane.constraints.matchers import MAX_GRAMMARS, ConstraintFailed, Matcher, Matchers
from data_plane.constraints.patience import PATIENCE_S, Patience
from data_plane.errors import PlanRefused
from data_plane.plan import Int32Array, NewRow, RowConstraint, Vocabulary

logger = logging.getLogger(__name__)

# How long a step in which no row has a mask, and nothing else is computed, waits for the first one.
IDLE_PATIENCE_S = 0.05
# A grammar whose mask once took more CPU time is slow. Usual ones take 0.05 to 1 ms with 128,000 tokens. Not time on
# the clock: on a machine whose cores are all busy, a thread may wait for longer than that.
SLOW_S = 0.005
# So is one that once took longer, on the clock, to follow a token: a thread of llguidance's own does it. Usual ones
# take 0.01 ms.
SLOW_TO_FOLLOW_S = 0.02
# Tokens in a row that a slow grammar must be quick for to be quick again: a busy machine may have been the cause.
FORGIVEN_AFTER = 1000
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
    error: str = ""
    allows_only_banned: bool = False  # and the next token is before min_tokens
    started_s: float | None = None  # when the task that follows it began; None: none is under way
    is_ready: bool = field(default=False)  # what is above is of the next token


class ConstraintRows:
    """Used from the compute thread, but for the tasks that it gives to its lanes."""

    def __init__(self, vocab_size: int, *, lanes: Lanes | None = None) -> None:
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._lanes = lanes or Lanes()
        self._patience = Patience(self._lanes.now_s())
        self._matchers = Matchers()  # used by the lane that reads
        self._rows: dict[int, _Row] = {}
        self._queued: deque[_Row] = deque()  # quick ones that no thread has begun with
        # By digest of slow grammars, the latest last: quick tokens since the last slow one.
        self._slow: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, vocabulary: Vocabulary) -> None:
        """Read a vocabulary now: between two steps, so that no step waits for it."""
        self._lanes.read(lambda: self._matchers.read(vocabulary)).result()

    def add(self, new: NewRow) -> None:
        """Begin a row. Raises PlanRefused for a row whose tokens are chosen elsewhere."""
        constraint = new.constraint
        if constraint is None:
            return
        if new.is_host_fed or new.pooling is not None:
            raise PlanRefused(f"new row {new.row} has a constraint and does not sample")
        if constraint.vocabulary.num_tokens > self._vocab_size:
            raise PlanRefused(f"new row {new.row} has a constraint over {constraint.vocabulary.num_tokens} tokens")
        generated = new.token_ids[new.num_prompt_tokens :].tolist()
        row = _Row(
            number=new.row,
            constraint=constraint,
            min_tokens=new.sampling.min_tokens,
            banned=new.sampling.banned_token_ids,
            to_follow=generated,
            allowed=np.zeros(self._num_words, dtype=np.int32),
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
        self._slow.clear()

    def collect(self, rows: _Indices, *, is_alone: bool) -> Masks | None:
        """Masks of those of the rows that have a constraint; None where none has.

        Waits a little for masks that should be ready soon; those that are not are `waiting`. `is_alone`: nothing but
        these rows is in the step, so that nobody is held up if the step waits longer for the first of them.
        """
        if not self._rows:
            return None
        chosen = [(index, self._rows[row]) for index, row in enumerate(rows.tolist()) if row in self._rows]
        if not chosen:
            return None
        self._await([row for _, row in chosen], is_alone=is_alone and len(chosen) == len(rows))
        # Looked at once: a mask may get ready meanwhile.
        waiting = [index for index, row in chosen if not row.is_ready]
        missing = set(waiting)
        ready = [(index, row) for index, row in chosen if index not in missing]
        masks = Masks(
            np.array([index for index, _ in ready], dtype=np.int64),
            np.zeros((len(ready), self._num_words * 4), dtype=np.uint8),
            waiting=waiting,
        )
        if waiting:
            masks.indices[:] -= np.searchsorted(np.array(waiting), masks.indices)
        for place, (_, row) in enumerate(ready):
            if row.error:
                logger.warning("constraint failed row=%d: %s", row.number, row.error[:500])
                masks.failed.append(int(masks.indices[place]))
                continue
            np.invert(row.allowed, out=masks.forbidden[place].view(np.int32))
            if row.allows_only_banned:
                masks.lifted.append(row.number)
        return masks

    def finish(self, rows: _Indices) -> None:
        """Wait until the masks of these rows are ready, however long that takes."""
        chosen = [self._rows[row] for row in rows.tolist() if row in self._rows]
        while chosen and not self._lanes.wait(lambda: _all_ready(chosen), IDLE_PATIENCE_S):
            self._start_quick(1)

    def has_any(self, rows: _Indices) -> bool:
        """Whether one of these rows has a constraint."""
        return any(row in self._rows for row in rows.tolist())

    def has_slow(self, rows: _Indices) -> bool:
        """Whether one of these rows has a grammar that was slow before."""
        return any(row in self._rows and self._rows[row].constraint.digest in self._slow for row in rows.tolist())

    def forced(self, rows: _Indices) -> dict[int, list[int]]:
        """By row, the tokens that its grammar forces next, where it forces any. Waits for the rows' masks."""
        self.finish(rows)
        found = {}
        for number in rows.tolist():
            row = self._rows.get(number)
            if row is not None and row.matcher is not None and not row.error:
                found[number] = row.matcher.forced()
        return {number: tokens for number, tokens in found.items() if tokens}

    def advance(self, masks: Masks, rows: _Indices, token_ids: Int32Array) -> None:
        """Follow the tokens that were sampled, on other threads. `rows` are those that sampled."""
        for index in masks.indices.tolist():
            row = self._rows[int(rows[index])]
            if row.error:
                continue  # it ends
            row.to_follow = [int(token_ids[index])]
            row.position += 1
            row.allows_only_banned = False
            self._submit(row)
        self._start_quick(self._lanes.num_threads)

    # ---- on the compute thread ----

    def _await(self, rows: Sequence[_Row], *, is_alone: bool) -> None:
        quick = [row for row in rows if not row.is_ready and row.constraint.digest not in self._slow]
        began_s = self._lanes.now_s()
        # Where every row of the step has a constraint, no other row is held up.
        patience_s = PATIENCE_S if is_alone else self._patience.left_s(began_s)
        if quick and patience_s > 0 and not self._lanes.wait(lambda: _all_ready(quick), patience_s / 2):
            # Rows behind one that turns out to be slow: another thread goes on with them.
            self._start_quick(sum(self._is_stuck(row) for row in quick))
            self._lanes.wait(lambda: _all_ready(quick), patience_s / 2)
        if is_alone:
            self._lanes.wait(lambda: any(row.is_ready for row in rows), IDLE_PATIENCE_S)
        elif quick:
            self._patience.spend(self._lanes.now_s() - began_s)

    def _is_stuck(self, row: _Row) -> bool:
        started_s = row.started_s
        return started_s is not None and self._lanes.now_s() - started_s > SLOW_S

    def _start_quick(self, num_threads: int) -> None:
        for _ in range(min(num_threads, len(self._queued))):
            self._lanes.run_quick(self._follow_queued)

    # ---- on other threads ----

    def _make(self, row: _Row) -> None:
        """Make a row's matcher, and let another thread go on with it."""
        try:
            row.matcher = self._matchers.make(row.constraint)
        except ConstraintFailed as error:
            row.error = str(error)
        except Exception as error:  # the thread's edge: the row must not wait for ever
            logger.exception("grammar not read row=%d", row.number)
            row.error = f"{type(error).__name__}: {error}"
        self._submit(row)
        self._start_quick(1)

    def _submit(self, row: _Row) -> None:
        row.is_ready = False
        if row.constraint.digest in self._slow:
            self._lanes.run_slow(lambda: self._follow(row))
        else:
            self._queued.append(row)

    def _follow_queued(self) -> None:
        while True:
            try:
                row = self._queued.popleft()
            except IndexError:  # another thread took the last one
                return
            self._follow(row)

    def _follow(self, row: _Row) -> None:
        """Follow the row's tokens and compute its next mask."""
        followed_s, mask_s = 0.0, 0.0
        row.started_s = self._lanes.now_s()
        try:
            if row.matcher is not None and self._rows.get(row.number) is row:
                for token_id in row.to_follow:
                    began_s = self._lanes.now_s()
                    row.matcher.follow(token_id)
                    followed_s = max(followed_s, self._lanes.now_s() - began_s)
                began_s = self._lanes.cpu_s()
                row.matcher.write_mask(row.allowed)
                mask_s = self._lanes.cpu_s() - began_s
                if row.banned is not None and row.position < row.min_tokens:
                    row.allows_only_banned = _has_only(row.allowed, row.banned)
        except ConstraintFailed as error:
            row.error = str(error)
        except Exception as error:  # the thread's edge: the row must not wait for ever
            logger.exception("constraint not followed row=%d", row.number)
            row.error = f"{type(error).__name__}: {error}"
        if mask_s > SLOW_S or followed_s > SLOW_TO_FOLLOW_S:
            self._slow[row.constraint.digest] = 0
            while len(self._slow) > MAX_GRAMMARS:
                self._slow.popitem(last=False)
        elif (num_quick := self._slow.get(row.constraint.digest)) is not None:
            self._slow[row.constraint.digest] = num_quick + 1
            if num_quick >= FORGIVEN_AFTER:
                self._slow.pop(row.constraint.digest, None)
        row.started_s, row.is_ready = None, True
        self._lanes.notify()


def _all_ready(rows: Sequence[_Row]) -> bool:
    return all(row.is_ready for row in rows)


def _has_only(allowed: Int32Array, banned: Int32Array) -> bool:
    """Whether every token that is allowed is one of `banned`."""
    left = np.unpackbits(allowed.view(np.uint8), bitorder="little")
    left[banned] = 0
    return not left.any()
