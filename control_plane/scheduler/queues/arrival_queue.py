"""Requests that wait for admission, strictly by arrival: the first request holds up all others.

For the policy FCFS, which is there to compare with; it has the methods of WaitingQueue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.requests.sequence import SequenceGroup
from control_plane.scheduler.types import RequestId, has_adapter


def _order(group: SequenceGroup) -> tuple[float, int]:
    return group.order


class ArrivalQueue:
    """Waiting requests of all tenants in one list."""

    def __init__(self, counters: VirtualCounters, *, is_admissible: Callable[[str | None], bool]) -> None:
        self._counters = counters
        self._is_admissible = is_admissible
        self._groups: list[SequenceGroup] = []
        self.aside: dict[RequestId, SequenceGroup] = {}  # always empty: no request overtakes another

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)

    @property
    def urgent_digest(self) -> str | None:
        """Adapter of the first request, which no other overtakes; None: the base model, or no request waits."""
        return self._groups[0].digest if self._groups else None

    def of_digest(self, digest: str | None) -> list[SequenceGroup]:
        """Requests that wait with this adapter, in order of arrival."""
        return [group for group in self._groups if has_adapter(group.digest, digest)]

    def add(self, group: SequenceGroup) -> None:
        """Put a request in its place by arrival."""
        self._counters.wait(group.request.account)
        insort(self._groups, group, key=_order)

    def remove(self, group: SequenceGroup) -> None:
        """Take a request out, wherever it is."""
        idx = bisect_left(self._groups, group.order, key=_order)
        assert self._groups[idx] is group, f"request {group.request.request_id} is not where the queue keeps it"
        del self._groups[idx]
        self._counters.stop_waiting(group.request.account)

    def mark_ready(self, digest: str | None) -> None:
        """Nothing to do: `peek` always looks at the first request."""

    def peek(self, *, may_be_long: bool = True) -> SequenceGroup | None:  # noqa: ARG002 (as WaitingQueue's)
        """The first request if its adapter may be admitted, else None."""
        return self._groups[0] if self._groups and self._is_admissible(self._groups[0].digest) else None

    def set_aside(self, group: SequenceGroup) -> bool:  # noqa: ARG002 (as WaitingQueue's)
        """Returns False: no request overtakes another."""
        return False

    def is_long(self, group: SequenceGroup) -> bool:  # noqa: ARG002 (as WaitingQueue's)
        """Returns False: long prompts are not a size class of their own here."""
        return False

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits that could be admitted with enough room."""
        return self.peek() is not None

    def peek_active(self, instead_of: SequenceGroup) -> SequenceGroup | None:  # noqa: ARG002 (as WaitingQueue's)
        """Returns None: no request overtakes another."""
        return None

    def check_invariants(self) -> None:
        """Raise AssertionError if the queue is out of order."""
        orders = [group.order for group in self._groups]
        assert orders == sorted(set(orders)), "the queue is out of order"
