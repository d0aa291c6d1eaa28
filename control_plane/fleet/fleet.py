"""All workers as one: what the API and the worker service call.

Joins nothing and decides nothing itself: intake.py takes requests on, dispatcher.py places them, delivery.py carries
their tokens, attach.py has the sessions (assembly.py joins them). Everything happens on one event loop; time comes from
the clock, and whatever is due by time is done in `tick`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

from motet.v1.status import QueueStatus, WorkerStatus

from contract.v1 import plan_pb2
from control_plane.errors import ShuttingDown
from control_plane.fleet.assembly import FleetParts
from control_plane.fleet.requests.quotas import TenantUse
from control_plane.fleet.requests.streams import JobStream
from control_plane.fleet.workers.session import WorkerSession
from control_plane.registry.model.served_modules import WorkerReport
from control_plane.scheduler.types import AdapterRef, Request, RequestId

logger = logging.getLogger(__name__)

TICK_S = 0.1
LOAD_PINNED_S = 1.0  # between looks for room for pinned adapters
MAX_REPORTED_TENANTS = 256  # in a status: names come from outside and have no end


class Fleet:
    """Every attached worker and every unfinished request. Make it inside a running event loop."""

    def __init__(self, parts: FleetParts, *, ticks_by_itself: bool = True) -> None:
        self._settings = parts.settings
        self._clock = parts.clock
        self._quotas = parts.quotas
        self._jobs = parts.jobs
        self._sessions = parts.sessions.by_id
        self._taking = parts.sessions.taking
        self._dispatcher = parts.dispatcher
        self._migration = parts.migration
        self._rebalancer = parts.rebalancer
        self._slow_readers = parts.slow_readers
        self._workers = parts.workers
        self.unloads = parts.unloads
        self.preloads = parts.preloads  # loads of adapters that no request waits for
        self.residency = parts.residency
        self.drains = parts.drains
        self.active_adapters = parts.active_adapters
        self.workload = parts.workload
        self._load_pinned_at_s = 0.0
        self.on_workers_changed(parts.residency.load_pinned)
        self._intake = parts.intake
        self._request_ids = itertools.count(1)
        self._shutdown_ends_s: float | None = None
        self._tick_handle: asyncio.TimerHandle | None = None
        if ticks_by_itself:
            self._tick_later()

    def __repr__(self) -> str:
        workers, num_waiting = sorted(self._sessions), len(self._dispatcher.waiting)
        return f"Fleet(workers={workers}, requests={len(self._jobs.by_id)}, waiting={num_waiting})"

    # ---- requests ----

    def next_request_id(self) -> RequestId:
        """An id that no other request of this process has."""
        return RequestId(next(self._request_ids))

    def submit(self, request: Request) -> JobStream:
        """Take a request on; its tokens come through the stream.

        Raises ShuttingDown, NoWorker, QueueFull, QuotaExceeded, QuotaTooSmall, ContextTooLong or AdapterTooLarge.
        """
        return self._intake.submit(request)

    def account_of(self, tenant: str, host: str, *, is_authenticated: bool = False) -> str:
        """The account that is charged for a request that a host sends for a tenant, as TenantTable.account_of says."""
        return self._settings.tenants.account_of(tenant, host, is_authenticated=is_authenticated)

    def check_room(self, account: str, num_reserved_tokens: int) -> None:
        """Raise what `submit` would raise now for any request of the account that may generate this many tokens.

        A caller whose prompt is costly to make is refused before it makes the prompt. `submit` may still refuse it.
        """
        self._intake.check_room(account, num_reserved_tokens)

    # ---- workers ----

    @property
    def num_workers(self) -> int:
        """Workers that take requests. One that hangs is detached, so above 0 requests can be expected to run."""
        return len(self._taking)

    def attach(self, hello: plan_pb2.Hello, refusal: Callable[[], str | None] = lambda: None) -> WorkerSession:
        """A session for the worker that sent this Hello. An earlier session of the same process ends.

        The session ends once `refusal`, which is called often, gives a reason.

        Raises ShuttingDown, InvalidRequest, BaseModelMismatch, WorkerQuarantined, WorkerIdTaken or StaleControlPlane.
        """
        return self._workers.attach(hello, refusal)

    def on_workers_changed(self, callback: Callable[[], None]) -> None:
        """Have `callback` called after a worker attached or was lost."""
        self._workers.call_when_changed(callback)

    def reports(self) -> list[WorkerReport]:
        """What each attached worker serves."""
        return self._workers.reports()

    # ---- adapters ----

    def placements(self, digest: str) -> list[str]:
        """Ids of the workers that hold the adapter's weights."""
        return self._workers.placements(digest)

    def pin(self, ref: AdapterRef, account: str = "") -> None:
        """Load an adapter wherever there is room, and keep it there, also on workers that attach later.

        The loads count for the account.
        """
        self._workers.pin(ref.digest)
        self.residency.pin(ref, account)

    def unpin(self, digest: str) -> None:
        """Allow the eviction of an adapter again. It need not be pinned."""
        self.residency.unpin(digest)
        self._workers.unpin(digest)

    async def unload(self, digest: str) -> None:
        """Unload an adapter from every worker. Returns once nothing uses it, or once `cancel_unload` was called."""
        await self.unloads.unload(digest)

    def cancel_unload(self, digest: str) -> None:
        """Stop unloading an adapter: another name uses it now."""
        self.unloads.cancel_unload(digest)

    # ---- time ----

    def tick(self) -> None:
        """Do what is due: heartbeats, deadlines, slow readers, the grace without workers, the end of a shutdown."""
        now_s = self._clock()
        self._workers.tick()
        guard = self._jobs.guard
        guard(self._dispatcher.clear_survivors)  # a beam search gains tokens without an output
        guard(self._dispatcher.empty_for_suspects)
        guard(self._rebalancer.rebalance)
        self._intake.end_overdue(now_s)
        self._slow_readers.end_overdue()
        if now_s >= self._load_pinned_at_s:
            self._load_pinned_at_s = now_s + LOAD_PINNED_S
            guard(self.residency.load_pinned)
        if self._shutdown_ends_s is not None and now_s >= self._shutdown_ends_s:
            self._jobs.stop_waiting()

    def _tick_later(self) -> None:
        self._tick_handle = asyncio.get_running_loop().call_later(TICK_S, self._tick_and_again)

    def _tick_and_again(self) -> None:
        try:
            self.tick()
        except Exception:  # the loop's edge: the next tick must come
            logger.exception("tick failed")
        self._tick_later()

    # ---- the end ----

    async def shut_down(self, timeout_s: float) -> None:
        """Take no further request, and return once every request has ended. After `timeout_s` the rest is ended."""
        self._intake.close()
        self._shutdown_ends_s = self._clock() + timeout_s
        if timeout_s > 0:
            await self._jobs.all_over()
        for job in list(self._jobs.by_id.values()):
            self._jobs.cancel(job, ShuttingDown("the server shut down before the request ended; send it again"))

    async def close(self) -> None:
        """End every request and session; workers reconnect to the next control plane that listens."""
        await self.shut_down(0)
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        await self._workers.close()

    # ---- numbers ----

    def worker_snapshots(self) -> list[WorkerStatus]:
        """Every attached worker, ordered by id."""
        return [self._sessions[worker_id].snapshot() for worker_id in sorted(self._sessions)]

    @property
    def num_tenants(self) -> int:
        """Tenants that sent requests lately."""
        return self._quotas.num_tenants

    def tenant_use(self, *, only: str | None = None) -> list[TenantUse]:
        """The busiest tenants, ordered by name; or this one account, also where it has sent nothing yet."""
        return self._quotas.busiest(MAX_REPORTED_TENANTS) if only is None else [self._quotas.use_of(only)]

    def queue_snapshot(self) -> QueueStatus:
        """Requests over all workers."""
        return QueueStatus(
            num_requests=len(self._jobs.by_id),
            num_waiting=self._intake.num_waiting,
            num_running=sum(s.scheduler.stats().num_running for s in self._sessions.values()),
            num_accepted=self._intake.num_accepted,
            num_finished=self._jobs.num_finished,
            num_rejected=self._intake.num_rejected,
            num_migrated=self._migration.num_migrated,
        )
