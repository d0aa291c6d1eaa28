"""Adapters that are loaded before a request needs them."""

from __future__ import annotations

from collections.abc import Iterable

from control_plane.scheduler.memory.adapter_demands import AdapterDemands
from control_plane.scheduler.memory.adapter_purge import AdapterPurge
from control_plane.scheduler.memory.adapter_slot import Room, Slot, SlotState
from control_plane.scheduler.memory.adapter_slots import AdapterSlots
from control_plane.scheduler.types import AdapterRef


class Preloads:
    """The preloads of one worker. Nothing keeps a preloaded adapter in its slot afterwards."""

    def __init__(self, demands: AdapterDemands, slots: AdapterSlots, purge: AdapterPurge, arena_bytes: int) -> None:
        self._demands = demands
        self._slots = slots
        self._purge = purge
        self._arena_bytes = arena_bytes

    def begin(self, ref: AdapterRef, account: str) -> None:
        """Load the adapter if there is room, in turns with other loads of the account.

        An adapter that exceeds the arena, or is being unloaded, is left out.
        """
        if ref.arena_bytes <= self._arena_bytes and not self._purge.is_purged(ref.digest):
            self._demands.preload(ref, account)

    def end(self, digest: str) -> None:
        """Demand the adapter no more unless requests do. A load that was sent goes on."""
        self._demands.end_preload(digest)

    def room_for(self, ref: AdapterRef) -> Room:
        """What is missing for a load that takes nothing from requests and from pins."""
        slots = self._slots
        placed = [slot for slot in slots.slots if slot.state in (SlotState.LOADING, SlotState.READY)]
        leaving = [slot for slot in placed if self._may_leave(slot)]
        staying_bytes = _num_bytes(placed) - _num_bytes(leaving)
        pinned = [slot for slot in placed if slot.adapter.digest in slots.pinned]
        return Room(
            missing_bytes=max(ref.arena_bytes - (slots.arena_bytes - staying_bytes), 0),
            missing_slots=int(len(placed) - len(leaving) >= slots.num_slots),
            pinned_bytes=_num_bytes(pinned),
            pinned_slots=len(pinned),
            arena_bytes=slots.arena_bytes,
            num_slots=slots.num_slots,
        )

    def _may_leave(self, slot: Slot) -> bool:
        """Whether a slot's adapter is idle: no request uses it or waits for it, and it is not pinned."""
        digest = slot.adapter.digest
        is_idle = slot.state is SlotState.READY and slot.num_leases == 0
        return is_idle and digest not in self._slots.pinned and digest not in self._demands

    def ready_digests(self) -> set[str]:
        """The adapters in slots that plans may use."""
        return self._slots.ready_digests()

    def is_open(self, digest: str) -> bool:
        """Whether the preload of an adapter has not ended: it was neither loaded nor did it fail for good."""
        return self._demands.is_preloading(digest)


def _num_bytes(slots: Iterable[Slot]) -> int:
    return sum(slot.adapter.arena_bytes for slot in slots)
