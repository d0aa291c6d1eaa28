"""Requests that wait for admission, and whose turn it is.

A tenant is, here and in all of the scheduler's turns, the account that a request is charged to (Request.account).
Between tenants the least virtual counter decides, inside a tenant the priority and then the arrival. A request whose
adapter is not ready is skipped, not waited for, and so is one that was set aside (backfill.py). No operation looks at
the whole queue: only the fronts of lists by (tenant, adapter) are compared, and only those of adapters that may be
admitted.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.requests.sequence import SequenceGroup
from control_plane.scheduler.types import RequestId

Key = tuple[int, tuple[float, int]]  # place inside a tenant: (-priority, (arrival_s, serial))
Turn = tuple[float, tuple[float, int], str]  # (virtual counter, order of its first request, tenant)
Predicate = Callable[[str | None], bool]  # of an adapter's digest; None: the base model


def queue_key(group: SequenceGroup) -> Key:
    """Place of a request inside its tenant: higher priorities first, then earlier arrivals."""
    return -group.request.priority, group.order


class Fronts:
    """The first of several lists by digest, counting only digests that a predicate allows at the moment."""

    def __init__(self, groups_by_digest: dict[str | None, list[SequenceGroup]], is_allowed: Predicate) -> None:
        self._groups_by_digest = groups_by_digest
        self._is_allowed = is_allowed
        # Invariant: the front of every allowed digest's list is here; entries that are no such front are stale and
        # dropped when they come up.
        self._heap: list[tuple[Key, str | None]] = []

    def mark_ready(self, digest: str | None) -> None:
        """Let the front of this list take part; called when it changed, and when its digest became allowed."""
        groups = self._groups_by_digest.get(digest)
        if groups and self._is_allowed(digest):
            heapq.heappush(self._heap, (queue_key(groups[0]), digest))
            if len(self._heap) > 16 + 4 * len(self._groups_by_digest):
                self._heap = [(queue_key(g[0]), d) for d, g in self._groups_by_digest.items() if self._is_allowed(d)]
                heapq.heapify(self._heap)

    def peek(self) -> SequenceGroup | None:
        """The first of all allowed lists, or None."""
        while self._heap:
            key, digest = self._heap[0]
            groups = self._groups_by_digest.get(digest)
            if groups and queue_key(groups[0]) == key and self._is_allowed(digest):
                return groups[0]
            heapq.heappop(self._heap)
        return None

    def check_invariants(self) -> None:
        """Raise AssertionError if an allowed front is missing."""
        entries = set(self._heap)
        for digest, groups in self._groups_by_digest.items():
            if self._is_allowed(digest):
                assert (queue_key(groups[0]), digest) in entries, f"adapter {digest} is allowed but not offered"


class TenantQueue:
    """One tenant's waiting requests."""

    def __init__(self, is_admissible: Predicate, is_active: Predicate) -> None:
        self.groups_by_digest: dict[str | None, list[SequenceGroup]] = {}  # each sorted by queue_key, none empty
        self.admissible = Fronts(self.groups_by_digest, is_admissible)
        self.active = Fronts(self.groups_by_digest, lambda digest: is_admissible(digest) and is_active(digest))

    def add(self, group: SequenceGroup) -> None:
        """Put a request in its place."""
        groups = self.groups_by_digest.setdefault(group.digest, [])
        insort(groups, group, key=queue_key)
        if groups[0] is group:
            self.mark_ready(group.digest)

    def remove(self, group: SequenceGroup) -> None:
        """Take a request out, wherever it stands."""
        groups = self.groups_by_digest[group.digest]
        idx = bisect_left(groups, queue_key(group), key=queue_key)
        assert groups[idx] is group, f"request {group.request.request_id} is not where the queue keeps it"
        del groups[idx]
        if not groups:
            del self.groups_by_digest[group.digest]
        elif idx == 0:
            self.mark_ready(group.digest)

    def mark_ready(self, digest: str | None) -> None:
        """Let the front of this adapter's list take part where it may."""
        self.admissible.mark_ready(digest)
        self.active.mark_ready(digest)

    def check_invariants(self, tenant: str) -> None:
        """Raise AssertionError if lists or fronts are wrong."""
        for digest, groups in self.groups_by_digest.items():
            keys = [queue_key(group) for group in groups]
            assert keys and keys == sorted(set(keys)), f"the waiting list of {digest} is empty or out of order"
            assert all(g.digest == digest for g in groups), f"a stranger waits in the list of {digest}"
            assert all(g.request.account == tenant for g in groups), f"a stranger waits in the queue of {tenant}"
        self.admissible.check_invariants()
        self.active.check_invariants()


class Line:
    """The queues of all tenants for requests of one kind, and the tenant whose turn it is."""

    def __init__(self, counters: VirtualCounters, is_admissible: Predicate, is_active: Predicate) -> None:
        self._counters = counters
        self._is_admissible = is_admissible
        self._is_active = is_active
        self.by_tenant: dict[str, TenantQueue] = {}  # none empty
        self._tenants_by_digest: dict[str | None, dict[str, None]] = {}  # who waits with it; the values are an order
        # Invariant: every tenant with an admissible front is here with a counter no greater than its own, for a
        # counter never falls; corrected when it comes up.
        self._turns: list[Turn] = []

    def add(self, group: SequenceGroup) -> None:
        """Put a request in its place."""
        tenant = group.request.account
        queue = self.by_tenant.get(tenant)
        if queue is None:
            queue = self.by_tenant[tenant] = TenantQueue(self._is_admissible, self._is_active)
        self._tenants_by_digest.setdefault(group.digest, {})[tenant] = None
        queue.add(group)
        self._enter(tenant)

    def remove(self, group: SequenceGroup) -> None:
        """Take a request out, wherever it stands."""
        tenant = group.request.account
        queue = self.by_tenant[tenant]
        queue.remove(group)
        if group.digest not in queue.groups_by_digest:
            tenants = self._tenants_by_digest[group.digest]
            del tenants[tenant]
            if not tenants:
                del self._tenants_by_digest[group.digest]
        if not queue.groups_by_digest:
            del self.by_tenant[tenant]
        else:
            self._enter(tenant)

    def mark_ready(self, digest: str | None) -> None:
        """Let requests with this adapter take part, which became admissible or active."""
        for tenant in self._tenants_by_digest.get(digest, ()):
            self.by_tenant[tenant].mark_ready(digest)
            self._enter(tenant)

    def peek(self) -> Turn | None:
        """The turn of the tenant that is served next, or None."""
        while self._turns:
            turn = self._turns[0]
            actual = self._turn_of(turn[2])
            if actual == turn:
                return turn
            if actual is None:
                heapq.heappop(self._turns)
            else:
                heapq.heapreplace(self._turns, actual)
        return None

    def front(self, tenant: str) -> SequenceGroup | None:
        """The tenant's first request that may be admitted, or None."""
        queue = self.by_tenant.get(tenant)
        return None if queue is None else queue.admissible.peek()

    def of_digest(self, digest: str | None) -> list[SequenceGroup]:
        """Requests with this adapter."""
        tenants = self._tenants_by_digest.get(digest, ())
        return [group for tenant in tenants for group in self.by_tenant[tenant].groups_by_digest[digest]]

    def __iter__(self) -> Iterator[SequenceGroup]:
        for queue in self.by_tenant.values():
            for groups in queue.groups_by_digest.values():
                yield from groups

    def check_invariants(self) -> None:
        """Raise AssertionError if lists, indexes or turns are wrong."""
        pairs = {(digest, tenant) for tenant, queue in self.by_tenant.items() for digest in queue.groups_by_digest}
        indexed = {(digest, tenant) for digest, tenants in self._tenants_by_digest.items() for tenant in tenants}
        assert pairs == indexed, "the index of tenants by adapter is wrong"
        for tenant, queue in self.by_tenant.items():
            assert queue.groups_by_digest, f"tenant {tenant} waits with nothing"
            queue.check_invariants(tenant)
            actual = self._turn_of(tenant)
            entries = [turn for turn in self._turns if turn[2] == tenant]
            assert actual is None or any(turn[0] <= actual[0] for turn in entries), f"tenant {tenant} gets no turn"

    def _turn_of(self, tenant: str) -> Turn | None:
        front = self.front(tenant)
        return None if front is None else (self._counters.counter(tenant), front.order, tenant)

    def _enter(self, tenant: str) -> None:
        turn = self._turn_of(tenant)
        if turn is not None:
            heapq.heappush(self._turns, turn)
            if len(self._turns) > 16 + 4 * len(self.by_tenant):
                turns = [self._turn_of(tenant) for tenant in self.by_tenant]
                self._turns = [turn for turn in turns if turn is not None]
                heapq.heapify(self._turns)


class WaitingQueue:
    """Waiting requests of all tenants. Long prompts stand in a line of their own, so that short ones can pass them."""

    def __init__(
        self,
        counters: VirtualCounters,
        *,
        is_admissible: Predicate,  # adapters that may be admitted at the moment
        is_active: Predicate,  # adapters that the next step reads anyway
        long_tokens: int,  # requests with more known tokens are long
    ) -> None:
        self._counters = counters
        self._long_tokens = long_tokens
        self._short = Line(counters, is_admissible, is_active)
        self._long = Line(counters, is_admissible, is_active)
        # Invariant: each request that waits is in exactly one of these two.
        self._lines: dict[RequestId, Line] = {}  # the line in which it stands
        self.aside: dict[RequestId, SequenceGroup] = {}  # others pass it; in the order in which they were set aside

    def __len__(self) -> int:
        return len(self._lines) + len(self.aside)

    def __iter__(self) -> Iterator[SequenceGroup]:
        yield from self._short
        yield from self._long
        yield from self.aside.values()

    @property
    def urgent_digest(self) -> str | None:
        """No adapter is urgent here: whoever lacks one is passed."""
        return None

    def of_digest(self, digest: str | None) -> list[SequenceGroup]:
        """Those that wait with this adapter, in order of arrival."""
        aside = [group for group in self.aside.values() if group.digest == digest]
        return sorted(
            self._short.of_digest(digest) + self._long.of_digest(digest) + aside, key=lambda group: group.order
        )

    def add(self, group: SequenceGroup) -> None:
        """Put a request in its place.

        It is long by the first answer that goes on, whose prefill comes first, and stays in its line though that one
        be given up.
        """
        self._counters.wait(group.request.account)
        line = self._lines[group.request.request_id] = self._long if self.is_long(group) else self._short
        line.add(group)

    def remove(self, group: SequenceGroup) -> None:
        """Take a request out, wherever it stands."""
        request_id = group.request.request_id
        if self.aside.pop(request_id, None) is None:
            self._lines.pop(request_id).remove(group)
        self._counters.stop_waiting(group.request.account)

    def set_aside(self, group: SequenceGroup) -> bool:
        """Let others pass a request, as long as it waits: it is in `aside` from here on. Whether that is allowed."""
        request_id = group.request.request_id
        self._lines.pop(request_id).remove(group)
        self.aside[request_id] = group
        return True

    def is_long(self, group: SequenceGroup) -> bool:
        """Whether it is long, by the first answer that goes on."""
        return group.live_members()[0].num_known > self._long_tokens

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits who could be admitted with enough room."""
        return len(self.aside) > 0 or self.peek() is not None

    def mark_ready(self, digest: str | None) -> None:
        """Let requests with this adapter take part, which became admissible or active."""
        self._short.mark_ready(digest)
        self._long.mark_ready(digest)

    def peek(self, *, may_be_long: bool = True) -> SequenceGroup | None:
        """The request whose turn it is, or None."""
        lines = (self._short, self._long) if may_be_long else (self._short,)
        turn = min((turn for line in lines if (turn := line.peek()) is not None), default=None)
        if turn is None:
            return None
        fronts = [front for line in lines if (front := line.front(turn[2])) is not None]
        return min(fronts, key=queue_key)

    def peek_active(self, instead_of: SequenceGroup) -> SequenceGroup | None:
        """The first of the same tenant and kind whose adapter is active, or None."""
        return self._lines[instead_of.request.request_id].by_tenant[instead_of.request.account].active.peek()

    def check_invariants(self) -> None:
        """Raise AssertionError if order, counts, fronts or turns are wrong."""
        self._short.check_invariants()
        self._long.check_invariants()
        standing = [(group.request.request_id, line) for line in (self._short, self._long) for group in line]
        assert len(standing) == len(self._lines) and dict(standing) == self._lines, "a request is in the wrong line"
        assert self._lines.keys().isdisjoint(self.aside), "a request that is set aside stands in a line"
