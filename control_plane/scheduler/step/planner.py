"""What the next step computes, by the policy in force.

What each policy takes, and in which order, stands in settings.py. Takes rows, blocks and slots from the roster, and
preempts there when something is short.
"""

from __future__ import annotations

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.memory.block_fit import Verdict, judge_blocks
from control_plane.scheduler.requests.sequence import Sequence, SequenceState
from control_plane.scheduler.requests.sequence_group import SequenceGroup
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.step.backfill import Backfill
from control_plane.scheduler.step.decode_batch import DecodeBatch
from control_plane.scheduler.step.forks import begin_fork, may_begin, num_fork_blocks, reserve_forks
from control_plane.scheduler.step.plan_draft import PlanDraft
from control_plane.scheduler.step.preemption import choose_paused, choose_victim
from control_plane.scheduler.step.roster import Roster
from control_plane.scheduler.step_costs import StepCosts
from control_plane.scheduler.types import WorkerLimits

# A request with an adapter that the step does not read yet lets this many of its tenant pass, whose adapters it does.
MAX_OVERTAKEN = 16


class Planner:
    """Fills step plans for one worker."""

    def __init__(
        self,
        limits: WorkerLimits,
        roster: Roster,
        settings: SchedulerSettings,
        counters: VirtualCounters,
        costs: StepCosts,
    ) -> None:
        self._block_size = limits.block_size
        self._roster = roster
        self._settings = settings
        self._counters = counters
        self._costs = costs
        self._long_tokens = settings.long_tokens(limits)
        self._watermark = max(1, round(limits.num_blocks * settings.watermark))
        self._backfill = Backfill(
            limits, roster, counters, watermark=self._watermark, max_blocked_steps=settings.max_blocked_steps
        )
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
            self._roster.regroup()  # some of them may decode from here on

    # ---- policies ----

    def _fill_chunked(self, draft: PlanDraft, now_s: float) -> None:
        """Decodes, then unfinished prefills, those about to finish first, then swapped, then waiting requests.

        Only a request that is due (backfill.py) goes before swapped ones. A long prefill leaves half of what is left to
        requests that wait, and takes what they do not need.
        """
        batch, prefilling = self._roster.group_rows()
        is_starved = self._plan_decodes(draft, batch)
        prefills = sorted(filter(_may_prefill, prefilling), key=_num_left)
        long_ones = [sequence for sequence in prefills if _num_left(sequence) > self._long_tokens]
        for sequence in prefills[: len(prefills) - len(long_ones)]:
            if draft.budget == 0:
                return
            self._prefill(sequence, draft)
        if not is_starved:
            num_kept = min(sum(map(_num_left, long_ones)), -(-draft.budget // 2))
            draft.budget -= num_kept
            if self._backfill.is_due or self._swap_in(draft):
                self._admit(draft, now_s, num_long=len(long_ones))
            draft.budget += num_kept
        for sequence in long_ones:
            if draft.budget > 0:
                self._prefill(sequence, draft)

    def _fill_prefill_first(self, draft: PlanDraft, now_s: float) -> None:
        """Whole prompts as long as some are admitted, else decodes, then swapped requests.

        While a request could return from host memory, none is admitted.
        Only a prompt larger than the whole budget is computed in chunks, alone, one step after the other.
        """
        batch, prefilling = self._roster.group_rows()
        for sequence in list(filter(_may_prefill, prefilling)):  # looked up before any source is planned
            if draft.budget > 0:
                self._prefill(sequence, draft)
        if self._backfill.is_due or self._roster.swap.peek() is None:
            self._admit(draft, now_s)
        if not draft.prefills and not self._plan_decodes(draft, batch) and not self._backfill.is_due:
            self._swap_in(draft)

    # ---- those who run ----

    def _plan_decodes(self, draft: PlanDraft, batch: DecodeBatch) -> bool:
        """Plan one token of every row of the batch, in order of arrival; True if one of them lacked a block or budget.

        A row that lacks a block, or loses its own to one before it, is left out.
        """
        is_starved = len(batch) > draft.budget
        sequences = batch.sequences[: draft.budget] if is_starved else batch.sequences
        left_out: set[Sequence] = set()
        for sequence in sequences:
            position = sequence.num_planned
            if position >= sequence.plan_closely_at and not self._may_decode(sequence, draft):
                left_out.add(sequence)
                continue
            sequence.num_planned = position + 1
            sequence.num_in_flight += 1
        if left_out or is_starved:
            batch = DecodeBatch([sequence for sequence in sequences if sequence not in left_out])
            is_starved |= any(sequence.state is SequenceState.RUNNING for sequence in left_out)
        draft.decodes = batch
        draft.budget -= len(batch)
        return is_starved

    def _may_decode(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Give a sequence of the batch a block for its next token if its table is full; False if it cannot decode."""
        if sequence.state is not SequenceState.RUNNING:
            return False  # preempted for one before it
        if sequence.num_planned == len(sequence.block_ids) * self._block_size:
            block_id = self._block_for(sequence, draft)
            if block_id is None:
                return False
            sequence.block_ids.append(block_id)
            draft.appended_blocks.append((sequence.row, block_id))
        sequence.plan_on(self._block_size)
        if sequence.num_planned + 1 >= sequence.max_planned:
            self._roster.regroup()  # its last token, or the last that is known
        return True

    def _prefill(self, sequence: Sequence, draft: PlanDraft) -> None:
        if sequence.state is SequenceState.FORKING:
            if draft.may_begin([sequence]):
                begin_fork(sequence, self._roster, draft)
        else:
            draft.prefill(sequence)

    def _block_for(self, sequence: Sequence, draft: PlanDraft) -> int | None:
        """A block for a decode, by preemption if need be, or None if it has to wait for some result."""
        counters = None if self._settings.policy is Policy.FCFS else self._counters
        while True:
            block_id = self._roster.pool.take_one()
            # Blocks of those who are leaving come with the next results: preempt nobody for that.
            if block_id is not None or self._roster.num_draining > 0:
                return block_id
            victim = choose_victim(self._roster.running, sequence, counters)
            if victim is None:
                return None
            self._preempt(victim, draft)

    def _preempt(self, victim: SequenceGroup, draft: PlanDraft) -> None:
        """Let a request give way; blocks that it moves to host memory are free for the draft's plan."""
        self._roster.preempt(victim)
        self._roster.swap.tell_outs(draft)

    # ---- those who wait ----

    def _swap_in(self, draft: PlanDraft) -> bool:
        """Bring swapped requests back, in turn; False if one that might return lacks something.

        One whose adapter is not ready is skipped, others wait for whoever comes before them.
        """
        roster = self._roster
        while (group := roster.swap.peek()) is not None:
            members = group.live_members()
            if draft.budget < len(members) or not draft.may_begin(members):
                return False
            num_needed, num_unheld = roster.swap.count_blocks(group)
            has_rows = roster.rows.num_free >= len(members)
            if has_rows and self._judge(num_needed, num_unheld) is Verdict.OK:
                self._return(group, draft)
            elif not self._free_paused(draft):
                return False
        return True

    def _return(self, group: SequenceGroup, draft: PlanDraft) -> None:
        """Give a swapped request rows, blocks and leases again, and plan the last known token of each sequence."""
        self._roster.leave_swapped(group)
        self._roster.swap.move_in(group, draft)
        for member in group.live_members():
            self._roster.take_row(member, SequenceState.RUNNING)
            draft.begin(member, self._roster.slot_generation(member))
            draft.prefill(member)

    def _free_paused(self, draft: PlanDraft) -> bool:
        """Whether a request whose reader is slow gave way; what is not free at once is after some result."""
        roster = self._roster
        victim = choose_paused(roster.running) if roster.num_paused > 0 and roster.num_draining == 0 else None
        if victim is not None:
            self._preempt(victim, draft)
        return victim is not None

    def _admit(self, draft: PlanDraft, now_s: float, num_long: int = 0) -> None:
        """Start waiting requests while budget, rows and blocks last: those set aside, then in the queue's order.

        One whose adapter is not ready is skipped. What becomes of one that lacks rows or blocks: backfill.py.
        `num_long`: long prefills that are unfinished.
        """
        roster, backfill = self._roster, self._backfill
        most_long = self._settings.max_long_partial_prefills
        for group in backfill.to_try():
            if draft.budget == 0 or (num_long >= most_long and roster.waiting.is_long(group)):
                continue
            num_hits = self._fitting_hits(group)
            if num_hits is not None and self._may_start(group, num_hits, draft):
                num_long += self._start(group, num_hits, draft, now_s)
        while not backfill.is_closed and draft.budget > 0 and (roster.rows.num_free > 0 or roster.num_paused > 0):
            waiting, passed = self._next_waiting(may_be_long=num_long < most_long)
            if waiting is None:
                return
            num_hits = self._fitting_hits(waiting)
            if num_hits is None:
                if self._free_paused(draft):
                    continue
                if backfill.holds_up(waiting):
                    return
                continue
            if not self._may_start(waiting, num_hits, draft):
                return
            if passed is not None:
                passed.num_overtaken += 1
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
        num_partial = sum(s.state is SequenceState.RUNNING for s in filter(_may_prefill, self._roster.running))
        return num_partial < self._settings.max_partial_prefills

    def _next_waiting(self, *, may_be_long: bool) -> tuple[SequenceGroup | None, SequenceGroup | None]:
        """The request whose turn it is; or one of its tenant that goes before it, for its adapter is read anyway.

        Then the second is the one that is passed.
        """
        roster = self._roster
        group = roster.waiting.peek(may_be_long=may_be_long)
        if group is None or group.num_overtaken >= MAX_OVERTAKEN or roster.slots.is_active(group.digest):
            return group, None
        adapter = group.request.adapter
        assert adapter is not None, "the base model is always active"
        if not self._costs.is_dear(adapter.arena_bytes, len(roster.running)):
            return group, None
        cheaper = roster.waiting.peek_active(group)
        if cheaper is None:
            return group, None
        return cheaper, group

    def _fitting_hits(self, group: SequenceGroup) -> int | None:
        """Cached blocks the group can start from, or None if rows or other blocks of its prefills are short."""
        size = self._block_size
        members = group.live_members()
        if len(members) > self._roster.rows.num_free:
            return None
        sequence = members[0]
        num_known = sequence.num_known
        # At least one token must be computed, or there would be nothing to sample from. To tell the prompt's
        # log-probabilities, all of it must be.
        max_hits = 0 if sequence.tells_prompt else (num_known - 1) // size
        num_hits, num_unheld = self._roster.cache.count_hits(sequence, max_hits)
        num_needed = -(-num_known // size) - num_hits + num_fork_blocks(members, size)
        return num_hits if self._judge(num_needed, num_unheld) is Verdict.OK else None

    def _judge(self, num_needed: int, num_unheld: int) -> Verdict:
        """The verdict on blocks for one more request, which shares `num_unheld` cached ones that nobody holds."""
        pool = self._roster.pool
        return judge_blocks(
            num_needed,
            num_available=pool.num_available - num_unheld,
            num_blocks=pool.num_blocks,
            num_spare=self._watermark if self._roster.running else 0,
        )

    def _start(self, group: SequenceGroup, num_hits: int, draft: PlanDraft, now_s: float) -> bool:
        """Give a waiting group its rows, all blocks of its prefills and leases, and plan the first one's first chunk.

        All blocks at once, so that an unfinished prefill never waits for blocks and every admission gains a token.
        Returns whether a long prefill is left.
        """
        self._backfill.note_start(group)
        self._roster.unqueue(group)
        members = group.live_members()
        sequence = members[0]
        size = self._block_size
        num_cached = num_hits * size
        num_known = sequence.num_known
        if group.first_scheduled_s is None:
            group.first_scheduled_s = now_s
            group.num_cached_tokens = min(num_cached, len(sequence.request.prompt_token_ids))
            self.prefix_query_tokens += num_known
            self.prefix_hit_tokens += num_cached
            self._counters.charge_prefill(group.request.account, num_known - num_cached)
        sequence.block_ids = self._roster.cache.take_hits(sequence, num_hits)
        sequence.block_ids += self._roster.pool.take(-(-num_known // size) - num_hits)
        self._roster.slots.count_admission()
        group.num_overtaken = 0
        self._roster.take_row(sequence, SequenceState.RUNNING)
        sequence.prefill_end = num_known
        sequence.num_planned = sequence.num_computed = num_cached
        sequence.num_registered = num_hits
        sequence.register_at = num_cached + size
        reserve_forks(members, self._roster)
        draft.begin(sequence, self._roster.slot_generation(sequence))
        draft.prefill(sequence)
        return _num_left(sequence) > self._long_tokens


def _may_prefill(sequence: Sequence) -> bool:
    """Whether its prefill is to be planned on, or begun as a fork."""
    if sequence.is_decoding or sequence.group.is_paused:
        return False
    return sequence.state is SequenceState.RUNNING or may_begin(sequence)


def _num_left(sequence: Sequence) -> int:
    """Tokens of its prefill that are not planned."""
    return sequence.prefill_end - sequence.num_planned
