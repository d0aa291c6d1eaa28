"""Where each request is and what its sequences hold: queue, rows, blocks, adapter slots, prefix cache of one worker.

Moves groups and their members from one state to another and keeps the books balanced while it does. What is computed
next is the planner's business, what came back is the scheduler's.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from operator import attrgetter

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.memory.adapter_slots import AdapterSlots
from control_plane.scheduler.memory.block_pool import BlockPool
from control_plane.scheduler.memory.prefix_cache import PrefixCache
from control_plane.scheduler.memory.row_pool import RowPool
from control_plane.scheduler.queues.arrival_queue import ArrivalQueue
from control_plane.scheduler.queues.waiting_queue import WaitingQueue
from control_plane.scheduler.requests.sequence import Sequence, SequenceState
from control_plane.scheduler.requests.sequence_group import GroupState, SequenceGroup
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.step.decode_batch import DecodeBatch, by_progress
from control_plane.scheduler.step.swap_space import SwapSpace
from control_plane.scheduler.step_costs import StepCosts
from control_plane.scheduler.types import RequestId, WorkerLimits

by_order = attrgetter("order")


class Roster:
    """Every request of one worker."""

    def __init__(
        self, limits: WorkerLimits, settings: SchedulerSettings, counters: VirtualCounters, costs: StepCosts
    ) -> None:
        self._counters = counters
        self.block_size = limits.block_size
        self.pool = BlockPool(limits.num_blocks)
        self.cache = PrefixCache(self.pool, limits.block_size)
        is_strict = settings.policy is Policy.FCFS
        self.slots = AdapterSlots(limits.num_slots, limits.arena_bytes, counters, is_strict=is_strict)
        self.waiting: ArrivalQueue | WaitingQueue
        if is_strict:
            self.waiting = ArrivalQueue(counters, is_admissible=self.slots.is_admissible)
        else:
            self.waiting = WaitingQueue(
                counters,
                is_admissible=self.slots.is_admissible,
                is_active=self.slots.is_active,
                long_tokens=settings.long_tokens(limits),
            )
        self.swap = SwapSpace(limits, settings.policy, costs, self.pool, self.cache, self.slots, counters)
        self.rows = RowPool(limits.max_rows)
        self.running: list[Sequence] = []  # those that hold a row, DRAINING ones too, in order of arrival
        # Of running, those that the next plan may decode, and those before the end of their prefill.
        self._decode_batch: DecodeBatch | None = None  # None: somebody joined or left it since
        self._prefilling: list[Sequence] = []
        self.groups: dict[RequestId, SequenceGroup] = {}  # live requests; ended ones leave it at once
        self.unstarted: dict[RequestId, SequenceGroup] = {}  # of the waiting ones those that never ran, as they came
        self.num_draining = 0  # of running
        self.num_paused = 0  # of groups
        self.num_running_groups = 0  # requests with members in running
        self.num_ending_groups = 0  # of those, requests that are over
        self.num_telling = 0  # of running: those whose answers come with log-probabilities
        self.num_preemptions = 0  # of requests, in all
        # Requests that are live or still hold rows, with each adapter; no zeros.
        self.num_groups_by_digest: Counter[str] = Counter()
        self._purged: set[str] = set()  # digests whose blocks are kept out of the cache until nothing of them is left

    # ---- coming ----

    def add(self, group: SequenceGroup) -> None:
        """Queue a request that is not known yet."""
        self.groups[group.request.request_id] = group
        adapter = group.request.adapter
        if adapter is not None:
            self.num_groups_by_digest[adapter.digest] += 1
            if adapter.digest in self._purged:
                self._purged.discard(adapter.digest)
                self.slots.unretire(adapter.digest)
        self.queue(group)

    def queue(self, group: SequenceGroup) -> None:
        """Let it wait for admission, in its place by arrival."""
        group.state = GroupState.WAITING
        self._want(group)
        self.waiting.add(group)
        if group.first_scheduled_s is None:
            self.unstarted[group.request.request_id] = group

    def unqueue(self, group: SequenceGroup) -> None:
        """It waits no more; the caller says what it does instead."""
        self.waiting.remove(group)
        self._unwant(group)
        self.unstarted.pop(group.request.request_id, None)

    def join_swapped(self, group: SequenceGroup) -> None:
        """Let it wait for its return from host memory."""
        group.state = GroupState.SWAPPED
        if not group.is_paused:
            self._want(group)
        self.swap.add(group)
        self._counters.run(group.request.account)  # its account is kept: it returns by it

    def leave_swapped(self, group: SequenceGroup) -> None:
        """It waits there no more; the caller says what it does instead."""
        self.swap.remove(group)
        self._counters.stop_running(group.request.account)
        if not group.is_paused:
            self._unwant(group)

    def _want(self, group: SequenceGroup) -> None:
        if group.request.adapter is not None:
            self.slots.want(group.request.adapter, group.request.account)

    def _unwant(self, group: SequenceGroup) -> None:
        if group.request.adapter is not None:
            self.slots.unwant(group.request.adapter.digest, group.request.account)

    def hold(self, group: SequenceGroup) -> None:
        """Keep a request whose reader is slow from being scheduled."""
        if group.is_paused:
            return
        group.is_paused = True
        self.num_paused += 1
        self.regroup()
        if group.state is GroupState.WAITING:
            self.unqueue(group)
            group.state = GroupState.HELD
        elif group.state is GroupState.SWAPPED:
            self._unwant(group)

    def unhold(self, group: SequenceGroup) -> None:
        """Its reader reads again."""
        if not group.is_paused:
            return
        group.is_paused = False
        self.num_paused -= 1
        self.regroup()
        if group.state is GroupState.HELD:
            self.queue(group)
        elif group.state is GroupState.SWAPPED:
            self._want(group)

    def offer_adapters(self) -> None:
        """Let requests take part whose adapters became admissible."""
        for digest in self.slots.drain_admissible_again():
            self.waiting.offer(digest)

    def register(self, sequence: Sequence) -> None:
        """Offer its computed full blocks to the prefix cache, unless a plan moved them to host memory meanwhile."""
        if sequence.moved_block_ids:
            return
        self.cache.register(sequence, keep=not self._purged or sequence.digest not in self._purged)
        sequence.register_at = (sequence.num_registered + 1) * self.block_size

    # ---- running ----

    def regroup(self) -> None:
        """Somebody begins or ends to decode, or to prefill: look again who does before the next plan."""
        self._decode_batch = None

    def group_rows(self) -> tuple[DecodeBatch, list[Sequence]]:
        """Those that the next plan may decode, and those before the end of their prefill, in order of arrival."""
        batch = self._decode_batch
        if batch is None:
            decoding, self._prefilling = by_progress(self.running)
            batch = self._decode_batch = DecodeBatch(decoding)
        return batch, self._prefilling

    def take_row(self, sequence: Sequence, state: SequenceState) -> None:
        """Give the sequence the lowest free row and a lease of its adapter's slot, which must be admissible."""
        group = sequence.group
        adapter = sequence.request.adapter
        sequence.row = self.rows.take()
        sequence.slot_idx = None if adapter is None else self._lease(adapter.digest)
        sequence.state = state
        group.state = GroupState.RUNNING
        if group.num_rows == 0:
            self.num_running_groups += 1
            self._counters.run(group.request.account)
        group.num_rows += 1
        self.num_telling += sequence.tells_logprobs
        insort(self.running, sequence, key=by_order)
        self.regroup()

    def _lease(self, digest: str) -> int:
        slot = self.slots.lease(digest)
        if slot.num_leases == 1:
            self.waiting.offer(digest)  # it became active
        return slot.slot_idx

    def slot_generation(self, sequence: Sequence) -> int:
        """Generation of the slot that it leases, 0 without one."""
        return 0 if sequence.slot_idx is None else self.slots.slots[sequence.slot_idx].generation

    def release_copied(self, sequence: Sequence) -> None:
        """The block that its row began with a copy of was copied, or will not be."""
        if sequence.copied_block is not None:
            self.pool.release([sequence.copied_block])
            sequence.copied_block = None

    def reserve_again(self, beam: Sequence) -> None:
        """A beam came to nothing: keep its row, and the last of its blocks, for another one."""
        assert beam.num_in_flight == 0, "a beam is dropped while an unanswered plan names it"
        *shared, own = beam.block_ids
        row, slot_idx = beam.row, beam.slot_idx
        self.pool.release(shared)
        self.rows.restart(row)
        beam.leave_row()
        beam.row, beam.slot_idx, beam.block_ids = row, slot_idx, [own]
        beam.generated, beam.block_hashes, beam.max_planned = [], [], 0
        beam.state = SequenceState.RESERVED
        self.regroup()

    # ---- leaving ----

    def preempt(self, group: SequenceGroup) -> None:
        """Take all rows away; the group waits again once its unanswered plans are answered.

        Its tokens are computed once more then, or its blocks come back from host memory.
        """
        if self.swap.is_better(group):
            self.swap.move_out(group)
        group.num_preemptions += 1
        self.num_preemptions += 1
        self._drain(group)

    def end(self, group: SequenceGroup) -> None:
        """The request is over: forget it, and give back what it holds as soon as no unanswered plan names it."""
        del self.groups[group.request.request_id]
        self.num_paused -= group.is_paused
        group.is_ended = True
        for sequence in group.members:
            sequence.is_ended = True
            self.swap.forget(sequence)
        if group.state is GroupState.WAITING:
            self.unqueue(group)
        elif group.state is GroupState.SWAPPED:
            self.leave_swapped(group)
        if group.num_rows > 0:
            self.num_ending_groups += 1
            self._drain(group)
        else:
            self._vanish(group)

    def end_member(self, sequence: Sequence) -> None:
        """One answer is complete; the request is over with the last of them."""
        sequence.is_ended = True
        self.swap.forget(sequence)
        if all(member.is_ended or member.is_given_up for member in sequence.group.members):
            self.end(sequence.group)
        else:
            self._drain_member(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Give back row, blocks and lease; a group that has not ended waits again once all its members left."""
        group = sequence.group
        self.running.remove(sequence)
        self.regroup()
        self.num_draining -= 1
        self.pool.release(sequence.block_ids)
        self.release_copied(sequence)
        if sequence.is_begun:
            self.rows.give_back(sequence.row)
        else:
            self.rows.give_back_unused(sequence.row)
        if sequence.slot_idx is not None:
            self.slots.release(sequence.slot_idx)
        sequence.leave_row()
        sequence.state = SequenceState.IDLE
        group.num_rows -= 1
        self.num_telling -= sequence.tells_logprobs
        if group.num_rows == 0:
            self.num_running_groups -= 1
            self._counters.stop_running(group.request.account)
            group.has_progressed = False
            group.beam_candidates.clear()
            if group.is_ended:
                self.num_ending_groups -= 1
                self._vanish(group)
            elif any(member.host_block_ids for member in group.members):
                self.join_swapped(group)
            elif group.is_paused:
                group.state = GroupState.HELD
            else:
                self.queue(group)
            for member in group.members:
                member.is_ended |= member.is_given_up  # nobody forks from it any more

    def _drain(self, group: SequenceGroup) -> None:
        group.state = GroupState.DRAINING
        for sequence in list(group.members):
            self._drain_member(sequence)

    def give_up_member(self, sequence: Sequence) -> None:
        """Nobody wants this answer any more. What others are to fork from it is computed all the same."""
        if sequence.is_ended or sequence.group.searcher is not None:
            return  # of a beam search no answer is known before all are
        sequence.is_given_up = True
        is_source = any(member.forks_from is sequence for member in sequence.group.members)
        if is_source and not sequence.is_decoding:
            sequence.max_generated = len(sequence.generated) + 1  # its first token ends it
            sequence.max_planned = sequence.num_known
        else:
            self.end_member(sequence)

    def _drain_member(self, sequence: Sequence) -> None:
        if sequence.state in (SequenceState.RUNNING, SequenceState.FORKING, SequenceState.RESERVED):
            sequence.state = SequenceState.DRAINING
            sequence.look_closely()
            self.num_draining += 1
            self.regroup()
        if sequence.state is SequenceState.DRAINING and sequence.num_in_flight == 0:
            self.leave(sequence)

    def _vanish(self, group: SequenceGroup) -> None:
        group.state = GroupState.GONE
        group.beam_sequences.clear()
        group.members.clear()  # they name each other: nothing is to be left to the garbage collector
        digest = group.digest
        if digest is not None:
            self.num_groups_by_digest[digest] -= 1
            if not self.num_groups_by_digest[digest]:
                del self.num_groups_by_digest[digest]
                self.close_purge(digest)

    def abandon(self) -> None:
        """The worker is lost: for their tenants nobody waits or runs here any more. Nothing else may follow."""
        for group in self.waiting:
            self._counters.stop_waiting(group.request.account)
        with_rows = {id(sequence.group): sequence.group for sequence in self.running}.values()
        for group in (*with_rows, *self.swap):
            self._counters.stop_running(group.request.account)

    # ---- adapters on their way out ----

    def purge(self, digest: str) -> bool:
        """Forget the adapter's cached blocks, cache none of its live requests', and evict its slot once unused.

        False, and nothing changes, if that is under way or there is nothing of it.
        """
        if digest in self._purged or not self.has_digest(digest):
            return False
        self.cache.purge(digest)
        self.slots.retire(digest)
        self._purged.add(digest)
        self.close_purge(digest)
        return True

    def has_digest(self, digest: str) -> bool:
        """Whether a live or leaving request, a slot or a cached block has this adapter."""
        return self._is_in_use(digest) or self.cache.has_digest(digest)

    def close_purge(self, digest: str) -> None:
        """Forget that an adapter is being purged if nothing of it is left: its last request or its slot went."""
        if digest in self._purged and not self._is_in_use(digest):
            self._purged.discard(digest)
            self.slots.unretire(digest)

    def _is_in_use(self, digest: str) -> bool:
        return digest in self.num_groups_by_digest or self.slots.has_digest(digest)
