"""Preempted requests whose KV blocks lie in the worker's host memory, and the moves of blocks there and back.

A request goes out as a whole: the next plan carries copies of its blocks to host memory, each block once however many
of its sequences share it. Its device blocks are free for that very plan, since the worker moves before it computes, and
not before: until the moves are in a plan, the request keeps the blocks that unanswered steps write.
It comes back as new rows that lack only the key and value of their last known token. Host blocks are given back when
the plan that swaps in is answered.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.memory.adapter_slots import AdapterSlots
from control_plane.scheduler.memory.block_pool import BlockPool
from control_plane.scheduler.memory.host_blocks import HostBlockPool
from control_plane.scheduler.memory.prefix_cache import PrefixCache
from control_plane.scheduler.queues.waiting_queue import Key, queue_key
from control_plane.scheduler.requests.sequence import Sequence, SequenceState
from control_plane.scheduler.requests.sequence_group import SequenceGroup
from control_plane.scheduler.settings import Policy
from control_plane.scheduler.step.new_rows import MAX_ROW_BYTES, group_bytes
from control_plane.scheduler.step.plan_draft import PlanDraft
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
        counters: VirtualCounters,
    ) -> None:
        self.host = HostBlockPool(limits.num_host_blocks)
        self.num_swapped_out = 0  # requests, in all
        self._is_used = policy is not Policy.FCFS
        self._costs = costs
        self._pool = pool
        self._cache = cache
        self._slots = slots
        self._counters = counters
        self._block_size = limits.block_size
        self._max_step_tokens = limits.max_step_tokens
        self._queue: list[SequenceGroup] = []  # in order of arrival; short, for host memory bounds it
        self.outs: list[tuple[int, int]] = []  # (block, host block) that the next plan moves
        self._leaving: list[Sequence] = []  # whose blocks these are

    # ---- out ----

    def is_better(self, group: SequenceGroup) -> bool:
        """Whether a running request should be preempted by swap, not by recompute.

        1. It cannot where host blocks are short, where it gained nothing yet, where some of its sequences is not past
           its prefill, or where one plan cannot take a token of each, or all their rows: they return together.
        2. One with several sequences should: computing it once more would compute each of them.
        3. A single one should where moving its blocks out and in costs less than computing its tokens once more.
        """
        members = group.live_members()
        if not self._is_used or not group.has_progressed or not all(map(_is_movable, members)):
            return False
        blocks = {block_id for member in members for block_id in self._moved_blocks(member)}
        if len(blocks) > self.host.num_free or len(members) > self._max_step_tokens:
            return False
        if group_bytes(members, self._block_size) > MAX_ROW_BYTES:
            return False
        return len(members) > 1 or self._costs.is_swap_cheaper(len(blocks), members[0].num_planned)

    def move_out(self, group: SequenceGroup) -> None:
        """Let the next plan move the blocks of a request that `is_better` said so of."""
        host_by_block: dict[int, int] = {}
        for member in group.live_members():
            for block_id in self._moved_blocks(member):
                host_block = host_by_block.get(block_id)
                if host_block is None:
                    host_block = host_by_block[block_id] = self.host.take()
                    self.outs.append((block_id, host_block))
                else:
                    self.host.share(host_block)
                member.host_block_ids.append(host_block)
            self._leaving.append(member)
        self.num_swapped_out += 1

    def tell_outs(self, draft: PlanDraft) -> None:
        """Put the moves into the plan that is made, and free the blocks that they move: it may use them.

        A member that is named by an unanswered step still has blocks. A beam's last one is not moved: it keeps that.
        """
        draft.swap_outs += self.outs
        for member in self._leaving:
            num_moved = len(member.host_block_ids) if member.block_ids else 0
            member.moved_block_ids, member.block_ids = member.block_ids[:num_moved], member.block_ids[num_moved:]
            self._pool.release(member.moved_block_ids)
        self.outs, self._leaving = [], []

    # ---- the queue ----

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._queue)

    def add(self, group: SequenceGroup) -> None:
        """Let a request that was moved out wait for its return."""
        insort(self._queue, group, key=_by_order)

    def remove(self, group: SequenceGroup) -> None:
        """It waits no more."""
        self._queue.remove(group)

    def peek(self) -> SequenceGroup | None:
        """Whose turn it is of those that are read and whose adapter may be used, or None.

        As among those that wait: the tenant with least service, there the highest priority, there the first arrival.
        """
        able = (g for g in self._queue if not g.is_paused and self._slots.is_admissible(g.digest))
        return min(able, key=self._turn, default=None)

    def _turn(self, group: SequenceGroup) -> tuple[float, Key]:
        return self._counters.counter(group.request.account), queue_key(group)

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended: its host blocks are not needed. Blocks that no plan moved yet stay its own."""
        if sequence.host_block_ids:
            self.host.release(sequence.host_block_ids)
            sequence.host_block_ids = []
            # A move that was not told yet must not land where another's block goes.
            self.outs = [(block, host) for block, host in self.outs if self.host.ref_counts[host] > 0]
            self._leaving = [member for member in self._leaving if member is not sequence]

    # ---- in ----

    def count_blocks(self, group: SequenceGroup) -> tuple[int, int]:
        """(blocks to take for its return, blocks to share for it that nobody holds)."""
        to_move: set[int] = set()
        unheld: set[int] = set()
        num_tails = 0
        for member in group.live_members():
            hits = self._hits(member)
            num_full = (member.num_known - 1) // self._block_size
            to_move.update(member.host_block_ids[len(hits) : num_full])
            num_tails += len(member.host_block_ids[num_full:])  # will be written: nobody shares it
            unheld.update(block_id for block_id in hits if self._pool.ref_counts[block_id] == 0)
            num_tails += -(-member.num_known // self._block_size) - len(member.host_block_ids)
        return len(to_move) + num_tails, len(unheld)

    def move_in(self, group: SequenceGroup, draft: PlanDraft) -> None:
        """Give every sequence its table, by moves and copies of the draft's plan. The caller gives rows and leases.

        Blocks that the prefix cache still has are shared, not moved. A block that will be written and that several
        forked from is moved once and copied for each further one.
        """
        members = group.live_members()
        for member in members:  # all of them first: taking a block may evict one that the next would share
            member.block_ids = self._cache.take_hits(member, len(self._hits(member)))
            member.num_registered = len(member.block_ids)
        block_by_host: dict[int, int] = {}
        for member in members:
            num_full = (member.num_known - 1) // self._block_size
            for idx in range(member.num_registered, len(member.host_block_ids)):
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
                member.block_ids.append(block_id)
            member.block_ids += self._pool.take(-(-member.num_known // self._block_size) - len(member.block_ids))
            member.prefill_end = member.num_known
            member.num_planned = member.num_computed = member.num_known - 1
            member.register_at = (member.num_registered + 1) * self._block_size
            draft.spent_host_blocks += member.host_block_ids
            member.host_block_ids = []

    def _hits(self, member: Sequence) -> list[int]:
        """Cached blocks of its leading tokens, all but the last known one."""
        max_hits = (member.num_known - 1) // self._block_size
        return self._cache.find_hits(member, max_hits)

    def _moved_blocks(self, member: Sequence) -> list[int]:
        """Blocks that keep what is computed of it; of a beam all but its last token, which is computed again."""
        if not member.is_stepwise:
            return member.block_ids
        num_full, num_rest = divmod(member.num_known - 1, self._block_size)
        if member.state is SequenceState.FORKING and num_rest:
            assert member.copied_block is not None, "a beam forks with a part of a block and copies none"
            return [*member.block_ids[:num_full], member.copied_block]
        return member.block_ids[: num_full + (num_rest > 0)]


def _is_movable(member: Sequence) -> bool:
    if member.is_stepwise and member.state is SequenceState.FORKING:
        return member.forks_from is None  # from a beam of which all but the last token is computed
    return member.state is SequenceState.RUNNING and member.is_decoding
