"""Preempted requests whose KV blocks lie in the worker's host memory, and the moves of blocks there and back.

A request goes out as a whole: its next plan carries copies of its blocks to host memory, each block once however many
of its sequences share it, and its device blocks are free for that very plan, since the worker moves before it computes.
It comes back as new rows that lack only the key and value of their last known token. Host blocks are given back when
the plan that swaps in is answered.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from control_plane.scheduler.adapter_slots import AdapterSlots
from control_plane.scheduler.block_pool import BlockPool
from control_plane.scheduler.host_blocks import HostBlockPool
from control_plane.scheduler.prefix_cache import PrefixCache
from control_plane.scheduler.sequence import Sequence, SequenceState
from control_plane.scheduler.sequence_group import SequenceGroup
from control_plane.scheduler.settings import Policy
from control_plane.scheduler.step_costs import StepCosts
from control_plane.scheduler.types import WorkerLimits

_by_order = attrgetter("order")


class SwapSpace:
    """Host blocks, who has KV there, and the swapped queue."""

    def __init__(
        self,
        limits: WorkerLimits,
        policy: Policy,
        costs: StepCosts,
        pool: BlockPool,
        cache: PrefixCache,
        slots: AdapterSlots,
    ) -> None:
        self.host = HostBlockPool(limits.num_host_blocks)
        self.num_swapped_out = 0  # requests, in all
        self._is_used = policy is not Policy.FCFS
        self._costs = costs
        self._pool = pool
        self._cache = cache
        self._slots = slots
        self._block_size = limits.block_size
        self._max_step_tokens = limits.max_step_tokens
        self._queue: list[SequenceGroup] = []  # in order of arrival; short, for host memory bounds it
        self.outs: list[tuple[int, int]] = []  # (block, host block) that the next plan moves

    # ---- out ----

    def is_better(self, group: SequenceGroup) -> bool:
        """Whether a running request should be preempted by swap, not by recompute.

        1. It cannot where host blocks are short, where it gained nothing yet, where some of its sequences is not past
           its prefill, where what a sequence is fed next is still to be chosen, or where one step cannot take a token
           of each: they return together.
        2. One with several sequences should: computing it once more would compute each of them.
        3. A single one should where moving its blocks out and in costs less than computing its tokens once more.
        """
        members = group.live_members()
        blocks = {block_id for member in members for block_id in member.block_ids}
        has_room = self._is_used and len(blocks) <= self.host.num_free and len(members) <= self._max_step_tokens
        if not has_room or not group.has_progressed or not all(map(_is_movable, members)):
            return False
        return len(members) > 1 or self._costs.is_swap_cheaper(len(blocks), members[0].num_planned)

    def move_out(self, group: SequenceGroup) -> None:
        """Let the next plan move the blocks of a request that `is_better` said so of, and give them back."""
        host_by_block: dict[int, int] = {}
        for member in group.live_members():
            for block_id in member.block_ids:
                host_block = host_by_block.get(block_id)
                if host_block is None:
                    host_block = host_by_block[block_id] = self.host.take()
                    self.outs.append((block_id, host_block))
                else:
                    self.host.share(host_block)
                member.host_block_ids.append(host_block)
            self._pool.release(member.block_ids)
            member.block_ids = []
        self.num_swapped_out += 1

    def tell_outs(self) -> list[tuple[int, int]]:
        """Moves for the plan that is made; forgotten here."""
        outs, self.outs = self.outs, []
        return outs

    # ---- the queue ----

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._queue)

    def add(self, group: SequenceGroup) -> None:
        """Let a request that was moved out wait for its return, in its place by arrival."""
        insort(self._queue, group, key=_by_order)

    def remove(self, group: SequenceGroup) -> None:
        """It waits no more."""
        self._queue.remove(group)

    def peek(self) -> SequenceGroup | None:
        """The earliest arrival that is read and whose adapter may be used, or None."""
        for group in self._queue:
            if not group.is_paused and self._slots.is_admissible(group.digest):
                return group
        return None

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended: its host blocks are not needed."""
        if sequence.host_block_ids:
            self.host.release(sequence.host_block_ids)
            sequence.host_block_ids = []
            # A move that was not told yet must not land where another's block goes.
            self.outs = [(block, host) for block, host in self.outs if self.host.ref_counts[host] > 0]

    # ---- in ----

    def count_blocks(self, group: SequenceGroup) -> tuple[int, int]:
        """(blocks to take for its return, blocks to share for it that nobody holds)."""
        to_move: set[int] = set()
        unheld: set[int] = set()
        num_tails = 0
        for member in group.live_members():
            hits = self._hits(member)
            to_move.update(member.host_block_ids[len(hits) :])
            unheld.update(block_id for block_id in hits if self._pool.ref_counts[block_id] == 0)
            num_tails += -(-member.num_known // self._block_size) - len(member.host_block_ids)
        return len(to_move) + num_tails, len(unheld)

    def move_in(self, group: SequenceGroup) -> tuple[list[tuple[int, int]], list[int]]:
        """Give every sequence its table: (moves for the plan, host blocks to release once it is answered).

        Blocks that the prefix cache still has are shared, not moved. The caller gives rows and leases.
        """
        members = group.live_members()
        for member in members:  # all of them first: taking a block may evict one that the next would share
            member.block_ids = self._cache.take_hits(member, len(self._hits(member)))
            member.num_registered = len(member.block_ids)
        moves: list[tuple[int, int]] = []
        spent: list[int] = []
        block_by_host: dict[int, int] = {}
        for member in members:
            for host_block in member.host_block_ids[member.num_registered :]:
                block_id = block_by_host.get(host_block)
                if block_id is None:
                    (block_id,) = self._pool.take(1)
                    block_by_host[host_block] = block_id
                    moves.append((host_block, block_id))
                else:
                    self._pool.share(block_id)
                member.block_ids.append(block_id)
            member.block_ids += self._pool.take(-(-member.num_known // self._block_size) - len(member.block_ids))
            member.prefill_end = member.num_known
            member.num_planned = member.num_computed = member.num_known - 1
            member.register_at = (member.num_registered + 1) * self._block_size
            spent += member.host_block_ids
            member.host_block_ids = []
        return moves, spent

    def _hits(self, member: Sequence) -> list[int]:
        """Cached blocks of its leading tokens, all but the last known one."""
        max_hits = (member.num_known - 1) // self._block_size
        self._cache.extend_hashes(member, max_hits)
        return self._cache.find_hits(member, max_hits)


def _is_movable(member: Sequence) -> bool:
    is_past_prefill = member.state is SequenceState.RUNNING and member.is_decoding
    is_chosen = not member.is_stepwise or (member.num_in_flight == 0 and member.num_planned < member.num_known)
    return is_past_prefill and is_chosen
