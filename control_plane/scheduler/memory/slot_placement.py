"""Decides which adapters are loaded into a worker's slots, and which are evicted or kept from new requests for them.

The slots themselves are in adapter_slots.py, the adapters that requests wait for in adapter_demands.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from control_plane.scheduler.memory.adapter_demands import AdapterDemands
from control_plane.scheduler.memory.adapter_slot import Slot, SlotState, no_room_beside_pinned
from control_plane.scheduler.memory.adapter_slots import AdapterSlots
from control_plane.scheduler.memory.load_queue import AdapterDemand
from control_plane.scheduler.types import AdapterRef, AdapterTier, digests_of

# An adapter that waits for a slot lets this many other requests be admitted; then slots are closed for it. Small
# enough that a cold adapter waits for about one full batch, large enough that a load pays. An adapter that was loaded
# and not used yet is protected from closing for the same number of admissions.
STARVATION_ADMISSIONS = 32
# Adapters looked at beyond the first that does not fit, so that a step costs the same however many wait.
PREFETCH_LOOKAHEAD = 16
# Loads, and evictions for loads, under way at once. A worker loads two at a time; those sent wait there in the order in
# which they were sent, and fairness between accounts ends.
MAX_LOADING = 16

_NEAREST_FIRST = list(AdapterTier)


@dataclass(slots=True)
class _Room:
    """Room for loads once all evictions under way are reported, less what earlier loads of this pass take of it."""

    num_bytes: int
    num_slots: int


class SlotPlacement:
    """Loads and evictions of one worker. Adapters are loaded in the order of load_queue.py.

    An adapter that finds no room lets those behind it pass, until it was overtaken STARVATION_ADMISSIONS times: then it
    starves. Slots are closed for it, and nothing else is loaded before it.
    """

    def __init__(self, slots: AdapterSlots, demands: AdapterDemands, *, is_strict: bool = False) -> None:
        """`is_strict`: no request overtakes the first in the queue. So its adapter, and no other, starves at once."""
        self._slots = slots
        self._demands = demands
        self._is_strict = is_strict
        self._urgent_digest: str | None = None  # at the last `place`
        self._unloading: set[str] = set()  # digests to evict as soon as they are idle
        self.is_blocked = False  # at the last `place`, some adapter found neither room nor an idle slot to evict

    def start_unload(self, digest: str) -> None:
        """Evict this adapter as soon as no request uses or demands it, pinned or not."""
        self._unloading.add(digest)
        self._slots.has_changed = True

    def cancel_unload(self, digest: str) -> None:
        """Treat the adapter like any other again."""
        self._unloading.discard(digest)

    def is_changing(self, urgent_digest: str | None) -> bool:
        """Whether a load, an eviction or the retry of a load is to come, or may come of the next `place`."""
        if self._slots.has_changed or self._demands.has_changed or urgent_digest != self._urgent_digest:
            return True
        return self._slots.num_loading > 0 or self._slots.num_evicting > 0 or self._demands.is_backing_off

    def tier_of(self, refs: Iterable[AdapterRef]) -> tuple[AdapterTier, int]:
        """The tier of the one that is farthest from its use, and the bytes of those that are not ready."""
        worst, num_bytes = AdapterTier.READY, 0
        for ref in refs:
            tier = self._tier(ref)
            if tier is not AdapterTier.READY:
                num_bytes += ref.arena_bytes
                worst = max(worst, tier, key=_NEAREST_FIRST.index)
        return worst, num_bytes

    def place(self, urgent_digest: str | None) -> list[tuple[str, str]]:
        """Start loads and evictions; returns (digest, reason) of adapters that pinned ones leave no room for.

        A set of adapters that has no room together beside the pinned ones is among them with its name.
        `urgent_digest`: the adapter, or the set of adapters, of the first request in the queue.
        """
        if urgent_digest != self._urgent_digest:
            self._urgent_digest = urgent_digest
            self._slots.has_changed = True
        has_changed = self._slots.has_changed or self._demands.has_changed
        if not has_changed and self._neediest()[1] == bool(self._slots.closed):
            return []
        self._slots.has_changed = self._demands.has_changed = False
        first, is_starving = self._choose_set() if self._demands.sets else self._neediest()
        self._slots.evict(filter(None, map(self._unused_slot, sorted(self._unloading))))
        if not is_starving:
            self._slots.reopen(list(self._slots.closed))
        return self._load_in_order(first, is_starving=is_starving)

    def _tier(self, ref: AdapterRef) -> AdapterTier:
        slot = next(self._slots.placed([ref.digest]), None)
        if slot is None:
            return AdapterTier.ABSENT if self._slots.has_room(ref) or self._slots.idle else AdapterTier.NO_ROOM
        if slot.state is SlotState.LOADING:
            return AdapterTier.LOADING
        return AdapterTier.NO_ROOM if slot.is_closed else AdapterTier.READY

    # ---- which adapter is first ----

    def _neediest(self) -> tuple[AdapterDemand | None, bool]:
        """The adapter that is placed first, and whether it starves."""
        if self._is_strict and self._urgent_digest is not None:
            waiting = map(self._demands.unplaced.get, digests_of(self._urgent_digest))
            first = next(filter(None, waiting), None)
            return first, first is not None
        first = self._demands.unplaced.head
        if first is not None and not self._demands.may_close_slots_for(first):
            first = next(filter(self._demands.may_close_slots_for, self._demands.next_loads(PREFETCH_LOOKAHEAD)), None)
        is_starving = first is not None and self._demands.times_overtaken(first) >= STARVATION_ADMISSIONS
        return first, is_starving and not self._is_strict

    def _choose_set(self) -> tuple[AdapterDemand | None, bool]:
        """Choose the set that is being assembled; returns what `_neediest` does then.

        The slots of one that became whole are protected from closing as if they were just loaded: else slots that
        other requests used before would be closed before a request with the set could begin.
        """
        sets, is_admissible = self._demands.sets, self._slots.is_admissible
        if self._is_strict:
            sets.choose_only(self._urgent_digest)
            return self._neediest()
        whole = sets.end_assembly(is_admissible)
        for slot in self._slots.placed([] if whole is None else digests_of(whole)):
            slot.was_leased, slot.admissions_before = False, self._demands.num_admissions
        first, is_starving = self._neediest()
        if not sets.is_one_assembled:
            starving = first.ref.digest if first is not None and is_starving else None
            sets.choose(is_admissible, self._demands.unplaced.counter, starving)
            if sets.is_one_assembled:
                self._slots.reopen(self._slots.placed(sets.assembled_digests))
                first, is_starving = self._neediest()
        return first, is_starving

    # ---- loads, and what is evicted for them ----

    def _load_in_order(self, first: AdapterDemand | None, *, is_starving: bool) -> list[tuple[str, str]]:
        """Load adapters while there is room, `first` before all others; returns what `place` does."""
        slots, sets = self._slots, self._demands.sets
        pinned = [slot.adapter for slot in slots.placed(slots.pinned)]
        given_up = list(sets.crowded_out(pinned, slots.arena_bytes, slots.num_slots).items())
        room = _Room(slots.arena_bytes - slots.used_bytes + slots.evicting_bytes, len(slots.free) + slots.num_evicting)
        num_more = MAX_LOADING - slots.num_loading - slots.num_evicting
        self.is_blocked = False
        only_assembling = False  # nothing is loaded any more but the set that is being assembled
        for demand in self._in_order(first):
            if num_more <= 0:
                break
            if only_assembling and not sets.is_assembling(demand.ref.digest):
                continue
            why = self._why_never(demand.ref, pinned)
            if why is not None:
                given_up.append((demand.ref.digest, why))
                continue
            is_starved = is_starving and demand is first
            if is_starved:
                self._close_slots_for(demand.ref, room)
            if self._load(demand, room):
                num_more -= 1
            else:
                self.is_blocked = True
                # The set that is being assembled may hold what this adapter lacks, so it goes on.
                only_assembling = only_assembling or room.num_slots < 1 or is_starved
        return given_up

    def _in_order(self, first: AdapterDemand | None) -> list[AdapterDemand]:
        """The next adapters to load: `first`, then those that requests wait for, then those that are preloaded."""
        others = [demand for demand in self._demands.next_loads(PREFETCH_LOOKAHEAD) if demand is not first]
        others.sort(key=self._demands.is_only_preloaded)
        return others if first is None else [first, *others]

    def _why_never(self, ref: AdapterRef, pinned: list[AdapterRef]) -> str | None:
        """Why the adapter has no room beside the pinned ones, or None if it has."""
        sizes = [*(other.arena_bytes for other in pinned), ref.arena_bytes]
        if len(sizes) <= self._slots.num_slots and sum(sizes) <= self._slots.arena_bytes:
            return None
        return no_room_beside_pinned(1, sizes, self._slots.arena_bytes, self._slots.num_slots)

    def _load(self, demand: AdapterDemand, room: _Room) -> bool:
        """Evict what the adapter needs, and load it. Returns False, and changes nothing, if there is no room.

        If evictions have to be reported first, a later `place` loads it; until then `room` is less by the adapter.
        """
        victims = self._victims(demand, room)
        if victims is None:
            return False
        room.num_bytes += self._slots.evict(victims) - demand.ref.arena_bytes
        room.num_slots += len(victims) - 1
        if self._slots.has_room(demand.ref):
            self._slots.load(demand.ref)
            self._demands.unplaced.charge(demand)
            self._demands.unplaced.remove(demand.ref.digest)
        return True

    def _victims(self, demand: AdapterDemand, room: _Room) -> list[Slot] | None:
        """Least recently used idle slots that make room for an adapter, or None if they cannot."""
        num_bytes, num_slots = demand.ref.arena_bytes - room.num_bytes, 1 - room.num_slots
        candidates = self._evictable_for(demand.ref.digest)
        victims: list[Slot] = []
        while num_bytes > 0 or num_slots > 0:
            slot = next(candidates, None)
            if slot is None:
                return None
            victims.append(slot)
            num_bytes -= slot.adapter.arena_bytes
            num_slots -= 1
        return victims

    def _evictable_for(self, digest: str) -> Iterator[Slot]:
        """Idle slots that may be evicted for this adapter, least recently used first.

        Adapters that sets wait for in vain go only for a request that needs one adapter, or for the set that is being
        assembled: then no two sets take turns in evicting each other.
        """
        may_take_all = not self._demands.sets or self._demands.is_held(digest, self._slots.is_admissible)
        for slot in self._slots.idle.values():
            if self._is_evictable(slot) and (may_take_all or slot.adapter.digest not in self._demands):
                yield slot

    def _is_evictable(self, slot: Slot) -> bool:
        """Whether an idle slot may go: not pinned, and not about to be used by waiting requests."""
        digest = slot.adapter.digest
        if digest in self._slots.pinned:
            return False
        return slot.is_closed or not self._demands.is_held(digest, self._slots.is_admissible)

    def _unused_slot(self, digest: str) -> Slot | None:
        """The slot of an adapter that no request uses or demands, or None."""
        slot = next(self._slots.placed([digest]), None)
        is_unused = slot is not None and slot.slot_idx in self._slots.idle and digest not in self._demands
        return slot if is_unused else None

    # ---- slots that admit no request, so that a starving adapter gets them ----

    def _close_slots_for(self, ref: AdapterRef, room: _Room) -> None:
        """Close slots to admissions until, once idle, they make room: those with the fewest users first."""
        going = [*self._slots.closed]
        going += [slot for slot in self._slots.idle.values() if not slot.is_closed and self._is_evictable(slot)]
        num_bytes = ref.arena_bytes - room.num_bytes - sum(slot.adapter.arena_bytes for slot in going)
        num_slots = 1 - room.num_slots - len(going)
        more = [slot for slot in self._slots.slots if self._may_close(slot) and slot not in going]
        for slot in sorted(more, key=lambda slot: (slot.num_leases, slot.slot_idx)):
            if num_bytes <= 0 and num_slots <= 0:
                break
            self._slots.close(slot)
            num_bytes -= slot.adapter.arena_bytes
            num_slots -= 1

    def _may_close(self, slot: Slot) -> bool:
        """Whether a slot may be closed to admissions for another adapter."""
        if slot.state is not SlotState.READY or slot.adapter.digest in self._slots.pinned:
            return False
        if self._demands.sets.is_assembling(slot.adapter.digest):
            return False
        is_old = self._demands.num_admissions - slot.admissions_before >= STARVATION_ADMISSIONS
        return slot.was_leased or is_old or self._is_strict
