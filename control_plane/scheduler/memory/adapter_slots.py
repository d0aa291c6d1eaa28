"""Which adapter is in which slot of the worker, and how many rows use it. slot_placement.py decides what is loaded.

A slot goes EMPTY -> LOADING -> READY -> EVICTING -> EMPTY; commands go out on the left arrows, the worker's reports
move it on. A lease is one row that uses the slot; such a row is held until the results of all steps in flight that
name it have come. So no step in flight names a slot without leases, and the slot may be evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Set

from control_plane.scheduler.memory.adapter_demands import AdapterDemands
from control_plane.scheduler.memory.adapter_slot import Slot, SlotState, reported_slot
from control_plane.scheduler.memory.free_ids import FreeIds
from control_plane.scheduler.types import (
    SET_SEPARATOR,
    AdapterRef,
    EvictSlot,
    LoadSlot,
    SlotCommand,
    digests_of,
)


class AdapterSlots:
    """The slot table of one worker. Only slot_placement.py loads, evicts and closes slots; others read and lease."""

    def __init__(self, num_slots: int, arena_bytes: int, demands: AdapterDemands) -> None:
        self._demands = demands
        demands.is_placed = self.is_placed
        self.arena_bytes = arena_bytes
        self.num_slots = num_slots
        self.slots: list[Slot] = []  # those that were ever filled
        self.used_bytes = 0  # of slots that are not EMPTY
        self.evicting_bytes = 0
        self.num_evicting = 0
        self.free = FreeIds(num_slots)  # slots that are EMPTY
        self._by_digest: dict[str, Slot] = {}  # LOADING and READY
        # Invariant: READY slots without leases, least recently used first.
        self.idle: OrderedDict[int, Slot] = OrderedDict()
        self.num_loading = 0
        self.closed: list[Slot] = []  # to admissions
        self.pinned: frozenset[str] = frozenset()  # digests not to be evicted, whether they lie in a slot or not
        self._commands: list[SlotCommand] = []
        self._admissible_again: list[str] = []
        self.has_changed = False  # since slots were last placed

    # ---- which adapters requests may use ----

    def is_placed(self, digest: str) -> bool:
        """Whether a slot loads or holds the adapter."""
        return digest in self._by_digest

    def placed(self, digests: Iterable[str]) -> Iterator[Slot]:
        """The slots that load or hold these adapters; an adapter in no slot is left out."""
        return filter(None, map(self._by_digest.get, digests))

    def has_room(self, ref: AdapterRef) -> bool:
        """Whether the adapter fits at once, without an eviction."""
        return len(self.free) > 0 and self.used_bytes + ref.arena_bytes <= self.arena_bytes

    def is_admissible(self, digest: str | None) -> bool:
        """Whether a request with this adapter may take a row: the base always, an adapter in an open ready slot.

        Here and in `is_active` it may be the name of a set of adapters: then it counts for all of them.
        """
        if digest is None:
            return True
        slot = self._by_digest.get(digest)
        if slot is not None:
            return slot.state is SlotState.READY and not slot.is_closed
        return SET_SEPARATOR in digest and all(map(self.is_admissible, digests_of(digest)))

    def is_active(self, digest: str | None) -> bool:
        """Whether the adapter is in the running batch, for a row uses it; the base model always is."""
        if digest is None:
            return True
        slot = self._by_digest.get(digest)
        if slot is not None:
            return slot.num_leases > 0
        return SET_SEPARATOR in digest and all(map(self.is_active, digests_of(digest)))

    def lease(self, digest: str) -> Slot:
        """A request takes a row with this adapter, which must be admissible."""
        slot = self._by_digest[digest]
        assert self.is_admissible(digest), f"adapter {digest} is leased but not ready"
        self.idle.pop(slot.slot_idx, None)
        slot.num_leases += 1
        slot.was_leased = True
        return slot

    def release(self, slot_idx: int) -> None:
        """A request gave its row back."""
        slot = self.slots[slot_idx]
        assert slot.num_leases > 0, f"slot {slot_idx} is released but has no lease"
        slot.num_leases -= 1
        if slot.num_leases == 0:
            self.idle[slot_idx] = slot
            self.has_changed = True

    def set_pinned(self, digests: Set[str]) -> None:
        """Keep exactly these adapters from eviction, from when they are in a slot."""
        self.reopen(self.placed(sorted(digests - self.pinned)))
        if digests != self.pinned:
            self.pinned = frozenset(digests)
            self.has_changed = True

    # ---- what the worker reports ----

    def ready(self, slot_idx: int, generation: int, now_s: float = 0.0) -> None:
        """The load succeeded."""
        slot = reported_slot(self.slots, slot_idx, generation, SlotState.LOADING)
        slot.state = SlotState.READY
        slot.ready_s = now_s
        self.num_loading -= 1
        slot.admissions_before = self._demands.num_admissions
        self.idle[slot_idx] = slot
        self._demands.note_loaded(slot.adapter.digest)
        self._admissible_again.append(slot.adapter.digest)
        self.has_changed = True

    def empty(self, slot_idx: int, generation: int) -> str:
        """The eviction is done; the digest of what was in the slot."""
        slot = reported_slot(self.slots, slot_idx, generation, SlotState.EVICTING)
        digest = slot.adapter.digest
        self.evicting_bytes -= slot.adapter.arena_bytes
        self.num_evicting -= 1
        self._clear(slot)
        return digest

    def failed(self, slot_idx: int, generation: int, *, is_retryable: bool, now_s: float) -> tuple[str, bool]:
        """The load failed; its digest, and whether requests wait for it and it will not be tried again."""
        slot = reported_slot(self.slots, slot_idx, generation, SlotState.LOADING)
        digest = slot.adapter.digest
        del self._by_digest[digest]
        self.num_loading -= 1
        self._clear(slot)
        return digest, self._demands.note_failure(digest, is_retryable=is_retryable, now_s=now_s)

    # ---- what slot_placement.py does with slots ----

    def load(self, ref: AdapterRef) -> None:
        """Load an adapter, which must have room, into an empty slot."""
        slot_idx = self.free.take()
        if slot_idx == len(self.slots):
            self.slots.append(Slot(slot_idx))
        slot = self.slots[slot_idx]
        slot.state = SlotState.LOADING
        slot.generation += 1
        slot.ref = ref
        slot.was_leased = False
        self.used_bytes += ref.arena_bytes
        self._by_digest[ref.digest] = slot
        self.num_loading += 1
        self._commands.append(LoadSlot(slot.slot_idx, slot.generation, ref.digest, ref.arena_bytes))
        self.has_changed = True

    def evict(self, slots: Iterable[Slot]) -> int:
        """Evict idle slots; returns the bytes that will be free."""
        num_bytes = 0
        for slot in slots:
            ref = slot.adapter
            slot.state = SlotState.EVICTING
            num_bytes += ref.arena_bytes
            self.num_evicting += 1
            del self.idle[slot.slot_idx]
            del self._by_digest[ref.digest]
            if slot.is_closed:
                slot.is_closed = False
                self.closed.remove(slot)
            self._commands.append(EvictSlot(slot.slot_idx, slot.generation, ref.digest))
            self._demands.note_evicted(ref.digest)
        self.evicting_bytes += num_bytes
        return num_bytes

    def close(self, slot: Slot) -> None:
        """Let no further request lease the slot."""
        slot.is_closed = True
        self.closed.append(slot)

    def reopen(self, slots: Iterable[Slot]) -> None:
        """Let requests lease these slots again; those that are open are left out."""
        for slot in slots:
            if slot.is_closed:
                slot.is_closed = False
                self.closed.remove(slot)
                self._admissible_again.append(slot.adapter.digest)

    # ---- what was done ----

    def take_commands(self) -> list[SlotCommand]:
        """Commands to send, in order; forgotten here."""
        commands, self._commands = self._commands, []
        return commands

    def take_admissible_again(self) -> list[str]:
        """Adapters that became admissible since the last call."""
        digests, self._admissible_again = self._admissible_again, []
        return digests

    def ready_digests(self) -> set[str]:
        """Adapters that plans may use."""
        return {digest for digest, slot in self._by_digest.items() if slot.state is SlotState.READY}

    def has_digest(self, digest: str) -> bool:
        """Whether any slot loads, holds or gives up this adapter."""
        return digest in self._by_digest or (
            self.num_evicting > 0
            and any(slot.state is SlotState.EVICTING and slot.adapter.digest == digest for slot in self.slots)
        )

    def check_invariants(
        self, leases: dict[int, int], waiting: dict[str, dict[str, int]], sets: dict[str, dict[str, int]]
    ) -> None:
        """Raise AssertionError if the slots or the demands disagree with what requests have.

        `leases`: by slot. `waiting`: by digest and account. `sets`: by name and account.
        """
        for slot in self.slots:
            assert (slot.ref is None) == (slot.state is SlotState.EMPTY), f"slot {slot.slot_idx} misstates its adapter"
            assert slot.num_leases == leases.get(slot.slot_idx, 0), f"slot {slot.slot_idx} miscounts its leases"
            assert slot.num_leases == 0 or slot.state is SlotState.READY, f"slot {slot.slot_idx} is leased, not ready"
        used = [slot for slot in self.slots if slot.ref is not None]
        evicting = [slot for slot in used if slot.state is SlotState.EVICTING]
        assert self.used_bytes == sum(slot.adapter.arena_bytes for slot in used) <= self.arena_bytes, "arena bytes"
        assert self.evicting_bytes == sum(slot.adapter.arena_bytes for slot in evicting), "bytes being evicted"
        assert self.num_evicting == len(evicting), "slots being evicted are miscounted"
        empty = [*(s.slot_idx for s in self.slots if s.ref is None), *range(len(self.slots), self.num_slots)]
        assert sorted(self.free) == empty, "empty slots are miscounted"
        placed = [slot for slot in used if slot.state is not SlotState.EVICTING]
        assert len(placed) == len(self._by_digest), "an adapter lies in two slots"
        assert all(self._by_digest[slot.adapter.digest] is slot for slot in placed), "the index by digest is wrong"
        idle = {slot.slot_idx for slot in placed if slot.state is SlotState.READY and slot.num_leases == 0}
        assert set(self.idle) == idle, "idle slots are miscounted"
        assert self.num_loading == sum(s.state is SlotState.LOADING for s in placed), "slots that load are miscounted"
        self._demands.check_invariants(waiting)
        self._demands.sets.check_invariants(sets)
        assert self.closed == [s for s in self.closed if s.is_closed], "a closed slot is not marked"
        assert not any(slot.adapter.digest in self.pinned for slot in self.closed), "a pinned adapter's slot is closed"
        assert sum(slot.is_closed for slot in self.slots) == len(self.closed), "closed slots are miscounted"

    # ---- helpers ----

    def _clear(self, slot: Slot) -> None:
        self.used_bytes -= slot.adapter.arena_bytes
        slot.state = SlotState.EMPTY
        slot.ref = None
        self.free.give_back(slot.slot_idx)
        self.has_changed = True
