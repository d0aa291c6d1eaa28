"""What the next step computes: decodes first, then unfinished prefills, then waiting requests in order of arrival.

Takes rows, blocks and slots from the roster, and preempts there when something is short.
"""

from __future__ import annotations

from control_plane.scheduler.plan_draft import PlanDraft
from control_plane.scheduler.preemption import choose_paused, choose_victim
from control_plane.scheduler.roster import Roster
from control_plane.scheduler.run_ahead import is_due
from control_plane.scheduler.sequence import Sequence, SequenceState
from control_plane.scheduler.sequence_group import SequenceGroup
from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.types import NewRow, ScheduledRow, WorkerLimits


class Planner:
    """Fills step plans for one worker."""

    def __init__(self, limits: WorkerLimits, roster: Roster, settings: SchedulerSettings) -> None:
        self._block_size = limits.block_size
        self._roster = roster
        self._decode_rows = [ScheduledRow(row, 1, True) for row in range(limits.max_rows)]
        self._watermark = max(1, round(limits.num_blocks * settings.watermark))
        self.prefix_query_tokens = 0  # looked up at first admissions, in all
        self.prefix_hit_tokens = 0  # of those found in the prefix cache

    def fill(self, draft: PlanDraft, now_s: float) -> None:
        """Schedule what may run, within the draft's budget."""
        is_starved = self._plan_running(draft)
        if not is_starved:
            self._admit(draft, now_s)

    def _plan_running(self, draft: PlanDraft) -> bool:
        """Plan decodes, then unfinished prefills, in order of arrival; True if one of them lacked a block or budget."""
        size = self._block_size
        prefills: list[Sequence] = []
        is_starved = False
        for sequence in list(self._roster.running):
            if sequence.state is not SequenceState.RUNNING or sequence.group.is_paused:
                continue
            if not sequence.is_decoding:
                prefills.append(sequence)
                continue
            position = sequence.num_planned
            if position >= sequence.max_planned:
                continue  # all its tokens are planned
            if not is_due(sequence):
                continue
            if draft.budget == 0:
                return True
            if position == len(sequence.block_ids) * size:
                block_id = self._block_for(sequence)
                if block_id is None:
                    is_starved = True
                    continue
                sequence.block_ids.append(block_id)
                draft.appended_blocks.append((sequence.row, block_id))
            sequence.num_planned = position + 1
            sequence.num_in_flight += 1
            draft.budget -= 1
            draft.decodes.append(sequence)
        for sequence in prefills:
            if draft.budget == 0:
                return True
            if sequence.state is SequenceState.RUNNING:
                draft.prefill(sequence)
        return is_starved

    def _block_for(self, sequence: Sequence) -> int | None:
        """A block for a decode, by preemption if need be, or None if it has to wait for some result."""
        while True:
            block_id = self._roster.pool.take_one()
            # Blocks of those who are leaving come with the next results: preempt nobody for that.
            if block_id is not None or self._roster.num_draining > 0:
                return block_id
            victim = choose_victim(self._roster.running, sequence)
            if victim is None:
                return None
            self._roster.preempt(victim)

    def _admit(self, draft: PlanDraft, now_s: float) -> None:
        """Start waiting requests while budget, rows and blocks last, in order of arrival.

        One whose adapter is not ready is skipped; one that lacks blocks is not, or large requests would starve.
        """
        while draft.budget > 0:
            group = self._roster.waiting.peek()
            if group is None:
                return
            num_hits = self._fitting_hits(group) if self._roster.rows.num_free else None
            if num_hits is not None:
                self._start(group, num_hits, draft, now_s)
                continue
            # Short of rows or blocks: who is paused gives way; what is not free at once is free after some result.
            victim = choose_paused(self._roster.running) if self._roster.num_draining == 0 else None
            if victim is None:
                return
            self._roster.preempt(victim)

    def _fitting_hits(self, group: SequenceGroup) -> int | None:
        """Cached blocks the group can start from, or None if the pool cannot give the others of its prefill."""
        size = self._block_size
        sequence = group.members[0]
        num_known = sequence.num_known
        # At least one token must be computed, or there would be nothing to sample from.
        max_hits = (num_known - 1) // size
        self._roster.cache.extend_hashes(sequence, max_hits)
        num_hits, num_unheld = self._roster.cache.count_hits(sequence, max_hits)
        num_needed = -(-num_known // size) - num_hits
        num_spare = self._roster.pool.num_available - num_unheld - num_needed
        return num_hits if num_spare >= (self._watermark if self._roster.running else 0) else None

    def _start(self, group: SequenceGroup, num_hits: int, draft: PlanDraft, now_s: float) -> None:
        """Give a waiting group its row, all blocks of its prefill and a lease, and plan its first chunk.

        All blocks at once, so that an unfinished prefill never waits for blocks and every admission gains a token.
        """
        self._roster.unqueue(group)
        sequence = group.members[0]
        size = self._block_size
        num_cached = num_hits * size
        token_ids = sequence.known_tokens()
        if group.first_scheduled_s is None:
            group.first_scheduled_s = now_s
            group.num_cached_tokens = min(num_cached, len(sequence.request.prompt_token_ids))
            self.prefix_query_tokens += len(token_ids)
            self.prefix_hit_tokens += num_cached
        sequence.block_ids = self._roster.cache.take_hits(sequence, num_hits)
        sequence.block_ids += self._roster.pool.take(-(-len(token_ids) // size) - num_hits)
        slot = None if sequence.request.adapter is None else self._roster.slots.lease(sequence.request.adapter.digest)
        self._roster.take_row(sequence, None if slot is None else slot.slot_idx)
        sequence.decode_row = self._decode_rows[sequence.row]
        sequence.prefill_end = len(token_ids)
        sequence.num_planned = sequence.num_computed = num_cached
        sequence.num_registered = num_hits
        sequence.register_at = num_cached + size
        draft.new_rows.append(
            NewRow(
                row=sequence.row,
                request_id=sequence.request.request_id,
                token_ids=token_ids,
                num_prompt_tokens=len(sequence.request.prompt_token_ids),
                num_computed_tokens=num_cached,
                block_ids=list(sequence.block_ids),
                slot=sequence.slot_idx,
                slot_generation=0 if slot is None else slot.generation,
                sampling=sequence.request.sampling,
            )
        )
        draft.prefill(sequence)
