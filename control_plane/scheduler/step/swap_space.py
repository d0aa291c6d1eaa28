"""The moves of preempted requests' KV blocks to the worker's host memory and back.

A request moves out as a whole: the next plan carries copies of its blocks to host memory, each block once however many
of its sequences share it. Its device blocks are free for that very plan, since the worker moves before it computes, and
not before: until the moves are in a plan, the request keeps the blocks that steps in flight write.
It comes back as new rows that lack only the key and value of their last known token. Host blocks are given back when
the result of the plan that swaps in has come.
"""

from __future__ import annotations

from control_plane.scheduler.memory.block_pool import BlockPool
from control_plane.scheduler.memory.host_blocks import HostBlockPool
from control_plane.scheduler.memory.prefix_cache import PrefixCache
from control_plane.scheduler.requests.sequence import Row, Sequence, SequenceGroup
from control_plane.scheduler.requests.states import SequenceState
from control_plane.scheduler.settings import Policy
from control_plane.scheduler.step.new_rows import MAX_ROW_BYTES, group_bytes
from control_plane.scheduler.step.plan_draft import PlanDraft
from control_plane.scheduler.step_costs import StepCosts
from control_plane.scheduler.types import WorkerLimits


class SwapSpace:
    """Host blocks, the sequences that have KV there, and the moves that the next plan carries."""

    def __init__(
        self, limits: WorkerLimits, policy: Policy, costs: StepCosts, pool: BlockPool, cache: PrefixCache
    ) -> None:
        self.host = HostBlockPool(limits.num_host_blocks)
        self.num_swapped_out = 0  # requests, in all
        self._is_used = policy is not Policy.FCFS
        self._costs = costs
        self._pool = pool
        self._cache = cache
        self._block_size = limits.block_size
        self._max_step_tokens = limits.max_step_tokens
        self.outs: list[tuple[int, int]] = []  # (block, host block) that the next plan moves
        self._leaving: list[Sequence] = []  # sequences whose blocks these are

    # ---- out ----

    def is_better(self, group: SequenceGroup) -> bool:
        """Whether a running request should be preempted by swap, not by recompute.

        1. It cannot if host blocks are short, if it gained nothing yet, if one of its sequences is not past its
           prefill, or if one plan cannot take a token of each, or all their rows: they return together.
        2. A request with several sequences should: computing it once more would compute each of them.
        3. A request with one sequence should if moving its blocks out and in costs less than computing its tokens
           once more.
        """
        members = group.live_members()
        if not self._is_used or not group.has_progressed:
            return False
        rows = [member.row for member in members if member.row is not None]
        if len(rows) < len(members) or not all(map(_is_movable, rows)):
            return False
        blocks = {block_id for row in rows for block_id in self._moved_blocks(row)}
        if len(blocks) > self.host.num_free or len(members) > self._max_step_tokens:
            return False
        if group_bytes(members, self._block_size) > MAX_ROW_BYTES:
            return False
        return len(members) > 1 or self._costs.is_swap_cheaper(len(blocks), rows[0].num_planned)

    def move_out(self, group: SequenceGroup) -> None:
        """Let the next plan move the blocks of a request, for which `is_better` returned True."""
        host_by_block: dict[int, int] = {}
        for member in group.live_members():
            for block_id in self._moved_blocks(member.held_row):
                host_block = host_by_block.get(block_id)
                if host_block is None:
                    host_block = host_by_block[block_id] = self.host.take()
                    self.outs.append((block_id, host_block))
                else:
                    self.host.share(host_block)
                member.add_host_block(host_block)
            self._leaving.append(member)
        self.num_swapped_out += 1

    def plan_outs(self, draft: PlanDraft) -> None:
        """Put the moves into the plan that is made, and free the blocks that they move: the plan may use them.

        A member that a step in flight names still has its row. A beam's last block is not moved: the beam keeps it.
        """
        draft.swap_outs += self.outs
        for member in self._leaving:
            row = member.row
            if row is not None:
                num_moved = len(member.host_block_ids) if row.block_ids else 0
                self._pool.release(row.move_blocks(num_moved))
        self.outs, self._leaving = [], []

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended: give its host blocks back. Blocks that no plan moved yet remain the row's."""
        if sequence.host_block_ids:
            self._give_back(sequence.take_host_blocks())
            self._leaving = [member for member in self._leaving if member is not sequence]

    def trim(self, sequence: Sequence) -> None:
        """Give back host blocks after its computed tokens: it sat out a step after its blocks were moved."""
        num_needed = -(-(sequence.num_known - 1) // self._block_size)
        if len(sequence.host_block_ids) > num_needed:
            host_blocks = sequence.take_host_blocks()
            for host_block in host_blocks[:num_needed]:
                sequence.add_host_block(host_block)
            self._give_back(host_blocks[num_needed:])

    def _give_back(self, host_blocks: list[int]) -> None:
        """Release host blocks. A move that is in no plan yet must not end where another sequence's block goes."""
        self.host.release(host_blocks)
        self.outs = [(block, host) for block, host in self.outs if self.host.ref_counts[host] > 0]

    # ---- in ----

    def count_blocks(self, group: SequenceGroup) -> tuple[int, int]:
        """(blocks to take for its return, blocks to share for it that no table holds)."""
        to_move: set[int] = set()
        unheld: set[int] = set()
        num_tails = 0
        for member in group.live_members():
            hits = self._hits(member)
            num_full = (member.num_known - 1) // self._block_size
            to_move.update(member.host_block_ids[len(hits) : num_full])
            num_tails += len(member.host_block_ids[num_full:])  # will be written: not shared
            unheld.update(block_id for block_id in hits if self._pool.ref_counts[block_id] == 0)
            num_tails += -(-member.num_known // self._block_size) - len(member.host_block_ids)
        return len(to_move) + num_tails, len(unheld)

    def move_in(self, group: SequenceGroup, draft: PlanDraft) -> None:
        """Fill the new rows of a request that returns, by moves and copies of the draft's plan.

        Blocks that the prefix cache still has are shared, not moved. A block that will be written and that several
        sequences forked from is moved once and copied for each further one.
        """
        members = group.live_members()
        for member in members:  # all of them first: taking a block may evict one that the next would share
            row = member.held_row
            hits = self._cache.take_hits(member, len(self._hits(member)))
            row.add_blocks(hits)
            row.note_registered(len(hits), self._block_size)
        block_by_host: dict[int, int] = {}
        for member in members:
            row = member.held_row
            num_full = (member.num_known - 1) // self._block_size
            for idx in range(row.num_registered, len(member.host_block_ids)):
                host_block = member.host_block_ids[idx]
                block_id = block_by_host.get(host_block)
                if block_id is not None and idx < num_full:
                    self._pool.share(block_id)
                else:
                    (own_block,) = self._pool.take(1)
                    if block_id is None:
                        draft.swap_ins.append((host_block, own_block))
                        block_by_host[host_block] = own_block
                    else:
                        draft.block_copies.append((block_id, own_block))
                    block_id = own_block
                row.add_blocks([block_id])
            row.add_blocks(self._pool.take(-(-member.num_known // self._block_size) - len(row.block_ids)))
            row.start_at(member.num_known - 1)
            draft.spent_host_blocks += member.take_host_blocks()

    def _hits(self, member: Sequence) -> list[int]:
        """Cached blocks of its leading tokens, all but the last known one."""
        max_hits = (member.num_known - 1) // self._block_size
        return self._cache.find_hits(member, max_hits)

    def _moved_blocks(self, row: Row) -> list[int]:
        """Blocks with the planned tokens of a row; of a beam without its last token, which is computed again.

        The table of a row that sat out a step can be longer.
        """
        sequence = row.sequence
        if not sequence.is_host_fed:
            return row.block_ids[: -(-row.num_planned // self._block_size)]
        num_full, num_rest = divmod(sequence.num_known - 1, self._block_size)
        if row.state is SequenceState.FORKING and num_rest:
            assert row.copied_block is not None, "a beam forks with a part of a block and copies none"
            return [*row.block_ids[:num_full], row.copied_block]
        return row.block_ids[: num_full + (num_rest > 0)]


def _is_movable(row: Row) -> bool:
    if row.sequence.is_host_fed and row.state is SequenceState.FORKING:
        return row.forks_from is None  # from a beam of which all but the last token is computed
    return row.state is SequenceState.RUNNING and row.is_decoding
