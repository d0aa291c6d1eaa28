"""Which adapters requests wait for, which of these wait for a slot, and which wait for another try of their load.

A preload demands an adapter without a request, until its load has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.memory.adapter_sets import AdapterSets
from control_plane.scheduler.memory.load_queue import AdapterDemand, LoadQueue
from control_plane.scheduler.types import AdapterRef, Request

# A load that failed, and may succeed later, is tried again after this time, doubled with every failure up to the most.
# Seven attempts span 7.75 s: a store or a cache that is away for 5 s, the time of a restart, only delays.
LOAD_BACKOFF_S = 0.25
MAX_LOAD_BACKOFF_S = 2.0
MAX_LOAD_ATTEMPTS = 7


class AdapterDemands:
    """The demand for each adapter that some waiting request has. slot_placement.py serves it."""

    def __init__(self, counters: VirtualCounters) -> None:
        """`counters` have the accounts' weights."""
        self._demands: dict[str, AdapterDemand] = {}
        # Invariant: a demand whose adapter is in no LOADING or READY slot is in exactly one of these two.
        self.unplaced = LoadQueue(counters.of_other_units())
        self._backing_off: dict[str, AdapterDemand] = {}  # their load failed a moment ago
        self._preloads: dict[str, str] = {}  # digest -> the account for which it is loaded before requests need it
        self.is_placed: Callable[[str], bool] = _is_in_no_slot  # whether a slot loads or holds the adapter
        self.sets = AdapterSets()
        self.num_admissions = 0  # requests admitted in all, those of the base model too
        self.has_changed = False  # since the slot table last looked

    def __contains__(self, digest: str) -> bool:
        return digest in self._demands

    @property
    def is_backing_off(self) -> bool:
        """Whether the load of some adapter will be tried again."""
        return bool(self._backing_off)

    def add_request(self, request: Request) -> None:
        """A request waits for admission with its adapters."""
        refs = request.adapters
        if len(refs) > 1:
            assert request.adapters_name is not None, "several adapters have a name"
            self.sets.add(request.adapters_name, refs, request.account)
            self.has_changed = True
        for ref in refs:
            self.add(ref, request.account)

    def remove_request(self, request: Request) -> None:
        """A request does not wait for admission any more."""
        refs = request.adapters
        if len(refs) > 1:
            assert request.adapters_name is not None, "several adapters have a name"
            self.sets.remove(request.adapters_name, request.account)
            self.has_changed = True
        for ref in refs:
            self.remove(ref.digest, request.account)

    def next_loads(self, count: int) -> list[AdapterDemand]:
        """The next adapters to load, about `count`; those of the set that is being assembled are among them."""
        demands = self.unplaced.next_loads(count)
        missing = map(self.unplaced.get, self.sets.assembled_digests)
        return demands + [demand for demand in missing if demand is not None and demand not in demands]

    def is_held(self, digest: str, is_ready: Callable[[str], bool]) -> bool:
        """Whether an idle adapter is kept for requests that wait. `is_ready`: whether a set is, by name.

        An adapter that a request needs alone is; one that only sets need is kept for a set that is ready, or being
        assembled.
        """
        demand = self._demands.get(digest)
        if demand is None or not self.sets:
            return demand is not None
        return self._is_needed_alone(demand) or self.sets.holds(digest, is_ready)

    def may_close_slots_for(self, demand: AdapterDemand) -> bool:
        """Whether slots may be closed for the adapter.

        They are not for a preload, and not for an adapter that requests need only together with others while another
        set is being assembled: it could not take those slots.
        """
        if self.is_only_preloaded(demand):
            return False
        if not self.sets.is_one_assembled or self.sets.is_assembling(demand.ref.digest):
            return True
        return self._is_needed_alone(demand)

    def add(self, ref: AdapterRef, account: str) -> None:
        """A request of the account waits for admission with this adapter."""
        demand = self._demands.get(ref.digest)
        if demand is None:
            demand = self._demands[ref.digest] = AdapterDemand(ref)
            self.has_changed = True
        demand.num_waiting[account] += 1
        if demand.num_waiting[account] == 1:
            self.unplaced.add_account(demand, account)
            self.has_changed = True
        waits_already = ref.digest in self.unplaced or ref.digest in self._backing_off
        if not waits_already and not self.is_placed(ref.digest):
            self._wait_for_slot(demand)

    def remove(self, digest: str, account: str) -> None:
        """A request of the account with this adapter does not wait any more."""
        demand = self._demands[digest]
        demand.num_waiting[account] -= 1
        if demand.num_waiting[account] > 0:
            return
        if len(demand.num_waiting) == 1:
            del self._demands[digest]
            self.unplaced.remove(digest)
            self._backing_off.pop(digest, None)
        else:
            self.unplaced.remove_account(demand, account)
        del demand.num_waiting[account]
        self.has_changed = True

    def preload(self, ref: AdapterRef, account: str) -> None:
        """Demand the adapter for the account until its load has ended. An adapter in a slot is not demanded."""
        if ref.digest not in self._preloads and not self.is_placed(ref.digest):
            self._preloads[ref.digest] = account
            self.add(ref, account)

    def end_preload(self, digest: str) -> None:
        """No preload demands the adapter any more; one that nobody preloads is ignored."""
        if digest in self._preloads:
            self.remove(digest, self._preloads.pop(digest))

    def is_preloading(self, digest: str) -> bool:
        """Whether a preload of the adapter has not ended."""
        return digest in self._preloads

    def is_only_preloaded(self, demand: AdapterDemand) -> bool:
        """Whether no request waits for the adapter, only a preload."""
        return demand.ref.digest in self._preloads and demand.num_waiting.total() == 1

    def count_admission(self) -> None:
        """A request was admitted: it overtook every adapter that waits for a slot."""
        self.num_admissions += 1

    def times_overtaken(self, demand: AdapterDemand) -> int:
        """Requests that were admitted since the adapter began to wait for a slot."""
        return self.num_admissions - demand.admissions_before

    def note_loaded(self, digest: str) -> None:
        """The adapter was loaded."""
        self.end_preload(digest)
        demand = self._demands.get(digest)
        if demand is not None:
            demand.num_failures = 0

    def note_evicted(self, digest: str) -> None:
        """The adapter leaves its slot: requests that wait for it wait for a slot again."""
        demand = self._demands.get(digest)
        if demand is not None:
            self._wait_for_slot(demand)

    def note_failure(self, digest: str, *, is_retryable: bool, now_s: float) -> bool:
        """The load of the adapter failed; whether requests wait for it and it will not be tried again.

        Otherwise the first `retry_due` after a backoff tries it again.
        """
        demand = self._demands.get(digest)
        if demand is None:
            return False
        demand.num_failures += 1
        if not is_retryable or demand.num_failures >= MAX_LOAD_ATTEMPTS:
            self._wait_for_slot(demand)
            return True
        backoff_s = min(LOAD_BACKOFF_S * 2 ** (demand.num_failures - 1), MAX_LOAD_BACKOFF_S)
        demand.retry_at_s = now_s + backoff_s
        self._backing_off[digest] = demand
        return False

    def retry_due(self, now_s: float) -> None:
        """Let adapters whose backoff is over wait for a slot again."""
        if self._backing_off:
            for digest in [digest for digest, demand in self._backing_off.items() if now_s >= demand.retry_at_s]:
                self._wait_for_slot(self._backing_off.pop(digest))

    def check_invariants(self, waiting: dict[str, dict[str, int]]) -> None:
        """Raise AssertionError if the demands are not those of `waiting`, by digest and account."""
        expected = {digest: Counter(accounts) for digest, accounts in waiting.items()}
        for digest, account in self._preloads.items():
            expected.setdefault(digest, Counter())[account] += 1
        assert {d: demand.num_waiting for d, demand in self._demands.items()} == expected, "demands are miscounted"
        self.unplaced.check_invariants()
        for digest in self._demands:
            places = [digest in self.unplaced, digest in self._backing_off, self.is_placed(digest)]
            assert sum(places) == 1, f"adapter {digest} is in demand and in {sum(places)} places"
        num_waiting = len(self.unplaced) + len(self._backing_off)
        assert num_waiting <= len(self._demands), "an adapter waits for a slot and no request waits for it"

    def _is_needed_alone(self, demand: AdapterDemand) -> bool:
        return demand.num_waiting.total() > self.sets.num_waiting(demand.ref.digest)

    def _wait_for_slot(self, demand: AdapterDemand) -> None:
        demand.admissions_before = self.num_admissions
        self.unplaced.add(demand)
        self.has_changed = True


def _is_in_no_slot(digest: str) -> bool:
    raise AssertionError(f"adapter {digest} is in demand, but no slot table was made")
