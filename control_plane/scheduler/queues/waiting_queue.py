"""Requests that wait for admission, and which of them is admitted next.

A tenant is, here and wherever the scheduler is fair, the account that a request is charged to (Request.account).
Between tenants the least virtual counter decides, inside a tenant the priority and then the arrival. A request whose
adapter is not ready is skipped, and so is a request that was set aside (backfill.py). No operation looks at the whole
queue: only the heads of lists by (tenant, adapter) are compared, and only heads whose adapter may be admitted.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.queues.waiting_sets import WaitingSets
from control_plane.scheduler.requests.sequence import SequenceGroup
from control_plane.scheduler.types import RequestId

Key = tuple[int, tuple[float, int]]  # place inside a tenant: (-priority, (arrival_s, serial))
TenantRank = tuple[float, tuple[float, int], str]  # (virtual counter, order of its first request, tenant)
Predicate = Callable[[str | None], bool]  # of an adapter's digest; None: the base model


def queue_key(group: SequenceGroup) -> Key:
    """Place of a request inside its tenant: higher priorities first, then earlier arrivals."""
    return -group.request.priority, group.order


class ReadyHeads:
    """The first of several lists by digest, counting only digests that a predicate allows at the moment."""

    def __init__(self, groups_by_digest: dict[str | None, list[SequenceGroup]], is_allowed: Predicate) -> None:
        self._groups_by_digest = groups_by_digest
        self._is_allowed = is_allowed
        # Invariant: the head of every allowed digest's list is here. Entries that are no such head are stale, and
        # dropped when they come up.
        self._heap: list[tuple[Key, str | None]] = []

    def mark_ready(self, digest: str | None) -> None:
        """Let the head of this list take part; called when the head changed, and when its digest became allowed."""
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
        """Raise AssertionError if an allowed head is missing."""
        entries = set(self._heap)
        for digest, groups in self._groups_by_digest.items():
            if self._is_allowed(digest):
                assert (queue_key(groups[0]), digest) in entries, f"adapter {digest} is allowed but not marked ready"


class TenantQueue:
    """One tenant's waiting requests."""

    def __init__(self, is_admissible: Predicate, is_active: Predicate) -> None:
        self.groups_by_digest: dict[str | None, list[SequenceGroup]] = {}  # each sorted by queue_key, none empty
        self.admissible = ReadyHeads(self.groups_by_digest, is_admissible)
        self.active = ReadyHeads(self.groups_by_digest, lambda digest: is_admissible(digest) and is_active(digest))

    def add(self, group: SequenceGroup) -> None:
        """Put a request in its place."""
        groups = self.groups_by_digest.setdefault(group.digest, [])
        insort(groups, group, key=queue_key)
        if groups[0] is group:
            self.mark_ready(group.digest)

    def remove(self, group: SequenceGroup) -> None:
        """Take a request out, wherever it is."""
        groups = self.groups_by_digest[group.digest]
        idx = bisect_left(groups, queue_key(group), key=queue_key)
        assert groups[idx] is group, f"request {group.request.request_id} is not where the queue keeps it"
        del groups[idx]
        if not groups:
            del self.groups_by_digest[group.digest]
        elif idx == 0:
            self.mark_ready(group.digest)

    def mark_ready(self, digest: str | None) -> None:
        """Let the head of this adapter's list take part wherever its adapter is allowed."""
        self.admissible.mark_ready(digest)
        self.active.mark_ready(digest)

    def check_invariants(self, tenant: str) -> None:
        """Raise AssertionError if lists or heads are wrong."""
        for digest, groups in self.groups_by_digest.items():
            keys = [queue_key(group) for group in groups]
            assert keys and keys == sorted(set(keys)), f"the waiting list of {digest} is empty or out of order"
            assert all(g.digest == digest for g in groups), f"a stranger waits in the list of {digest}"
            assert all(g.request.account == tenant for g in groups), f"a stranger waits in the queue of {tenant}"
        self.admissible.check_invariants()
        self.active.check_invariants()


class SizeClass:
    """The queues of all tenants for requests of one size class, and the tenant that is served next."""

    def __init__(self, counters: VirtualCounters, is_admissible: Predicate, is_active: Predicate) -> None:
        self._counters = counters
        self._is_admissible = is_admissible
        self._is_active = is_active
        self.by_tenant: dict[str, TenantQueue] = {}  # none empty
        self._tenants_by_digest: dict[str | None, dict[str, None]] = {}  # tenants that wait with it, in order
        # Invariant: every tenant with an admissible head is here with a counter no greater than its own, for a
        # counter never falls; corrected when it comes up.
        self._ranks: list[TenantRank] = []

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
        """Take a request out, wherever it is."""
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

    def next_tenant(self) -> TenantRank | None:
        """The rank of the tenant that is served next, or None."""
        while self._ranks:
            rank = self._ranks[0]
            actual = self._rank_of(rank[2])
            if actual == rank:
                return rank
            if actual is None:
                heapq.heappop(self._ranks)
            else:
                heapq.heapreplace(self._ranks, actual)
        return None

    def head(self, tenant: str) -> SequenceGroup | None:
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
        """Raise AssertionError if lists, indexes or ranks are wrong."""
        pairs = {(digest, tenant) for tenant, queue in self.by_tenant.items() for digest in queue.groups_by_digest}
        indexed = {(digest, tenant) for digest, tenants in self._tenants_by_digest.items() for tenant in tenants}
        assert pairs == indexed, "the index of tenants by adapter is wrong"
        for tenant, queue in self.by_tenant.items():
            assert queue.groups_by_digest, f"tenant {tenant} waits with nothing"
            queue.check_invariants(tenant)
            actual = self._rank_of(tenant)
            entries = [rank for rank in self._ranks if rank[2] == tenant]
            assert actual is None or any(rank[0] <= actual[0] for rank in entries), f"tenant {tenant} is never served"

    def _rank_of(self, tenant: str) -> TenantRank | None:
        head = self.head(tenant)
        return None if head is None else (self._counters.counter(tenant), head.order, tenant)

    def _enter(self, tenant: str) -> None:
        rank = self._rank_of(tenant)
        if rank is not None:
            heapq.heappush(self._ranks, rank)
            if len(self._ranks) > 16 + 4 * len(self.by_tenant):
                ranks = [self._rank_of(tenant) for tenant in self.by_tenant]
                self._ranks = [rank for rank in ranks if rank is not None]
                heapq.heapify(self._ranks)


class WaitingQueue:
    """Waiting requests of all tenants. Long prompts are a size class of their own, so that short ones can pass them."""

    def __init__(
        self,
        counters: VirtualCounters,
        *,
        is_admissible: Predicate,  # adapters that may be admitted at the moment
        is_active: Predicate,  # adapters in the running batch
        long_tokens: int,  # requests with more known tokens are long
    ) -> None:
        self._counters = counters
        self._long_tokens = long_tokens
        self._short = SizeClass(counters, is_admissible, is_active)
        self._long = SizeClass(counters, is_admissible, is_active)
        # Invariant: each request that waits is in exactly one of these two.
        self._size_classes: dict[RequestId, SizeClass] = {}  # the size class in which it waits
        self.aside: dict[RequestId, SequenceGroup] = {}  # others pass it; in the order in which they were set aside
        self._sets = WaitingSets()

    def __len__(self) -> int:
        return len(self._size_classes) + len(self.aside)

    def __iter__(self) -> Iterator[SequenceGroup]:
        yield from self._short
        yield from self._long
        yield from self.aside.values()

    @property
    def urgent_digest(self) -> str | None:
        """None: no adapter is urgent here, for a request whose adapter is not ready is skipped."""
        return None

    def of_digest(self, digest: str | None) -> list[SequenceGroup]:
        """Requests that wait with this adapter or set, and with sets that have it, in order of arrival."""
        names = [digest, *self._sets.with_adapter(digest)]
        groups = [group for group in self.aside.values() if group.digest in names]
        for name in names:
            groups += self._short.of_digest(name) + self._long.of_digest(name)
        return sorted(groups, key=lambda group: group.order)

    def add(self, group: SequenceGroup) -> None:
        """Put a request in its place.

        The request counts as long if its first live sequence is long, because that sequence is prefilled first. It
        keeps its size class even if that sequence is cancelled later.
        """
        self._counters.wait(group.request.account)
        self._sets.add(group.digest)
        size_class = self._long if self.is_long(group) else self._short
        self._size_classes[group.request.request_id] = size_class
        size_class.add(group)

    def remove(self, group: SequenceGroup) -> None:
        """Take a request out, wherever it is."""
        request_id = group.request.request_id
        if self.aside.pop(request_id, None) is None:
            self._size_classes.pop(request_id).remove(group)
        self._sets.remove(group.digest)
        self._counters.stop_waiting(group.request.account)

    def set_aside(self, group: SequenceGroup) -> bool:
        """Let others pass a request from here on, as long as it waits: it moves to `aside`. Returns True: allowed."""
        request_id = group.request.request_id
        self._size_classes.pop(request_id).remove(group)
        self.aside[request_id] = group
        return True

    def is_long(self, group: SequenceGroup) -> bool:
        """Whether the first live sequence of a request is long."""
        return group.live_members()[0].num_known > self._long_tokens

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits that could be admitted with enough room."""
        return len(self.aside) > 0 or self.peek() is not None

    def mark_ready(self, digest: str | None) -> None:
        """Let requests with this adapter take part, which became admissible or active."""
        for name in (digest, *self._sets.with_adapter(digest)):
            self._short.mark_ready(name)
            self._long.mark_ready(name)

    def peek(self, *, may_be_long: bool = True) -> SequenceGroup | None:
        """The request that is admitted next, or None."""
        classes = (self._short, self._long) if may_be_long else (self._short,)
        best = min((rank for c in classes if (rank := c.next_tenant()) is not None), default=None)
        if best is None:
            return None
        heads = [head for c in classes if (head := c.head(best[2])) is not None]
        return min(heads, key=queue_key)

    def peek_active(self, instead_of: SequenceGroup) -> SequenceGroup | None:
        """The first request of the same tenant and size class whose adapter is in the running batch, or None."""
        size_class = self._size_classes[instead_of.request.request_id]
        return size_class.by_tenant[instead_of.request.account].active.peek()

    def check_invariants(self) -> None:
        """Raise AssertionError if order, counts, heads or ranks are wrong."""
        self._short.check_invariants()
        self._long.check_invariants()
        waiting = [(group.request.request_id, c) for c in (self._short, self._long) for group in c]
        is_indexed = len(waiting) == len(self._size_classes) and dict(waiting) == self._size_classes
        assert is_indexed, "a request is in the wrong size class"
        assert self._size_classes.keys().isdisjoint(self.aside), "a request that is set aside is in a size class too"
