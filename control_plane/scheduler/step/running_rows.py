"""The rows of the worker that sequences hold: taking and leaving them, and which of them decode."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.memory.adapter_purge import AdapterPurge
from control_plane.scheduler.memory.adapter_slots import AdapterSlots
from control_plane.scheduler.memory.block_pool import BlockPool
from control_plane.scheduler.memory.prefix_cache import PrefixCache
from control_plane.scheduler.memory.row_pool import RowPool
from control_plane.scheduler.queues.request_queues import RequestQueues
from control_plane.scheduler.requests.sequence import Row, Sequence
from control_plane.scheduler.requests.states import GroupState, SequenceState
from control_plane.scheduler.requests.transitions import drop_row, move_group, move_row, take_row
from control_plane.scheduler.step.decode_batch import DecodeBatch, by_progress
from control_plane.scheduler.types import SlotRef, SlotUse, WorkerLimits

_by_order = attrgetter("sequence.group.order")  # order of arrival of the request that holds the row


class RunningRows:
    """Rows that are held, in order of arrival of their requests."""

    def __init__(
        self,
        limits: WorkerLimits,
        pool: BlockPool,
        cache: PrefixCache,
        slots: AdapterSlots,
        purge: AdapterPurge,
        queues: RequestQueues,
        counters: VirtualCounters,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._slots = slots
        self._purge = purge
        self._queues = queues
        self._counters = counters
        self._block_size = limits.block_size
        self.free = RowPool(limits.max_rows)
        self.held: list[Row] = []  # in order of arrival, LEAVING ones too
        # The held rows that the next plan may decode, and the held rows that still prefill.
        self._decode_batch: DecodeBatch | None = None  # None: a row joined or left it since
        self._prefilling: list[Row] = []
        self.num_leaving = 0  # of the held rows
        self.num_groups = 0  # requests that hold rows
        self.num_ending_groups = 0  # of these, requests that are over
        self.num_wanting_logprobs = 0  # of the held rows: those whose results come with log-probabilities

    def regroup(self) -> None:
        """A row begins or ends to decode, or to prefill: look again which do before the next plan."""
        self._decode_batch = None

    def grouped(self) -> tuple[DecodeBatch, list[Row]]:
        """Rows that the next plan may decode, and rows before the end of their prefill, in order of arrival."""
        batch = self._decode_batch
        if batch is None:
            decoding, self._prefilling = by_progress(self.held)
            batch = self._decode_batch = DecodeBatch(decoding)
        return batch, self._prefilling

    def take(self, sequence: Sequence, state: SequenceState) -> Row:
        """Give the sequence the lowest free row and a lease of its adapter's slot, which must be admissible."""
        group = sequence.group
        request = sequence.request
        row_idx = self.free.take()
        if request.composition is None:
            slot = None if request.adapter is None else self._lease(request.adapter.digest)
            row = Row(sequence, row_idx, None if slot is None else slot.slot_idx, state)
        else:
            slot, *further = [self._lease(ref.digest) for ref in request.adapters]
            row = Row(sequence, row_idx, slot.slot_idx, state, tuple(each.slot_idx for each in further))
        take_row(sequence, row)
        move_group(group, GroupState.RUNNING)
        if group.num_rows == 0:
            self.num_groups += 1
            self._counters.run(group.request.account)
        group.note_row_taken(slot, self._ready_s(row))
        self.num_wanting_logprobs += sequence.wants_logprobs
        insort(self.held, row, key=_by_order)
        self.regroup()
        return row

    def _lease(self, digest: str) -> SlotRef:
        slot = self._slots.lease(digest)
        if slot.num_leases == 1:
            self._queues.waiting.mark_ready(digest)  # the adapter became active
        return SlotRef(slot.slot_idx, slot.generation)

    def _ready_s(self, row: Row) -> float | None:
        """When the last of the row's adapters was loaded; None without one."""
        if row.slot_idx is None:
            return None
        return max(self._slots.slots[slot_idx].ready_s for slot_idx in (row.slot_idx, *row.further_slots))

    def slot_generation(self, row: Row) -> int:
        """Generation of the slot that the row leases, 0 without one."""
        return 0 if row.slot_idx is None else self._slots.slots[row.slot_idx].generation

    def slot_uses(self, row: Row) -> tuple[SlotUse, ...]:
        """The slots that the row combines, or the one that it scales; empty for all other rows."""
        composition = row.sequence.request.composition
        if composition is None or row.slot_idx is None:
            return ()
        slots = (row.slot_idx, *row.further_slots)
        return tuple(
            SlotUse(slot_idx, self._slots.slots[slot_idx].generation, use.scale)
            for slot_idx, use in zip(slots, composition.uses, strict=True)
        )

    def register(self, row: Row) -> None:
        """Offer its computed full blocks to the prefix cache, unless a plan moved them to host memory meanwhile."""
        if row.moved_block_ids:
            return
        self._cache.register(row, keep=self._purge.may_cache(row.sequence.digest))

    def release_copied(self, row: Row) -> None:
        """Give back the block that the row began with a copy of: it was copied, or it will not be."""
        block_id = row.take_copied()
        if block_id is not None:
            self._pool.release([block_id])

    def reserve_again(self, beam: Sequence) -> None:
        """A beam came to nothing: keep its row, and the last of its blocks, for another beam."""
        row = beam.held_row
        assert row.num_in_flight == 0, "a beam is dropped while a step in flight names it"
        *shared, own = row.block_ids
        self._pool.release(shared)
        self.free.restart(row.row_idx)
        kept = Row(beam, row.row_idx, row.slot_idx, SequenceState.RESERVED, row.further_slots, block_ids=[own])
        take_row(beam, kept)
        self.held[self.held.index(row)] = kept
        beam.forget_beam()
        self.regroup()

    def start_leaving(self, row: Row) -> None:
        """Stop planning a row. The row leaves with the last step in flight that names it."""
        if row.state is not SequenceState.LEAVING:
            move_row(row, SequenceState.LEAVING)
            row.look_closely()
            self.num_leaving += 1
            self.regroup()

    def leave(self, row: Row) -> None:
        """Take a leaving row away from its sequence: give back row, blocks and lease."""
        sequence, group = row.sequence, row.sequence.group
        self.held.remove(row)
        self.regroup()
        self.num_leaving -= 1
        self._pool.release(row.block_ids)
        self.release_copied(row)
        if row.is_begun:
            self.free.give_back(row.row_idx)
        else:
            self.free.give_back_unused(row.row_idx)
        if row.slot_idx is not None:
            self._slots.release(row.slot_idx)
            for slot_idx in row.further_slots:
                self._slots.release(slot_idx)
        drop_row(sequence)
        group.note_row_left()
        self.num_wanting_logprobs -= sequence.wants_logprobs
        if group.num_rows == 0:
            self.num_groups -= 1
            self._counters.stop_running(group.request.account)
            if group.is_ended:
                self.num_ending_groups -= 1
