"""Gives requests to workers, and keeps those that wait for one.

Which worker is best is decided in placement.py; which workers are closed because a request may be killing workers, in
isolation.py. rebalance.py and migration.py move requests from one worker to another through this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from control_plane.errors import MotetError
from control_plane.fleet.placement import placement
from control_plane.fleet.placement.isolation import PoisonIsolation
from control_plane.fleet.placement.shortlist import Shortlist
from control_plane.fleet.requests.deaths import is_suspect
from control_plane.fleet.requests.failures import broken, never_fits
from control_plane.fleet.requests.jobs import Job
from control_plane.fleet.requests.unfinished import UnfinishedJobs
from control_plane.fleet.settings import PlacementCosts
from control_plane.fleet.workers.session import WorkerSession
from control_plane.fleet.workers.sessions import SessionTable
from control_plane.scheduler.errors import RequestNeverFits
from control_plane.scheduler.types import RequestId

logger = logging.getLogger(__name__)


class Dispatcher:
    """The requests that wait for a worker, and the ways out of that."""

    def __init__(
        self,
        costs: PlacementCosts,
        is_cached: Callable[[str], bool],
        jobs: UnfinishedJobs,
        sessions: SessionTable,
        isolation: PoisonIsolation,
        shortlist: Shortlist,
    ) -> None:
        """`is_cached`: whether the host cache has an adapter, by digest."""
        # Invariant: a job is here exactly if it is unfinished and has no session. In the order of arrival.
        self._waiting: dict[RequestId, Job] = {}
        self._costs = costs
        self._is_cached = is_cached
        self._jobs = jobs
        self._sessions = sessions.taking
        self._isolation = isolation
        self._shortlist = shortlist
        jobs.call_when_over(self._forget)

    def __repr__(self) -> str:
        return f"Dispatcher(waiting={len(self._waiting)})"

    @property
    def waiting(self) -> Mapping[RequestId, Job]:
        """Jobs that wait for a worker, in the order of their arrival."""
        return self._waiting

    # ---- to a worker ----

    def add(self, job: Job) -> MotetError | None:
        """Give a new job to a worker, or let it wait for one. An error if it fits none of the attached workers."""
        self._waiting[job.request.request_id] = job
        return self.place(job)

    def let_wait(self, job: Job) -> None:
        """Let a job that lost its worker wait for another one, behind all others until `sort_waiting`."""
        assert job.session is None, "a job with a worker waits for one"
        self._waiting[job.request.request_id] = job

    def sort_waiting(self) -> None:
        """Put the jobs that wait in the order of their arrival."""
        self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[1].request.arrival_s))

    def stop_waiting(self, job: Job) -> None:
        """Take a job out of those that wait: its caller ends it."""
        del self._waiting[job.request.request_id]

    def place_waiting(self, *, is_group_over: bool = False) -> None:
        """Give every waiting job to a worker that may take it. Jobs that fit no worker fail.

        `is_group_over`: the jobs that waited while a group of suspects ran go before the next group.
        """
        for job in self._isolation.in_turn(self._waiting.values(), is_group_over=is_group_over):
            if job.request.request_id not in self._waiting:
                continue  # it ended as a consequence of what happened to a job before it
            try:
                error = self.place(job)
            except Exception:  # a mistake of ours costs one request, not all that wait behind it
                logger.exception("request not placed request_id=%d", job.request.request_id)
                error = broken()
            if error is not None:
                self._jobs.fail(job, error)

    def place(self, job: Job) -> MotetError | None:
        """Give a waiting job to a worker if one may take it. An error if it fits none of the attached workers."""
        sessions = self._isolation.open_to(job)
        if sessions and placement.has_failed_anywhere(job):
            suited = {session.worker_id for session in placement.suited(job, self._sessions.values())}
            sessions = {i: s for i, s in sessions.items() if i in suited}
        if sessions:
            need = placement.need_of(job.request, self._costs, self._is_cached)
            shortlist = self._shortlist.choose(sessions, job.request)
            for session in placement.by_preference(shortlist, need, self._costs):
                if self.give(job, session):
                    return None
            for session in sessions.values():  # none of the shortlist can take it
                if session not in shortlist and self.give(job, session):
                    return None
            if is_suspect(job):
                self._isolation.separate(job)  # it does not fit where its group runs
        refusal: RequestNeverFits | None = None
        for session in self._sessions.values():
            refusal = session.refusal(job.request)
            if refusal is None:
                return None  # it waits for this one
        return never_fits(job.request, refusal) if refusal is not None else None

    def give(self, job: Job, session: WorkerSession) -> bool:
        """Give a waiting job to this session. False, and it waits on, if it can never run there."""
        try:
            session.add(job.request)
        except RequestNeverFits:
            return False
        job.join(session)
        if job.paused_since_s is not None:
            session.pause(job.request.request_id)
        self._isolation.placed(job)
        self._shortlist.placed(job.request, session.worker_id)
        del self._waiting[job.request.request_id]
        return True

    # ---- from a worker ----

    def take_from_worker(self, job: Job) -> bool:
        """Let a job that has no row at its worker wait for another worker. False, and it stays, if it has one."""
        assert job.session is not None, "a request without a worker is taken from one"
        request = job.session.withdraw(job.request.request_id)
        if request is None:
            return False
        job.leave_worker(request)
        self.let_wait(job)
        return True

    def move(self, job: Job, target: WorkerSession) -> None:
        """Move a job that waits for a row at its worker to another worker; to any, if it can never run there."""
        is_taken = self.take_from_worker(job)
        assert is_taken, f"request {job.request.request_id} has a row where it waits for one"
        if not self.give(job, target):
            error = self.place(job)
            assert error is None, "a request that a worker had taken now fits none"

    # ---- suspects ----

    def is_isolated(self, job: Job) -> bool:
        """Whether the job is a suspect that runs in its group."""
        return self._isolation.is_isolated(job)

    def clear_survivors(self) -> None:
        """Clear the suspects that have come far enough."""
        if self._isolation.clear_survivors():
            self.place_waiting(is_group_over=True)

    def empty_for_suspects(self) -> None:
        """Close a worker to others where suspects wait for one, and move away the requests that have no row there."""
        session = self._isolation.worker_to_empty()
        if session is not None:
            for request_id in list(session.scheduler.request_ids):
                job = self._jobs.by_id.get(request_id)
                if job is not None and job.session is session:
                    self.take_from_worker(job)
            self.sort_waiting()
        if self._isolation.is_awaited:
            self.place_waiting()

    def _forget(self, job: Job) -> None:
        """The job is over: remove it from those that wait, and from its group of suspects."""
        self._waiting.pop(job.request.request_id, None)
        if self._isolation.forget(job):
            self.place_waiting(is_group_over=True)
