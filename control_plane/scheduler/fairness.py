"""Virtual token counters: which of the tenants that wait is served next.

Every tenant has a counter of the service that it got: weighted tokens over its weight. The waiting tenant with the
least counter is served next. One object is shared by all schedulers of the process, so that a tenant is counted once
over all workers. Method: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2 and its
weighted form: two tenants that both wait all the time differ in service over weight by no more than 2 x max(prefill of
the longest prompt, decode of all tokens that run at once).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

# Prices of the paper and of S-LoRA: a token that is generated costs about twice one that is read.
PREFILL_WEIGHT = 1.0
DECODE_WEIGHT = 2.0
# Up to this many accounts are always kept. Above it, an idle account is dropped if re-creating it would give the same
# counter. An account with running requests is not idle: what these are charged would be forgotten too.
MIN_KEPT_TENANTS = 1024


@dataclass(slots=True)
class Tenant:
    """The account of one tenant."""

    weight: float  # share of service, against the others' weights
    counter: float = 0.0  # virtual: weighted tokens over weight, lifts included; never falls
    num_waiting: int = 0  # requests that wait to be admitted, over all workers
    num_running: int = 0  # requests that hold rows or host blocks, over all workers: they are charged for
    is_listed: bool = False  # among those whose counters are compared
    num_prefill_tokens: int = 0  # service in all, tokens
    num_decode_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TenantStats:
    """One tenant at one moment."""

    tenant: str
    weight: float
    counter: float  # virtual tokens
    num_waiting: int  # requests
    num_prefill_tokens: int  # total
    num_decode_tokens: int  # total


class VirtualCounters:
    """Accounts of all tenants, made as they come."""

    def __init__(self, weights: Mapping[str, float] | None = None, *, default_weight: float = 1.0) -> None:
        """Raises ValueError for a weight that is not a finite number above zero."""
        self._weights = dict(weights or {})
        for name, weight in [*self._weights.items(), ("default_weight", default_weight)]:
            if not 0 < weight < float("inf"):
                raise ValueError(f"{name}: weight {weight} is not a finite number above 0")
        self._default_weight = default_weight
        self._tenants: dict[str, Tenant] = {}
        self._max_tenants = MIN_KEPT_TENANTS  # accounts at which idle ones are forgotten
        # Every waiting tenant is here once, at a counter that it had; a counter never falls, so the front is corrected
        # when it is looked at.
        self._waiting: list[tuple[float, str]] = []
        self._last_tenant: str | None = None  # the last to stop waiting; its account is kept

    @property
    def num_waiting_by_tenant(self) -> dict[str, int]:
        """Requests that wait to be admitted, over all workers, of every tenant that has some."""
        counts = {name: self._tenants[name].num_waiting for _, name in self._waiting}
        return {name: count for name, count in counts.items() if count > 0}

    def num_running(self, tenant: str) -> int:
        """Requests of the tenant that hold rows, over all workers."""
        account = self._tenants.get(tenant)
        return 0 if account is None else account.num_running

    def counter(self, tenant: str) -> float:
        """The tenant's virtual counter."""
        return self._tenant(tenant).counter

    def price_of(self, tenant: str, num_tokens: int) -> float:
        """What computing `num_tokens` of a prompt adds to the tenant's counter."""
        return PREFILL_WEIGHT * num_tokens / self._tenant(tenant).weight

    def of_other_units(self) -> VirtualCounters:
        """Accounts with the same weights, all at zero, to count something else."""
        return VirtualCounters(self._weights, default_weight=self._default_weight)

    def wait(self, tenant: str) -> None:
        """One more of its requests waits. A tenant that comes back is lifted: idle time gives no credit.

        Its counter is lifted to the least counter of the tenants that wait. If none waits, it is lifted to the present
        counter of the tenant that waited last.
        """
        account = self._tenant(tenant)
        if account.num_waiting == 0:
            account.counter = max(account.counter, self._floor())
            if not account.is_listed:
                account.is_listed = True
                heapq.heappush(self._waiting, (account.counter, tenant))
        account.num_waiting += 1

    def stop_waiting(self, tenant: str) -> None:
        """One of its requests does not wait any more."""
        account = self._tenants[tenant]
        assert account.num_waiting > 0, f"tenant {tenant} stops waiting but has no request that waits"
        account.num_waiting -= 1
        if account.num_waiting == 0:
            self._last_tenant = tenant

    def run(self, tenant: str) -> None:
        """One of its requests took rows, or went to host memory."""
        self._tenant(tenant).num_running += 1

    def stop_running(self, tenant: str) -> None:
        """One of its requests gave its rows back, left host memory, or lost its worker."""
        account = self._tenants[tenant]
        assert account.num_running > 0, f"tenant {tenant} stops running but has no request that holds any"
        account.num_running -= 1

    def charge_prefill(self, tenant: str, num_tokens: int) -> None:
        """The tenant gets this many tokens of a prompt computed."""
        account = self._tenant(tenant)
        account.num_prefill_tokens += num_tokens
        account.counter += self.price_of(tenant, num_tokens)

    def charge_decode(self, tenant: str, num_tokens: int) -> None:
        """The tenant got this many generated tokens."""
        account = self._tenant(tenant)
        account.num_decode_tokens += num_tokens
        account.counter += DECODE_WEIGHT * num_tokens / account.weight

    def charge_idle(self, tenant: str, num_rows: int) -> None:
        """Charge a tenant for rows that one step kept free for its request while others waited for them."""
        account = self._tenant(tenant)
        account.counter += DECODE_WEIGHT * num_rows / account.weight

    def stats(self) -> list[TenantStats]:
        """All tenants by name."""
        return [
            TenantStats(name, t.weight, t.counter, t.num_waiting, t.num_prefill_tokens, t.num_decode_tokens)
            for name, t in sorted(self._tenants.items())
        ]

    def _tenant(self, name: str) -> Tenant:
        account = self._tenants.get(name)
        if account is None:
            if len(self._tenants) >= self._max_tenants:
                self._forget_idle()
            account = self._tenants[name] = Tenant(self._weights.get(name, self._default_weight))
        return account

    def _forget_idle(self) -> None:
        """Drop idle accounts that re-creating would give the same counter; names come from outside and have no end."""
        self._waiting = [(t.counter, name) for name, t in self._tenants.items() if t.num_waiting > 0]
        heapq.heapify(self._waiting)
        floor = self._floor()
        for name, account in list(self._tenants.items()):
            account.is_listed = account.num_waiting > 0
            is_idle = account.num_waiting == account.num_running == 0
            if is_idle and account.counter <= floor and name != self._last_tenant:
                del self._tenants[name]
        self._max_tenants = max(MIN_KEPT_TENANTS, 2 * len(self._tenants))

    def _floor(self) -> float:
        """What a tenant that comes back is lifted to."""
        heap = self._waiting
        while heap:
            counter, name = heap[0]
            account = self._tenants[name]
            if account.num_waiting == 0:
                heapq.heappop(heap)
                account.is_listed = False
            elif account.counter > counter:
                heapq.heapreplace(heap, (account.counter, name))
            else:
                return counter
        return 0.0 if self._last_tenant is None else self._tenants[self._last_tenant].counter
