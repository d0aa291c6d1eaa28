"""Whether the fleet takes a request on: shutdown, the grace without workers, shares of a full queue, quotas."""

from __future__ import annotations

from collections import Counter
from functools import partial

from control_plane.errors import DeadlineExceeded, NoWorker, QueueFull, ShuttingDown
from control_plane.fleet.delivery import Delivery
from control_plane.fleet.placement.dispatcher import Dispatcher
from control_plane.fleet.requests.failures import no_worker_came
from control_plane.fleet.requests.jobs import Job
from control_plane.fleet.requests.quotas import TenantQuotas
from control_plane.fleet.requests.streams import JobStream
from control_plane.fleet.requests.unfinished import UnfinishedJobs
from control_plane.fleet.settings import FleetSettings
from control_plane.fleet.worker_waits import WorkerWaits
from control_plane.fleet.workers.sessions import SessionTable
from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.types import Request


class Intake:
    """Where requests come in."""

    def __init__(
        self,
        settings: FleetSettings,
        quotas: TenantQuotas,
        counters: VirtualCounters,
        jobs: UnfinishedJobs,
        sessions: SessionTable,
        dispatcher: Dispatcher,
        delivery: Delivery,
        waits: WorkerWaits,
    ) -> None:
        self._settings = settings
        self._quotas = quotas
        self._counters = counters  # of all sessions
        self._jobs = jobs
        self._sessions = sessions.by_id
        self._dispatcher = dispatcher
        self._delivery = delivery
        self._waits = waits
        self._is_closed = False
        self.num_accepted = 0  # in all
        self.num_rejected = 0  # for want of room in the queue, in all

    def submit(self, request: Request) -> JobStream:
        """Take a request on. Raises what `Fleet.submit` raises."""
        self._check_admission(request.account)
        stream = self._delivery.stream_for(request)
        job = Job(request, stream, self._quotas.admit(request), self._waits.now_s())
        self._jobs.add(job)
        try:
            error = self._dispatcher.add(job)
            if error is not None:
                raise error
        except BaseException:
            self._jobs.withdraw(job)
            raise
        self.num_accepted += 1
        return stream

    def check_room(self, account: str, num_reserved_tokens: int) -> None:
        """Raise what `submit` would raise at present for any request of the account that may generate this many."""
        self._check_admission(account)
        self._quotas.check(account, 1, num_reserved_tokens)

    def close(self) -> None:
        """Take no further request."""
        self._is_closed = True

    def end_overdue(self, now_s: float) -> None:
        """Fail the requests that wait for a worker beyond their deadline, or beyond the grace without workers."""
        for job in list(self._dispatcher.waiting.values()):
            if job.request.deadline_s is not None and now_s >= job.request.deadline_s:
                error = DeadlineExceeded("the deadline passed before a worker could take the request")
                self._jobs.guard(partial(self._jobs.fail, job, error), job)
        for job in list(self._dispatcher.waiting.values()):
            if self._waits.is_over(job.accepted_s):
                no_worker = no_worker_came(job, self._waits.limit_s)
                self._jobs.guard(partial(self._jobs.fail, job, no_worker), job)

    @property
    def num_waiting(self) -> int:
        """Accepted requests that hold no row of a worker."""
        num_placed = sum(s.scheduler.num_waiting for s in self._sessions.values())
        return len(self._dispatcher.waiting) + num_placed

    def _check_admission(self, account: str) -> None:
        if self._is_closed:
            raise ShuttingDown()
        if not self._waits.are_accepted:
            raise NoWorker("no worker takes requests; try again in a moment")
        if not self._is_queue_full():
            return
        settings = self._settings
        for session in list(self._sessions.values()):
            session.pump_if_due()  # requests that arrived in this turn of the loop may run already
        if self.num_waiting >= settings.max_waiting_requests:
            waiting = Counter(self._counters.num_waiting_by_tenant)
            waiting.update(job.request.account for job in self._dispatcher.waiting.values())
            self._check_share(account, waiting, settings.max_waiting_requests, "requests")
        if self._quotas.num_queued_tokens >= settings.max_waiting_tokens:
            waiting = Counter(self._quotas.queued_tokens_by_tenant())
            self._check_share(account, waiting, settings.max_waiting_tokens, "prompt tokens")

    def _is_queue_full(self) -> bool:
        has_many_tokens = self._quotas.num_queued_tokens >= self._settings.max_waiting_tokens
        return has_many_tokens or self.num_waiting >= self._settings.max_waiting_requests

    def _check_share(self, account: str, waiting: Counter[str], limit: int, what: str) -> None:
        """Raise QueueFull if the account holds its share of the full queue: `limit` over the number of accounts.

        So an account that keeps the queue full keeps no other account out. Shares shrink as accounts come, and are zero
        beyond `limit` accounts. At most limit x (1 + ln limit) wait, plus what the last request of each is beyond it.
        """
        share = limit // len(waiting.keys() | {account})  # not named: it shows how many tenants wait
        if waiting[account] >= share:
            self.num_rejected += 1
            raise QueueFull(
                f"the queue is full: {limit} {what} wait, and tenant {account} has its equal part of them with "
                f"{waiting[account]}; try again in a moment"
            )
