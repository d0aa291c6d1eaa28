"""What the next step computes, by the policy in force.

settings.py says what each policy takes, and in which order. The planner takes rows, blocks and slots, and preempts
requests when something is short.
"""

from __future__ import annotations

from control_plane.scheduler.memory.block_fit import BlockFit, fit_blocks
from control_plane.scheduler.requests.sequence import Row, SequenceGroup, plan_next_tokens
from control_plane.scheduler.requests.states import SequenceState
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.step.backfill import Backfill
from control_plane.scheduler.step.decode_batch import DecodeBatch
from control_plane.scheduler.step.forks import begin_fork, may_begin, num_fork_blocks, reserve_forks
from control_plane.scheduler.step.plan_draft import PlanDraft
from control_plane.scheduler.step.preemption import choose_paused, choose_victim
from control_plane.scheduler.step.worker_state import WorkerState

# At most this many requests of the same tenant may overtake a request whose adapter is not in the running batch, if
# their own adapters are.
MAX_TIMES_OVERTAKEN = 16


class Planner:
    """Fills step plans for one worker."""

    def __init__(self, worker: WorkerState, settings: SchedulerSettings) -> None:
        limits = worker.limits
        self._block_size = limits.block_size
        self._worker = worker
        self._settings = settings
        self._counters = worker.counters
        self._long_tokens = settings.long_tokens(limits)
        self._watermark = max(1, round(limits.num_blocks * settings.watermark))
        self._backfill = Backfill(worker, watermark=self._watermark, max_blocked_steps=settings.max_blocked_steps)
        self._owes_decodes = False  # for prompts before decodes: the last step had prompts for vectors alone
        self.prefix_query_tokens = 0  # looked up at first admissions, in all
        self.prefix_hit_tokens = 0  # of those found in the prefix cache

    def fill(self, draft: PlanDraft, now_s: float) -> None:
        """Schedule what may run, within the draft's budget."""
        for victim in self._backfill.begin_step():
            self._preempt(victim, draft)
        if self._settings.policy is Policy.CHUNKED_PREFILL:
            self._fill_chunked(draft, now_s)
        else:
            self._fill_prefill_first(draft, now_s)
        if draft.prefills:
            self._worker.rows.regroup()  # some of them may decode from here on

    # ---- policies ----

    def _fill_chunked(self, draft: PlanDraft, now_s: float) -> None:
        """Decodes, short unfinished prefills (those about to finish first), swapped, waiting requests, long prefills.

        Only a request that is due (backfill.py) goes before swapped ones. Half of the budget after the short prefills
        is kept for the long ones; they also take what the requests before them leave.
        """
        batch, prefilling = self._worker.rows.grouped()
        is_starved = self._plan_decodes(draft, batch)
        prefills = sorted(filter(_may_prefill, prefilling), key=_num_left)
        long_ones = [row for row in prefills if _num_left(row) > self._long_tokens]
        for row in prefills[: len(prefills) - len(long_ones)]:
            if draft.budget == 0:
                return
            self._prefill(row, draft)
        if not is_starved:
            num_kept = min(sum(map(_num_left, long_ones)), -(-draft.budget // 2))
            draft.budget -= num_kept
            if self._backfill.is_due or self._swap_in(draft):
                self._admit(draft, now_s, num_long=len(long_ones))
            draft.budget += num_kept
        for row in long_ones:
            if draft.budget > 0:
                self._prefill(row, draft)

    def _fill_prefill_first(self, draft: PlanDraft, now_s: float) -> None:
        """Whole prompts as long as some are admitted, else decodes, then swapped requests.

        While a request could return from host memory, none is admitted.
        Only a prompt larger than the whole budget is computed in chunks, alone, one step after the other. Prompts
        usually stop because their requests keep their rows. Prompts for vectors give their rows back and could keep
        decodes out for ever, so decodes follow a step that had no other prompts.
        """
        batch, prefilling = self._worker.rows.grouped()
        if self._owes_decodes:
            self._owes_decodes = False
            self._plan_decodes(draft, batch)
            if draft.decodes:
                return
        for row in list(filter(_may_prefill, prefilling)):  # looked up before any source is planned
            if draft.budget > 0:
                self._prefill(row, draft)
        if self._backfill.is_due or self._worker.queues.swapped.peek() is None:
            self._admit(draft, now_s)
        if not draft.prefills and not self._plan_decodes(draft, batch) and not self._backfill.is_due:
            self._swap_in(draft)
        elif draft.prefills:
            self._owes_decodes = all(row.sequence.request.pooling is not None for row, *_ in draft.prefills)

    # ---- requests that run ----

    def _plan_decodes(self, draft: PlanDraft, batch: DecodeBatch) -> bool:
        """Plan one token of every row of the batch, in order of arrival. Returns whether one lacked a block or budget.

        A row that lacks a block is left out, and so is a row that was preempted for a row before it.
        """
        is_starved = len(batch) > draft.budget
        rows = batch.rows[: draft.budget] if is_starved else batch.rows
        left_out = plan_next_tokens(rows, lambda row: self._may_decode(row, draft))
        if left_out or is_starved:
            planned = [row for row in rows if row not in left_out]
            # Rows beyond the budget take the places of rows left out: as they end, they free the blocks that are short.
            for row in batch.rows[len(rows) :]:
                if len(planned) == draft.budget:
                    break
                if not (late := plan_next_tokens([row], lambda row: self._may_decode(row, draft))):
                    planned.append(row)
                left_out |= late
            batch = DecodeBatch(planned)
            is_starved |= any(row.state is SequenceState.RUNNING for row in left_out)
        draft.decodes = batch
        draft.budget -= len(batch)
        return is_starved

    def _may_decode(self, row: Row, draft: PlanDraft) -> bool:
        """Give a row of the batch a block for its next token if its table is full; False if it cannot decode."""
        if row.state is not SequenceState.RUNNING:
            return False  # preempted for a row before it
        if row.num_planned == len(row.block_ids) * self._block_size:
            block_id = self._block_for(row, draft)
            if block_id is None:
                return False
            row.add_blocks([block_id])
            draft.appended_blocks.append((row.row_idx, block_id))
        row.plan_on(self._block_size)
        if row.num_planned + 1 >= row.sequence.max_planned:
            self._worker.rows.regroup()  # its last token, or the last that is known
        return True

    def _prefill(self, row: Row, draft: PlanDraft) -> None:
        if row.state is SequenceState.FORKING:
            if draft.may_begin([row.sequence]):
                begin_fork(row, self._worker, draft)
        else:
            draft.prefill(row)

    def _block_for(self, row: Row, draft: PlanDraft) -> int | None:
        """A block for a decode, by preemption if need be, or None if the row has to wait for some result."""
        counters = None if self._settings.policy is Policy.FCFS else self._counters
        while True:
            block_id = self._worker.pool.take_one()
            # Blocks of requests that are leaving come with the next results: preempt no further request.
            if block_id is not None or self._worker.rows.num_leaving > 0:
                return block_id
            victim = choose_victim(self._worker.rows.held, row, counters)
            if victim is None:
                return None
            self._preempt(victim, draft)

    def _preempt(self, victim: SequenceGroup, draft: PlanDraft) -> None:
        """Preempt a request; blocks that it moves to host memory are free for the draft's plan."""
        self._worker.lifecycle.preempt(victim)
        self._worker.swap.plan_outs(draft)

    # ---- requests that wait ----

    def _swap_in(self, draft: PlanDraft) -> bool:
        """Bring swapped requests back in their order. Returns False if the next one lacks rows, blocks or budget.

        A request whose adapter is not ready is skipped. All others wait for the request before them.
        """
        worker = self._worker
        while (group := worker.queues.swapped.peek()) is not None:
            members = group.live_members()
            if draft.budget < len(members) or not draft.may_begin(members):
                return False
            num_needed, num_unheld = worker.swap.count_blocks(group)
            has_rows = worker.rows.free.num_free >= len(members)
            if has_rows and self._fit(num_needed, num_unheld) is BlockFit.OK:
                self._swap_in_group(group, draft)
            elif not self._preempt_paused(draft):
                return False
        return True

    def _swap_in_group(self, group: SequenceGroup, draft: PlanDraft) -> None:
        """Give a swapped request rows, blocks and leases again, and plan the last known token of each sequence."""
        worker, members = self._worker, group.live_members()
        worker.queues.leave_swapped(group)
        for member in members:
            worker.rows.take(member, SequenceState.RUNNING)
        worker.swap.move_in(group, draft)
        for member in members:
            row = member.held_row
            draft.begin(row, worker.rows.slot_generation(row), worker.rows.slot_uses(row))
            draft.prefill(row)

    def _preempt_paused(self, draft: PlanDraft) -> bool:
        """Preempt a paused request that holds rows. Returns False if none does, or if other rows are leaving.

        What the request held is free at once, or after the results that name it.
        """
        worker = self._worker
        if worker.lifecycle.num_paused == 0 or worker.rows.num_leaving > 0:
            return False
        victim = choose_paused(worker.rows.held)
        if victim is None:
            return False
        self._preempt(victim, draft)
        return True

    def _admit(self, draft: PlanDraft, now_s: float, num_long: int = 0) -> None:
        """Start waiting requests while budget, rows and blocks last: those set aside, then others in the queue's order.

        A request whose adapter is not ready is skipped. backfill.py decides about requests that lack rows or blocks.
        `num_long`: long prefills that are unfinished.
        """
        worker, backfill = self._worker, self._backfill
        most_long = self._settings.max_long_partial_prefills
        for group in backfill.to_try():
            if draft.budget == 0 or (num_long >= most_long and worker.queues.waiting.is_long(group)):
                continue
            num_hits = self._fitting_hits(group)
            if num_hits is not None and self._may_start(group, num_hits, draft):
                num_long += self._start(group, num_hits, draft, now_s)
        while (
            not backfill.is_closed
            and draft.budget > 0
            and (worker.rows.free.num_free > 0 or worker.lifecycle.num_paused > 0)
        ):
            waiting, overtaken = self._next_waiting(may_be_long=num_long < most_long)
            if waiting is None:
                return
            num_hits = self._fitting_hits(waiting)
            if num_hits is None:
                if self._preempt_paused(draft):
                    continue
                if backfill.holds_up(waiting):
                    return
                continue
            if not self._may_start(waiting, num_hits, draft):
                return
            if overtaken is not None:
                overtaken.note_overtaken()
            num_long += self._start(waiting, num_hits, draft, now_s)

    def _may_start(self, group: SequenceGroup, num_hits: int, draft: PlanDraft) -> bool:
        """Whether a group that has room may begin: the plan has bytes left, and its prefill ends here or may go on."""
        if not draft.may_begin(group.live_members()[:1]):
            return False
        num_left = group.live_members()[0].num_known - num_hits * self._block_size
        if num_left <= draft.budget:
            return True
        if self._settings.policy is not Policy.CHUNKED_PREFILL:
            return draft.is_empty
        num_partial = sum(row.state is SequenceState.RUNNING for row in filter(_may_prefill, self._worker.rows.held))
        return num_partial < self._settings.max_partial_prefills

    def _next_waiting(self, *, may_be_long: bool) -> tuple[SequenceGroup | None, SequenceGroup | None]:
        """The next request, and None. Or a request of the same tenant that overtakes it, and the request overtaken.

        Only a request whose adapter is in the running batch may overtake.
        """
        worker = self._worker
        group = worker.queues.waiting.peek(may_be_long=may_be_long)
        if group is None or group.times_overtaken >= MAX_TIMES_OVERTAKEN or worker.slots.is_active(group.digest):
            return group, None
        num_bytes = sum(ref.arena_bytes for ref in group.request.adapters if not worker.slots.is_active(ref.digest))
        if not worker.costs.is_expensive(num_bytes, len(worker.rows.held)):
            return group, None
        cheaper = worker.queues.waiting.peek_active(group)
        if cheaper is None:
            return group, None
        return cheaper, group

    def _fitting_hits(self, group: SequenceGroup) -> int | None:
        """Cached blocks the group can start from, or None if rows or other blocks of its prefills are short."""
        size = self._block_size
        members = group.live_members()
        if len(members) > self._worker.rows.free.num_free:
            return None
        sequence = members[0]
        num_known = sequence.num_known
        # At least one token must be computed, or there would be nothing to sample from. To return the prompt's
        # log-probabilities, or the mean of its hidden states, all of it must be.
        max_hits = 0 if sequence.needs_whole_prompt else (num_known - 1) // size
        num_hits, num_unheld = self._worker.cache.count_hits(sequence, max_hits)
        num_needed = -(-num_known // size) - num_hits + num_fork_blocks(members, size)
        return num_hits if self._fit(num_needed, num_unheld) is BlockFit.OK else None

    def _fit(self, num_needed: int, num_unheld: int) -> BlockFit:
        """Whether one more request gets its blocks. It shares `num_unheld` cached blocks that nothing else holds."""
        pool = self._worker.pool
        return fit_blocks(
            num_needed,
            num_available=pool.num_available - num_unheld,
            num_blocks=pool.num_blocks,
            num_spare=self._watermark if self._worker.rows.held else 0,
        )

    def _start(self, group: SequenceGroup, num_hits: int, draft: PlanDraft, now_s: float) -> bool:
        """Give a waiting group rows, leases and all blocks of its prefills, and plan the first chunk of the first one.

        All blocks at once, so that an unfinished prefill never waits for blocks and every admission gains a token.
        Returns whether a long prefill is left.
        """
        self._backfill.note_start(group)
        worker, members = self._worker, group.live_members()
        worker.queues.leave_waiting(group)
        sequence = members[0]
        size = self._block_size
        num_cached = num_hits * size
        num_known = sequence.num_known
        if group.note_start(now_s, num_cached):
            self.prefix_query_tokens += num_known
            self.prefix_hit_tokens += num_cached
            self._counters.charge_prefill(group.request.account, num_known - num_cached)
        blocks = worker.cache.take_hits(sequence, num_hits)
        blocks += worker.pool.take(-(-num_known // size) - num_hits)
        worker.demands.count_admission()
        row = worker.rows.take(sequence, SequenceState.RUNNING)
        row.add_blocks(blocks)
        row.start_at(num_cached)
        row.note_registered(num_hits, size)
        reserve_forks(members, worker)
        draft.begin(row, worker.rows.slot_generation(row), worker.rows.slot_uses(row))
        draft.prefill(row)
        return _num_left(row) > self._long_tokens


def _may_prefill(row: Row) -> bool:
    """Whether the next chunk of its prefill may be planned, or its fork begun."""
    if row.is_decoding or row.sequence.group.is_paused:
        return False
    return row.state is SequenceState.RUNNING or may_begin(row)


def _num_left(row: Row) -> int:
    """Tokens of its prefill that are not planned."""
    return row.prefill_end - row.num_planned
