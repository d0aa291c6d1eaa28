"""Requests that wait for admission, in order of arrival, indexed by adapter.

A request whose adapter is not ready is skipped, not waited for: only adapters that may be admitted take part in the
choice of the next one. No operation looks at the whole queue.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from control_plane.scheduler.sequence_group import SequenceGroup

_order = attrgetter("order")


class WaitingQueue:
    """Waiting groups; `is_admissible` says which adapters (None: base) may be admitted at the moment."""

    def __init__(self, is_admissible: Callable[[str | None], bool]) -> None:
        self._is_admissible = is_admissible
        self._by_digest: dict[str | None, list[SequenceGroup]] = {}  # each sorted by order, none empty
        # Invariant: the front of every admissible adapter's list is here; entries that are no such front are stale
        # and dropped when they come up.
        self._fronts: list[tuple[tuple[float, int], str | None]] = []
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[SequenceGroup]:
        for groups in self._by_digest.values():
            yield from groups

    def of_digest(self, digest: str | None) -> list[SequenceGroup]:
        """Those that wait with this adapter, in order of arrival."""
        return list(self._by_digest.get(digest, ()))

    def add(self, group: SequenceGroup) -> None:
        """Put a group in its place by arrival."""
        groups = self._by_digest.setdefault(group.digest, [])
        insort(groups, group, key=_order)
        self._len += 1
        if groups[0] is group:
            self.offer(group.digest)

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out, wherever it stands."""
        groups = self._by_digest[group.digest]
        idx = bisect_left(groups, group.order, key=_order)
        assert groups[idx] is group, f"request {group.request.request_id} is not where the queue keeps it"
        del groups[idx]
        self._len -= 1
        if not groups:
            del self._by_digest[group.digest]
        elif idx == 0:
            self.offer(group.digest)

    def offer(self, digest: str | None) -> None:
        """Let the front of this adapter's list take part; called when the adapter becomes admissible, too."""
        groups = self._by_digest.get(digest)
        if groups and self._is_admissible(digest):
            heapq.heappush(self._fronts, (groups[0].order, digest))
            if len(self._fronts) > 64 + 4 * len(self._by_digest):
                self._rebuild()

    def peek(self) -> SequenceGroup | None:
        """The earliest arrival that may be admitted, or None."""
        while self._fronts:
            order, digest = self._fronts[0]
            groups = self._by_digest.get(digest)
            if groups and groups[0].order == order and self._is_admissible(digest):
                return groups[0]
            heapq.heappop(self._fronts)
        return None

    def check_invariants(self) -> None:
        """Raise AssertionError if order, counts or fronts are wrong."""
        fronts = set(self._fronts)
        for digest, groups in self._by_digest.items():
            orders = [group.order for group in groups]
            assert orders and orders == sorted(set(orders)), f"the waiting list of {digest} is empty or out of order"
            assert all(group.digest == digest for group in groups), f"a stranger waits in the list of {digest}"
            if self._is_admissible(digest):
                assert (orders[0], digest) in fronts, f"adapter {digest} may be admitted but is not offered"
        assert self._len == sum(map(len, self._by_digest.values())), "the waiting queue miscounts"

    def _rebuild(self) -> None:
        self._fronts = [(s[0].order, digest) for digest, s in self._by_digest.items() if self._is_admissible(digest)]
        heapq.heapify(self._fronts)
