"""Which adapter is in which slot of the worker, how many rows use it, what is loaded and evicted next.

A slot goes EMPTY -> LOADING -> READY -> EVICTING -> EMPTY; commands go out on the left arrows, the worker's reports
move it on. A lease is one row that uses the slot; such a row is held until the results of all steps in flight that
name it have come. So no step in flight names a slot without leases, and the slot may be evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Set

from control_plane.scheduler.memory.adapter_demands import AdapterDemands
from control_plane.scheduler.memory.adapter_slot import Slot, SlotState, no_room_beside_pinned, reported_slot
from control_plane.scheduler.memory.free_ids import FreeIds
from control_plane.scheduler.memory.load_queue import AdapterDemand
from control_plane.scheduler.types import (
    SET_SEPARATOR,
    AdapterRef,
    AdapterTier,
    EvictSlot,
    LoadSlot,
    SlotCommand,
    digests_of,
)

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


class AdapterSlots:
    """The slot table of one worker: which adapter is in which slot, which loads and evictions come next."""

    def __init__(self, num_slots: int, arena_bytes: int, demands: AdapterDemands, *, is_strict: bool = False) -> None:
        """`is_strict`: no request overtakes the first in the queue, so its adapter goes before all others."""
        self._demands = demands
        demands.is_placed = self.is_placed
        self._is_strict = is_strict
        self.arena_bytes = arena_bytes
        self.num_slots = num_slots
        self.slots: list[Slot] = []  # those that were ever filled
        self.used_bytes = 0  # of slots that are not EMPTY
        self.is_blocked = False  # at the last `place`, some adapter found neither room nor an idle slot to evict
        self._evicting_bytes = 0
        self._num_evicting = 0
        self._empty = FreeIds(num_slots)
        self._by_digest: dict[str, Slot] = {}  # LOADING and READY
        # Invariant: READY slots without leases, least recently used first.
        self._idle: OrderedDict[int, Slot] = OrderedDict()
        self._num_loading = 0
        self._closed: list[Slot] = []
        self.pinned: frozenset[str] = frozenset()  # digests not to be evicted, whether they lie in a slot or not
        self._unloading: set[str] = set()  # digests to evict as soon as they are idle
        self._commands: list[SlotCommand] = []
        self._admissible_again: list[str] = []
        self._urgent_digest: str | None = None  # at the last `place`
        self._is_dirty = False  # something changed that `place` should look at

    # ---- which adapters requests may use ----

    def is_placed(self, digest: str) -> bool:
        """Whether a slot loads or holds the adapter."""
        return digest in self._by_digest

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
        self._idle.pop(slot.slot_idx, None)
        slot.num_leases += 1
        slot.was_leased = True
        return slot

    def release(self, slot_idx: int) -> None:
        """A request gave its row back."""
        slot = self.slots[slot_idx]
        assert slot.num_leases > 0, f"slot {slot_idx} is released but has no lease"
        slot.num_leases -= 1
        if slot.num_leases == 0:
            self._idle[slot_idx] = slot
            self._is_dirty = True

    def start_unload(self, digest: str) -> None:
        """Evict this adapter as soon as no request uses or demands it, pinned or not."""
        self._unloading.add(digest)
        self._is_dirty = True

    def cancel_unload(self, digest: str) -> None:
        """Treat the adapter like any other again."""
        self._unloading.discard(digest)

    def set_pinned(self, digests: Set[str]) -> None:
        """Keep exactly these adapters from eviction, from when they are in a slot."""
        self._reopen(sorted(digests - self.pinned))
        if digests != self.pinned:
            self.pinned = frozenset(digests)
            self._is_dirty = True

    # ---- what the worker reports ----

    def ready(self, slot_idx: int, generation: int, now_s: float = 0.0) -> None:
        """The load succeeded."""
        slot = reported_slot(self.slots, slot_idx, generation, SlotState.LOADING)
        slot.state = SlotState.READY
        slot.ready_s = now_s
        self._num_loading -= 1
        slot.admissions_before = self._demands.num_admissions
        self._idle[slot_idx] = slot
        self._demands.note_loaded(slot.adapter.digest)
        self._admissible_again.append(slot.adapter.digest)
        self._is_dirty = True

    def empty(self, slot_idx: int, generation: int) -> str:
        """The eviction is done; the digest of what was in the slot."""
        slot = reported_slot(self.slots, slot_idx, generation, SlotState.EVICTING)
        digest = slot.adapter.digest
        self._evicting_bytes -= slot.adapter.arena_bytes
        self._num_evicting -= 1
        self._clear(slot)
        return digest

    def failed(self, slot_idx: int, generation: int, *, is_retryable: bool, now_s: float) -> tuple[str, bool]:
        """The load failed; its digest, and whether requests wait for it and it will not be tried again."""
        slot = reported_slot(self.slots, slot_idx, generation, SlotState.LOADING)
        digest = slot.adapter.digest
        del self._by_digest[digest]
        self._num_loading -= 1
        self._clear(slot)
        return digest, self._demands.note_failure(digest, is_retryable=is_retryable, now_s=now_s)

    # ---- what is done about it ----

    def place(self, urgent_digest: str | None = None) -> list[tuple[str, str]]:
        """Decide on loads and evictions; returns (digest, reason) of adapters that pinned ones leave no room for.

        A set of adapters that has no room together beside the pinned ones is among them with its name.

        Adapters are loaded in the order of load_queue.py, and no more than MAX_LOADING loads are under way. An adapter
        that finds no room lets those behind it pass, until it was overtaken STARVATION_ADMISSIONS times. Then slots are
        closed for it, and nothing else is loaded before it. With strict slots this holds only for `urgent_digest`, and
        at once.
        """
        if urgent_digest != self._urgent_digest:
            self._urgent_digest = urgent_digest
            self._is_dirty = True
        if not (self._is_dirty or self._demands.has_changed) and self._neediest()[1] == bool(self._closed):
            return []
        self._is_dirty = self._demands.has_changed = self.is_blocked = False
        head, is_starving = self._choose_set() if self._demands.sets else self._neediest()
        self._evict([self._by_digest[d] for d in sorted(self._unloading) if self._is_unused(d)])
        if not is_starving:
            self._reopen_all()
        given_up: list[tuple[str, str]] = []
        # Room once all evictions under way are reported, less what earlier demands of this loop reserve of it.
        free_bytes = self.arena_bytes - self.used_bytes + self._evicting_bytes
        free_slots = len(self._empty) + self._num_evicting
        pinned_refs = [slot.adapter for digest, slot in self._by_digest.items() if digest in self.pinned]
        pinned = [ref.arena_bytes for ref in pinned_refs]
        given_up += self._demands.sets.crowded_out(pinned_refs, self.arena_bytes, self.num_slots).items()
        others = [demand for demand in self._demands.next_loads(PREFETCH_LOOKAHEAD) if demand is not head]
        others.sort(key=self._demands.is_only_preloaded)  # what requests wait for goes first
        only_assembling = False  # but to the set that is being assembled
        num_more = MAX_LOADING - self._num_loading - self._num_evicting
        for demand in others if head is None else [head, *others]:
            if num_more <= 0:
                break
            if only_assembling and not self._demands.sets.is_assembling(demand.ref.digest):
                continue
            if len(pinned) == self.num_slots or sum(pinned) + demand.ref.arena_bytes > self.arena_bytes:
                sizes = [*pinned, demand.ref.arena_bytes]
                why = no_room_beside_pinned(1, sizes, self.arena_bytes, self.num_slots)
                given_up.append((demand.ref.digest, why))
                continue
            if is_starving and demand is head:
                self._close_for(demand.ref, free_bytes, free_slots)
            victims = self._idle_victims(demand, free_bytes, free_slots)
            if victims is None:
                self.is_blocked = True
                # The set that is being assembled may hold what this adapter lacks, so it goes on.
                only_assembling = only_assembling or free_slots < 1 or (is_starving and demand is head)
                continue
            free_bytes += self._evict(victims) - demand.ref.arena_bytes
            free_slots += len(victims) - 1
            num_more -= 1
            if self._empty and self.used_bytes + demand.ref.arena_bytes <= self.arena_bytes:
                self._load(demand)
        return given_up

    def take_commands(self) -> list[SlotCommand]:
        """Commands to send, in order; forgotten here."""
        commands, self._commands = self._commands, []
        return commands

    def take_admissible_again(self) -> list[str]:
        """Adapters that became admissible since the last call."""
        digests, self._admissible_again = self._admissible_again, []
        return digests

    def is_changing(self, urgent_digest: str | None) -> bool:
        """Whether a load, an eviction or the retry of a load is to come, or may come of the next `place`."""
        if self._is_dirty or self._demands.has_changed or urgent_digest != self._urgent_digest:
            return True
        return self._num_loading > 0 or self._num_evicting > 0 or self._demands.is_backing_off

    def ready_digests(self) -> set[str]:
        """Adapters that plans may use."""
        return {digest for digest, slot in self._by_digest.items() if slot.state is SlotState.READY}

    def tier(self, ref: AdapterRef) -> AdapterTier:
        """How near the adapter is."""
        slot = self._by_digest.get(ref.digest)
        if slot is not None and slot.state is SlotState.LOADING:
            return AdapterTier.LOADING
        if slot is not None:
            return AdapterTier.NO_ROOM if slot.is_closed else AdapterTier.READY
        has_room = bool(self._empty) and self.used_bytes + ref.arena_bytes <= self.arena_bytes
        return AdapterTier.ABSENT if has_room or self._idle else AdapterTier.NO_ROOM

    def tier_of(self, refs: Iterable[AdapterRef]) -> tuple[AdapterTier, int]:
        """The tier of the one that is farthest from its use, and the bytes of those that are not ready."""
        worst, num_bytes = AdapterTier.READY, 0
        for ref in refs:
            tier = self.tier(ref)
            if tier is not AdapterTier.READY:
                num_bytes += ref.arena_bytes
                worst = max(worst, tier, key=_NEAREST_FIRST.index)
        return worst, num_bytes

    def has_digest(self, digest: str) -> bool:
        """Whether any slot loads, holds or gives up this adapter."""
        return digest in self._by_digest or (
            self._num_evicting > 0
            and any(slot.state is SlotState.EVICTING and slot.adapter.digest == digest for slot in self.slots)
        )

    def check_invariants(
        self, leases: dict[int, int], waiting: dict[str, dict[str, int]], sets: dict[str, dict[str, int]]
    ) -> None:
        """Raise AssertionError if the slots disagree with `leases` by slot.

        Or with `waiting` by digest and account, or `sets` by name and account.
        """
        for slot in self.slots:
            assert (slot.ref is None) == (slot.state is SlotState.EMPTY), f"slot {slot.slot_idx} misstates its adapter"
            assert slot.num_leases == leases.get(slot.slot_idx, 0), f"slot {slot.slot_idx} miscounts its leases"
            assert slot.num_leases == 0 or slot.state is SlotState.READY, f"slot {slot.slot_idx} is leased, not ready"
        used = [slot for slot in self.slots if slot.ref is not None]
        evicting = [slot for slot in used if slot.state is SlotState.EVICTING]
        assert self.used_bytes == sum(slot.adapter.arena_bytes for slot in used) <= self.arena_bytes, "arena bytes"
        assert self._evicting_bytes == sum(slot.adapter.arena_bytes for slot in evicting), "bytes being evicted"
        assert self._num_evicting == len(evicting), "slots being evicted are miscounted"
        empty = [*(s.slot_idx for s in self.slots if s.ref is None), *range(len(self.slots), self.num_slots)]
        assert sorted(self._empty) == empty, "empty slots are miscounted"
        placed = [slot for slot in used if slot.state is not SlotState.EVICTING]
        assert len(placed) == len(self._by_digest), "an adapter lies in two slots"
        assert all(self._by_digest[slot.adapter.digest] is slot for slot in placed), "the index by digest is wrong"
        idle = {slot.slot_idx for slot in placed if slot.state is SlotState.READY and slot.num_leases == 0}
        assert set(self._idle) == idle, "idle slots are miscounted"
        assert self._num_loading == sum(s.state is SlotState.LOADING for s in placed), "slots that load are miscounted"
        self._demands.check_invariants(waiting)
        self._demands.sets.check_invariants(sets)
        assert self._closed == [s for s in self._closed if s.is_closed], "a closed slot is not marked"
        assert not any(slot.adapter.digest in self.pinned for slot in self._closed), "a pinned adapter's slot is closed"
        assert sum(slot.is_closed for slot in self.slots) == len(self._closed), "closed slots are miscounted"

    # ---- helpers ----

    def _neediest(self) -> tuple[AdapterDemand | None, bool]:
        """The adapter that is placed first, and whether slots are closed for it."""
        if self._is_strict and self._urgent_digest is not None:
            waiting = map(self._demands.unplaced.get, digests_of(self._urgent_digest))
            head = next(filter(None, waiting), None)
            return head, head is not None
        head = self._demands.unplaced.head
        if head is not None and not self._demands.may_close_slots_for(head):
            head = next(filter(self._demands.may_close_slots_for, self._demands.next_loads(PREFETCH_LOOKAHEAD)), None)
        is_starving = head is not None and self._demands.times_overtaken(head) >= STARVATION_ADMISSIONS
        return head, is_starving and not self._is_strict

    def _choose_set(self) -> tuple[AdapterDemand | None, bool]:
        """Choose the set that is being assembled; returns what `_neediest` does then.

        The slots of one that became whole are protected from closing as if they were just loaded: else slots that
        other requests used before would be closed before a request with the set could begin.
        """
        sets = self._demands.sets
        if self._is_strict:
            sets.choose_only(self._urgent_digest)
            return self._neediest()
        whole = sets.end_assembly(self.is_admissible)
        for digest in [] if whole is None else digests_of(whole):
            slot = self._by_digest[digest]
            slot.was_leased, slot.admissions_before = False, self._demands.num_admissions
        head, is_starving = self._neediest()
        if not sets.is_one_assembled:
            starving = head.ref.digest if head is not None and is_starving else None
            sets.choose(self.is_admissible, self._demands.unplaced.counter, starving)
            if sets.is_one_assembled:
                self._reopen(sets.assembled_digests)
                head, is_starving = self._neediest()
        return head, is_starving

    def _may_close(self, slot: Slot) -> bool:
        """Whether a slot may be closed to admissions for another adapter."""
        if slot.state is not SlotState.READY or slot.adapter.digest in self.pinned:
            return False
        if self._demands.sets.is_assembling(slot.adapter.digest):
            return False
        is_old = self._demands.num_admissions - slot.admissions_before >= STARVATION_ADMISSIONS
        return slot.was_leased or is_old or self._is_strict

    def _load(self, demand: AdapterDemand) -> None:
        ref = demand.ref
        slot_idx = self._empty.take()
        if slot_idx == len(self.slots):
            self.slots.append(Slot(slot_idx))
        slot = self.slots[slot_idx]
        slot.state = SlotState.LOADING
        slot.generation += 1
        slot.ref = ref
        slot.was_leased = False
        self.used_bytes += ref.arena_bytes
        self._by_digest[ref.digest] = slot
        self._num_loading += 1
        self._demands.unplaced.charge(demand)
        self._demands.unplaced.remove(ref.digest)
        self._commands.append(LoadSlot(slot.slot_idx, slot.generation, ref.digest, ref.arena_bytes))
        self._is_dirty = True

    def _evict(self, slots: Iterable[Slot]) -> int:
        """Send eviction commands for idle slots; the bytes that will be free."""
        num_bytes = 0
        for slot in slots:
            ref = slot.adapter
            slot.state = SlotState.EVICTING
            num_bytes += ref.arena_bytes
            self._num_evicting += 1
            del self._idle[slot.slot_idx]
            del self._by_digest[ref.digest]
            if slot.is_closed:
                slot.is_closed = False
                self._closed.remove(slot)
            self._commands.append(EvictSlot(slot.slot_idx, slot.generation, ref.digest))
            self._demands.note_evicted(ref.digest)
        self._evicting_bytes += num_bytes
        return num_bytes

    def _clear(self, slot: Slot) -> None:
        self.used_bytes -= slot.adapter.arena_bytes
        slot.state = SlotState.EMPTY
        slot.ref = None
        self._empty.give_back(slot.slot_idx)
        self._is_dirty = True

    def _is_unused(self, digest: str) -> bool:
        slot = self._by_digest.get(digest)
        return slot is not None and slot.slot_idx in self._idle and digest not in self._demands

    def _is_evictable(self, slot: Slot) -> bool:
        """Whether an idle slot may go: not pinned, and not about to be used by waiting requests."""
        digest = slot.adapter.digest
        return digest not in self.pinned and (slot.is_closed or not self._demands.is_held(digest, self.is_admissible))

    def _idle_victims(self, demand: AdapterDemand, free_bytes: int, free_slots: int) -> list[Slot] | None:
        """Least recently used idle slots that make room for an adapter, or None if they cannot.

        Adapters that sets wait for in vain go only for a request that needs one adapter, or for the set that is being
        assembled: then no two sets take turns in evicting each other.
        """
        digest = demand.ref.digest
        num_bytes, num_slots = demand.ref.arena_bytes - free_bytes, 1 - free_slots
        victims: list[Slot] = []
        may_take_all = not self._demands.sets or self._demands.is_held(digest, self.is_admissible)
        candidates = (
            slot
            for slot in self._idle.values()
            if self._is_evictable(slot) and (may_take_all or slot.adapter.digest not in self._demands)
        )
        while num_bytes > 0 or num_slots > 0:
            slot = next(candidates, None)
            if slot is None:
                return None
            victims.append(slot)
            num_bytes -= slot.adapter.arena_bytes
            num_slots -= 1
        return victims

    def _close_for(self, ref: AdapterRef, free_bytes: int, free_slots: int) -> None:
        """Close slots to admissions until, once idle, they make room: those with the fewest users first."""
        going = [slot for slot in self._by_digest.values() if slot.is_closed]
        going += [slot for slot in self._idle.values() if not slot.is_closed and self._is_evictable(slot)]
        num_bytes = ref.arena_bytes - free_bytes - sum(slot.adapter.arena_bytes for slot in going)
        num_slots = 1 - free_slots - len(going)
        open_slots = [slot for slot in self._by_digest.values() if self._may_close(slot) and slot not in going]
        for slot in sorted(open_slots, key=lambda slot: (slot.num_leases, slot.slot_idx)):
            if num_bytes <= 0 and num_slots <= 0:
                break
            slot.is_closed = True
            self._closed.append(slot)
            num_bytes -= slot.adapter.arena_bytes
            num_slots -= 1

    def _reopen_all(self) -> None:
        for slot in self._closed:
            slot.is_closed = False
            self._admissible_again.append(slot.adapter.digest)
        self._closed.clear()

    def _reopen(self, digests: Iterable[str]) -> None:
        """Open the slots of these adapters to admissions again."""
        for slot in filter(None, map(self._by_digest.get, digests)):
            if slot.is_closed:
                slot.is_closed = False
                self._closed.remove(slot)
                self._admissible_again.append(slot.adapter.digest)
