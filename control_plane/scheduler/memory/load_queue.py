"""Adapters that wait for a slot, and which of them is loaded next.

As in the queue of requests, between accounts the least virtual counter decides, here of bytes loaded, and inside an
account the order in which its adapters began to wait. So an account that demands a thousand adapters delays those of
another account by one load.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.types import AdapterRef


@dataclass(slots=True, eq=False)
class AdapterDemand:
    """An adapter that requests in the waiting queue have."""

    ref: AdapterRef
    num_waiting: Counter[str] = field(default_factory=Counter)  # requests by account; no zeros, in order of arrival
    num_failures: int = 0  # loads that failed in a row
    retry_at_s: float = 0.0  # while it is backing off: when it is to be loaded again
    admissions_before: int = 0  # requests admitted until it began to wait for a slot
    place: int = 0  # counts up with every adapter that begins to wait for a slot


class LoadQueue:
    """Adapters that wait for a slot."""

    def __init__(self, counters: VirtualCounters) -> None:
        """`counters` are of its own: bytes loaded for each account."""
        self._counters = counters
        self._demands: dict[str, AdapterDemand] = {}
        # Invariant: an account is here with each demand of these that some of its requests has; none is empty. In the
        # order in which they began to wait for a slot, or in which the account began to demand them.
        self._by_account: dict[str, dict[str, AdapterDemand]] = {}
        self._next_place = 0
        self._head: AdapterDemand | None = None  # the first of next_loads; None: to be computed

    def __len__(self) -> int:
        return len(self._demands)

    def __contains__(self, digest: str) -> bool:
        return digest in self._demands

    def get(self, digest: str) -> AdapterDemand | None:
        """The demand of this adapter if it waits for a slot."""
        return self._demands.get(digest)

    def add(self, demand: AdapterDemand) -> None:
        """Let an adapter wait for a slot."""
        self._next_place += 1
        demand.place = self._next_place
        self._demands[demand.ref.digest] = demand
        for account in demand.num_waiting:
            self._enter(demand, account)

    def remove(self, digest: str) -> None:
        """The adapter does not wait any more. An adapter that does not wait is ignored."""
        demand = self._demands.pop(digest, None)
        if demand is not None:
            for account in demand.num_waiting:
                self._leave(digest, account)

    def add_account(self, demand: AdapterDemand, account: str) -> None:
        """The account begins to demand it. Called whether it waits for a slot or not."""
        if demand.ref.digest in self._demands:
            self._enter(demand, account)

    def remove_account(self, demand: AdapterDemand, account: str) -> None:
        """The account does not demand it any more. Called whether it waits for a slot or not."""
        if demand.ref.digest in self._demands:
            self._leave(demand.ref.digest, account)

    def counter(self, account: str) -> float:
        """Bytes loaded for the account over its weight, as far as they count."""
        return self._counters.counter(account)

    def charge(self, demand: AdapterDemand) -> None:
        """The adapter is loaded now. The account with the least counter of those that demand it is charged."""
        account = min(demand.num_waiting, key=self._counters.counter)
        self._counters.charge_prefill(account, demand.ref.arena_bytes)
        self._head = None

    @property
    def head(self) -> AdapterDemand | None:
        """The adapter that is loaded next, or None."""
        if self._head is None:
            self._head = next(iter(self.next_loads(1)), None)
        return self._head

    def next_loads(self, count: int) -> list[AdapterDemand]:
        """The next adapters to load, at most `count`, in the order in which they would be loaded."""
        ranks = []
        for account, demands in self._by_account.items():
            waiting = iter(demands.values())
            first = next(waiting)
            ranks.append((self._counters.counter(account), first.place, account, first, waiting))
        heapq.heapify(ranks)
        chosen: dict[str, AdapterDemand] = {}
        while ranks and len(chosen) < count:
            counter, _, account, demand, waiting = ranks[0]
            if demand.ref.digest not in chosen:
                chosen[demand.ref.digest] = demand
                counter += self._counters.price_of(account, demand.ref.arena_bytes)
            following = next(waiting, None)
            if following is None:
                heapq.heappop(ranks)
            else:
                heapq.heapreplace(ranks, (counter, following.place, account, following, waiting))
        return list(chosen.values())

    def check_invariants(self) -> None:
        """Raise AssertionError if the index by account is wrong."""
        pairs = {(account, digest) for digest, demand in self._demands.items() for account in demand.num_waiting}
        indexed = {(account, digest) for account, demands in self._by_account.items() for digest in demands}
        assert pairs == indexed and all(self._by_account.values()), "adapters that wait are miscounted by account"
        assert self._head is None or self._head is next(iter(self.next_loads(1))), "another adapter is loaded next"

    def _enter(self, demand: AdapterDemand, account: str) -> None:
        self._head = None
        demands = self._by_account.get(account)
        if demands is None:
            demands = self._by_account[account] = {}
            self._counters.wait(account)
        demands[demand.ref.digest] = demand

    def _leave(self, digest: str, account: str) -> None:
        self._head = None
        demands = self._by_account[account]
        del demands[digest]
        if not demands:
            del self._by_account[account]
            self._counters.stop_waiting(account)
