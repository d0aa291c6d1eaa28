"""One adapter slot of a worker, as the slot table (adapter_slots.py) keeps it."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

from control_plane.scheduler.errors import SlotReportMismatch
from control_plane.scheduler.types import AdapterRef


class SlotState(enum.Enum):
    """What is in a slot."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    EVICTING = "evicting"


@dataclass(frozen=True, slots=True)
class Room:
    """What a load lacks that takes the place of idle adapters only, pinned ones excepted."""

    missing_bytes: int  # of the arena
    missing_slots: int  # 0 or 1
    pinned_bytes: int  # of pinned adapters in slots
    pinned_slots: int
    arena_bytes: int  # in all
    num_slots: int  # in all

    def has_pinned_part(self, ref: AdapterRef, part: float) -> bool:
        """Whether pinned adapters take at most this part of arena and slots with one more; the first may take all."""
        if not self.pinned_slots:
            return True
        fits = self.pinned_bytes + ref.arena_bytes <= part * self.arena_bytes
        return fits and self.pinned_slots + 1 <= part * self.num_slots


def no_room_beside_pinned(num_adapters: int, sizes: Collection[int], arena_bytes: int, num_slots: int) -> str:
    """Why a request's adapters have no room. `sizes`: bytes of these and of the pinned ones in slots, each once."""
    what = "its adapter takes" if num_adapters == 1 else f"its {num_adapters} adapters take"
    return (
        f"with the pinned adapters {what} {sum(sizes)} bytes in {len(sizes)} slots, the worker's arena has "
        f"{arena_bytes} in {num_slots} slots; unpin an adapter, or start a worker with larger --arena-bytes and "
        "--num-slots"
    )


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of the worker's table."""

    slot_idx: int
    state: SlotState = SlotState.EMPTY
    generation: int = 0  # counts up with every load
    ref: AdapterRef | None = None  # None exactly while EMPTY
    num_leases: int = 0  # requests that hold a row with it
    was_leased: bool = False  # since it was loaded, or a set that was assembled with it became whole
    admissions_before: int = 0  # requests admitted until then
    ready_s: float = 0.0  # monotonic time when the load ended
    is_closed: bool = False  # closed to admissions, so that a starving adapter gets it

    @property
    def adapter(self) -> AdapterRef:
        """The adapter in it; the slot must not be empty."""
        assert self.ref is not None, f"slot {self.slot_idx} is empty"
        return self.ref


def reported_slot(slots: list[Slot], slot_idx: int, generation: int, expected: SlotState) -> Slot:
    """The slot that a worker reports on; `slots` are those that were ever filled. Raises SlotReportMismatch."""
    if not 0 <= slot_idx < len(slots):
        raise SlotReportMismatch(f"slot {slot_idx}: of the worker's slots only {len(slots)} were ever filled")
    slot = slots[slot_idx]
    if slot.generation != generation or slot.state is not expected:
        raise SlotReportMismatch(
            f"slot {slot_idx}: a report on generation {generation} while {expected.value} was expected, "
            f"but it is {slot.state.value} in generation {slot.generation}"
        )
    return slot
