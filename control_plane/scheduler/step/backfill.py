"""Requests that lack rows or blocks: how long they hold up others, how others pass them, and when they are admitted.

A request takes all its rows and blocks at once. So a request with many completions or a long prompt may have to wait
for most of the worker. The rules, for all policies but FCFS, with M for the setting max_blocked_steps:

1. The next request holds up all others while it lacks room, for M steps at most. Nearly always enough rows and blocks
   come free in that time, and the order is kept.
2. Then the request is set aside and others pass it. Another request that lacks room is set aside at once. Requests that
   are set aside are tried in every step. For M of NUM_PARTS x M steps only they are tried, so that free room adds up
   for requests that need more than comes free in a step; not if rule 3's holders leave too little for all of them.
3. Room is reserved for one of them, chosen as in the queue: by its tenant's service. Holders are requests that have
   rows at that moment; they run to their end. Requests that are admitted later can be preempted. Once what the holders
   leave is enough, and no account that waits got less service, the reserved request is due: no other request takes
   rows for M steps, and then requests that are not holders are preempted, the latest arrivals first. A request is
   preempted in this manner once in its life, and counts as a holder later.

So a request waits at most M steps for a request that lacks room, and a request that lacks room waits no longer than the
requests run that ran before it. Rows that are kept free for a request while others wait are charged to its account as
if it decoded in them. Otherwise a request with many completions of one token could keep others from running for little.
"""

from __future__ import annotations

import itertools

from control_plane.scheduler.queues.waiting_queue import queue_key
from control_plane.scheduler.requests.sequence import Row, SequenceGroup
from control_plane.scheduler.requests.states import GroupState
from control_plane.scheduler.step.forks import num_fork_blocks
from control_plane.scheduler.step.worker_state import WorkerState
from control_plane.scheduler.types import RequestId

NUM_PARTS = 4  # of a cycle; the last is for requests set aside alone
MAX_TRIED = 8  # requests set aside that are looked at in one step, beside the reserved one
MAX_SET_ASIDE = 32  # requests that one step sets aside: looking at each takes a few microseconds


class Backfill:
    """State of one worker's planner about requests that lack room."""

    def __init__(self, worker: WorkerState, *, watermark: int, max_blocked_steps: int) -> None:
        """`watermark`: blocks that an admission leaves free while others run."""
        self._worker = worker
        self._max_blocked_steps = max_blocked_steps
        self._counters = worker.counters
        self._num_rows = worker.limits.max_rows
        self._num_blocks = worker.limits.num_blocks
        self._watermark = watermark
        self._blocking: SequenceGroup | None = None  # the last that held up others
        self._num_blocked_steps = 0  # in which a request did, since such a request was admitted
        self._num_passing_steps = 0  # with requests set aside
        self._num_set_aside = 0  # in this step
        self._next_tried = 0  # place among those set aside
        self.reserved: SequenceGroup | None = None  # set aside
        self.is_due = False  # what holders leave is enough for the reserved request
        self._num_due_steps = 0
        self._holders: set[RequestId] = set()
        self._has_hope = False  # what holders leave is enough for some request that is set aside

    def begin_step(self) -> list[SequenceGroup]:
        """Look at what changed. Returns the requests that are preempted for the reserved one in this step."""
        self._num_set_aside = 0
        aside = self._worker.queues.waiting.aside
        if not aside:
            self.reserved = None
            self.is_due = False
            self._num_passing_steps = self._num_due_steps = 0
            return []
        self._num_passing_steps += 1
        if self.reserved is None or self.reserved.request.request_id not in aside:
            self._reserve()
        self._update_due()
        if self.is_due and self.reserved is not None:
            self._charge_idle(self.reserved)
        return self._victims() if self._num_due_steps > self._max_blocked_steps else []

    @property
    def is_closed(self) -> bool:
        """Whether only requests that were set aside are admitted in this step."""
        part = self._num_passing_steps // self._max_blocked_steps % NUM_PARTS
        is_for_them = part == NUM_PARTS - 1 and self._has_hope
        return self.is_due or (is_for_them and len(self._worker.rows.held) > 0)

    def to_try(self) -> list[SequenceGroup]:
        """Requests set aside that may be admitted in this step if they have room: the reserved one, then some others.

        Only the reserved one while it is due.
        """
        if self.reserved is None:
            return []
        is_admissible = self._worker.slots.is_admissible
        first = [self.reserved] if is_admissible(self.reserved.digest) else []
        if self.is_due:
            return first
        others = [group for group in self._worker.queues.waiting.aside.values() if group is not self.reserved]
        if len(others) > MAX_TRIED:
            begin = self._next_tried % len(others)
            self._next_tried = begin + MAX_TRIED
            others = (others + others)[begin : begin + len(others)]
        return first + [group for group in others if is_admissible(group.digest)][:MAX_TRIED]

    def holds_up(self, group: SequenceGroup) -> bool:
        """Whether the next request, which lacks room, holds up others; else it is set aside here."""
        waiting = self._worker.queues.waiting
        if not waiting.aside:
            if self._num_set_aside == 0:
                self._num_blocked_steps += 1
            self._blocking = group
            if self._num_blocked_steps <= self._max_blocked_steps:
                self._charge_idle(group)
                return True
            self._num_blocked_steps = 0
        if self._num_set_aside == MAX_SET_ASIDE:
            return True
        self._num_set_aside += 1
        if not waiting.set_aside(group):
            return True
        if self.reserved is None:
            self._reserve()
        return False

    def note_start(self, group: SequenceGroup) -> None:
        """The request is admitted."""
        if group is self._blocking:
            self._blocking = None
            self._num_blocked_steps = 0

    def _reserve(self) -> None:
        """Choose the request that room is reserved for, of those whose adapter is ready if there are any."""
        is_admissible = self._worker.slots.is_admissible
        self.reserved = min(
            self._worker.queues.waiting.aside.values(),
            key=lambda group: (
                not is_admissible(group.digest),
                self._counters.counter(group.request.account),
                queue_key(group),
            ),
        )
        self._holders = {row.sequence.request_id for row in self._worker.rows.held}
        self.is_due = False
        self._num_due_steps = 0

    def _update_due(self) -> None:
        """See whether the reserved request is due. Blocks that holders share count for each of them."""
        assert self.reserved is not None, "a request is set aside and room is reserved for no request"
        kept = [row for row in self._worker.rows.held if self._is_holder(row)]
        num_left = self._num_blocks
        if kept:
            num_left -= self._watermark + sum(len(row.block_ids) for row in kept)

        def has_room(group: SequenceGroup) -> bool:
            num_rows, num_blocks = self._needs(group)
            return num_rows + len(kept) <= self._num_rows and num_blocks <= num_left

        may_be_due = has_room(self.reserved) and self._worker.slots.is_admissible(self.reserved.digest)
        self.is_due = may_be_due and (self.is_due or self._is_next(self.reserved))
        self._num_due_steps = self._num_due_steps + 1 if self.is_due else 0
        self._has_hope = any(map(has_room, itertools.islice(self._worker.queues.waiting.aside.values(), MAX_TRIED)))

    def _is_next(self, group: SequenceGroup) -> bool:
        """Whether no account that waits in the queue got less service."""
        first = self._worker.queues.waiting.peek()
        counter = self._counters.counter
        return first is None or counter(group.request.account) <= counter(first.request.account)

    def _charge_idle(self, group: SequenceGroup) -> None:
        """Charge a request's account for the room that is kept free for it in this step, as far as others wait for it.

        The scarcer of rows and blocks counts: if blocks are short, rows are always free.
        """
        waiting, worker = self._worker.queues.waiting, self._worker
        num_others = len(waiting) - max(1, len(waiting.aside))
        num_free = min(worker.rows.free.num_free, self._num_rows * worker.pool.num_available // self._num_blocks)
        self._counters.charge_idle(group.request.account, min(num_free, num_others))

    def _victims(self) -> list[SequenceGroup]:
        """Requests that make room for the request that is due; none while others leave already."""
        worker = self._worker
        if worker.rows.num_leaving > 0 or self.reserved is None:
            return []
        num_rows, num_blocks = self._needs(self.reserved)
        rows_short = num_rows - worker.rows.free.num_free
        blocks_short = num_blocks + self._watermark - worker.pool.num_available
        victims: list[SequenceGroup] = []
        for row in reversed(worker.rows.held):
            if rows_short <= 0 and blocks_short <= 0:
                break
            group = row.sequence.group
            if self._is_holder(row) or group.state is not GroupState.RUNNING:
                continue
            if not group.has_progressed and not group.is_paused:
                continue
            if group not in victims[-1:]:
                victims.append(group)
            rows_short -= 1
            blocks_short -= len(row.block_ids)
        for group in victims:
            group.note_preempted_for_room()
        return victims

    def _is_holder(self, row: Row) -> bool:
        """Whether the reserved request waits for the end of the row's request. It waits for no paused request."""
        group = row.sequence.group
        return (row.sequence.request_id in self._holders or group.was_preempted_for_room) and not group.is_paused

    def _needs(self, group: SequenceGroup) -> tuple[int, int]:
        """Rows and blocks that the request takes when it is admitted, those in the prefix cache included."""
        members, size = group.live_members(), self._worker.limits.block_size
        return len(members), -(-members[0].num_known // size) + num_fork_blocks(members, size)
