"""Where each sequence is and what it holds: queue, rows, blocks, adapter slots, prefix cache, all of one worker.

Moves sequences from one state to another and keeps the books balanced while it does. What is computed next is the
planner's business, what came back is the scheduler's.
"""

from __future__ import annotations

from operator import attrgetter

from control_plane.scheduler.adapter_slots import AdapterSlots
from control_plane.scheduler.block_pool import BlockPool
from control_plane.scheduler.prefix_cache import PrefixCache
from control_plane.scheduler.row_pool import RowPool
from control_plane.scheduler.sequence import Sequence, SequenceState
from control_plane.scheduler.types import RequestId, WorkerLimits
from control_plane.scheduler.waiting_queue import WaitingQueue

by_order = attrgetter("order")


class Roster:
    """Every sequence of one worker."""

    def __init__(self, limits: WorkerLimits) -> None:
        self.block_size = limits.block_size
        self.pool = BlockPool(limits.num_blocks)
        self.cache = PrefixCache(self.pool, limits.block_size)
        self.slots = AdapterSlots(limits.num_slots, limits.arena_bytes)
        self.waiting = WaitingQueue(self.slots.is_admissible)
        self.rows = RowPool(limits.max_rows)
        self.running: list[Sequence] = []  # those that hold a row, DRAINING ones included, in order of arrival
        self.sequences: dict[RequestId, Sequence] = {}  # live requests; ended ones leave it at once
        self.num_draining = 0  # of running
        self.num_preemptions = 0  # in all
        self._purged: set[str] = set()  # digests whose blocks are kept out of the cache until nothing of them is left

    # ---- coming ----

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that is not known yet."""
        self.sequences[sequence.request.request_id] = sequence
        adapter = sequence.request.adapter
        if adapter is not None and adapter.digest in self._purged:
            self._purged.discard(adapter.digest)
            self.slots.unretire(adapter.digest)
        self.queue(sequence)

    def queue(self, sequence: Sequence) -> None:
        """Let it wait for admission, in its place by arrival."""
        sequence.state = SequenceState.WAITING
        if sequence.request.adapter is not None:
            self.slots.want(sequence.request.adapter)
        self.waiting.add(sequence)

    def unqueue(self, sequence: Sequence) -> None:
        """It waits no more; the caller says what it does instead."""
        self.waiting.remove(sequence)
        if sequence.request.adapter is not None:
            self.slots.unwant(sequence.request.adapter.digest)

    def hold(self, sequence: Sequence) -> None:
        """Keep a sequence whose reader is slow from being scheduled."""
        if sequence.is_paused:
            return
        sequence.is_paused = True
        if sequence.state is SequenceState.WAITING:
            self.unqueue(sequence)
            sequence.state = SequenceState.HELD

    def unhold(self, sequence: Sequence) -> None:
        """Its reader reads again."""
        if not sequence.is_paused:
            return
        sequence.is_paused = False
        if sequence.state is SequenceState.HELD:
            self.queue(sequence)

    def offer_adapters(self) -> None:
        """Let requests take part whose adapters became admissible."""
        for digest in self.slots.drain_admissible_again():
            self.waiting.offer(digest)

    def register(self, sequence: Sequence) -> None:
        """Offer its computed full blocks to the prefix cache."""
        self.cache.register(sequence, keep=sequence.digest not in self._purged)
        sequence.register_at = (sequence.num_registered + 1) * self.block_size

    # ---- leaving ----

    def preempt(self, sequence: Sequence) -> None:
        """Take the row away; the sequence waits again once its unanswered plans are answered."""
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._drain(sequence)

    def end(self, sequence: Sequence) -> None:
        """The request is over: forget it, and give back what it holds as soon as no unanswered plan names it."""
        del self.sequences[sequence.request.request_id]
        sequence.is_ended = True
        if sequence.state is SequenceState.WAITING:
            self.unqueue(sequence)
        if sequence.state is SequenceState.RUNNING:
            self._drain(sequence)
        elif sequence.state is SequenceState.DRAINING:
            if sequence.num_in_flight == 0:
                self.leave(sequence)
        else:
            sequence.state = SequenceState.GONE
        self.close_purges()

    def _drain(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.DRAINING
        self.num_draining += 1
        if sequence.num_in_flight == 0:
            self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Give back row, blocks and lease; whoever has not ended waits again."""
        self.running.remove(sequence)
        self.num_draining -= 1
        self.pool.release(sequence.block_ids)
        self.rows.give_back(sequence.row)
        if sequence.slot_idx is not None:
            self.slots.release(sequence.slot_idx)
        sequence.leave_row()
        if sequence.is_ended:
            sequence.state = SequenceState.GONE
        elif sequence.is_paused:
            sequence.state = SequenceState.HELD
        else:
            self.queue(sequence)
        self.close_purges()

    # ---- adapters on their way out ----

    def purge(self, digest: str) -> None:
        """Forget the adapter's cached blocks, cache none of its live requests', and evict its slot once unused."""
        self.cache.purge(digest)
        self.slots.retire(digest)
        self._purged.add(digest)
        self.close_purges()

    def has_digest(self, digest: str) -> bool:
        """Whether a live or leaving request, a slot or a cached block has this adapter."""
        return self._is_in_use(digest) or self.cache.has_digest(digest)

    def close_purges(self) -> None:
        """Forget that an adapter is being purged once nothing of it is left."""
        for digest in [digest for digest in self._purged if not self._is_in_use(digest)]:
            self._purged.discard(digest)
            self.slots.unretire(digest)

    def _is_in_use(self, digest: str) -> bool:
        return (
            self.slots.has_digest(digest)
            or any(sequence.digest == digest for sequence in self.running)
            or any(sequence.digest == digest for sequence in self.sequences.values())
        )
