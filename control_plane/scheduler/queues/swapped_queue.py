"""Requests whose blocks are in host memory, and which of them returns next."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.memory.adapter_slots import AdapterSlots
from control_plane.scheduler.queues.waiting_queue import Key, queue_key
from control_plane.scheduler.requests.sequence import SequenceGroup

_by_order = attrgetter("order")


class SwappedQueue:
    """Swapped requests in order of arrival. Few, for host memory bounds them."""

    def __init__(self, slots: AdapterSlots, counters: VirtualCounters) -> None:
        self._slots = slots
        self._counters = counters
        self._groups: list[SequenceGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)

    def add(self, group: SequenceGroup) -> None:
        """Let a request wait for its return."""
        insort(self._groups, group, key=_by_order)

    def remove(self, group: SequenceGroup) -> None:
        """Take a request out, wherever it is."""
        self._groups.remove(group)

    def peek(self) -> SequenceGroup | None:
        """The request that returns next, of those that are not paused and whose adapter may be used, or None.

        As in the waiting queue: the tenant with the least service, there the highest priority, there the first arrival.
        """
        able = (group for group in self._groups if not group.is_paused and self._slots.is_admissible(group.digest))
        return min(able, key=self._rank, default=None)

    def _rank(self, group: SequenceGroup) -> tuple[float, Key]:
        return self._counters.counter(group.request.account), queue_key(group)
