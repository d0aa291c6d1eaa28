"""Which worker runs which request: the attached sessions, the requests that wait for one, and the moves between them.

Policy is in placement.py, for requests that may be killing workers in trials.py; here is the state it is applied to.
Called by the fleet alone, which owns the streams and is told of every request that cannot go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from control_plane.awake import AwakeClock
from control_plane.errors import MotetError
from control_plane.fleet import placement
from control_plane.fleet.failures import lost, never_fits, poisoned
from control_plane.fleet.jobs import Job
from control_plane.fleet.session import WorkerSession
from control_plane.fleet.settings import FleetSettings
from control_plane.fleet.shortlist import Shortlist
from control_plane.fleet.trials import Trials, is_cleared, is_suspect
from control_plane.scheduler.errors import RequestNeverFits
from control_plane.scheduler.types import Request, RequestId

logger = logging.getLogger(__name__)


class Dispatcher:
    """Where every unfinished request is."""

    def __init__(
        self,
        settings: FleetSettings,
        is_cached: Callable[[str], bool],
        fail: Callable[[Job, MotetError], None],
        awake: AwakeClock,
    ) -> None:
        self.sessions: dict[str, WorkerSession] = {}  # by worker id
        # Invariant: a job is here exactly if it is unfinished and has no session. Arrival order.
        self.waiting: dict[RequestId, Job] = {}
        self.num_migrated = 0  # in all
        self._shortlist = Shortlist()
        self._trials = Trials(self.sessions, settings, awake)
        self._costs = settings.placement
        self._is_cached = is_cached  # whether the host cache has an adapter
        self._fail = fail  # ends a job; calls `forget` for it

    # ---- to a worker ----

    def add(self, job: Job) -> MotetError | None:
        """Give a new job to a worker, or let it wait for one; an error if it fits none of those attached."""
        self.waiting[job.request.request_id] = job
        return self._place(job)

    def place_waiting(self, *, is_trial_over: bool = False) -> None:
        """Give every waiting job to a worker that may take it; those that fit none fail.

        `is_trial_over`: those that waited for that go before the next suspect.
        """
        for job in self._trials.in_turn(list(self.waiting.values()), is_trial_over=is_trial_over):
            error = self._place(job)
            if error is not None:
                self._fail(job, error)

    def _place(self, job: Job) -> MotetError | None:
        """Give a waiting job to a worker if one may take it; an error if it fits none of those attached."""
        sessions = self._trials.open_to(job)
        if job.failed_load_epochs and sessions:
            suited = {session.worker_id for session in placement.suited(job, self.sessions.values())}
            sessions = {i: s for i, s in sessions.items() if i in suited}
        if sessions:
            need = placement.need_of(job.request, self._costs, self._is_cached)
            shortlist = self._shortlist.choose(sessions, job.request)
            for session in placement.by_preference(shortlist, need, self._costs):
                if self._try(session, job):
                    return None
            for session in sessions.values():
                if session not in shortlist and self._try(session, job):  # of many any other that can take it
                    return None
        refusal: RequestNeverFits | None = None
        for session in self.sessions.values():
            refusal = session.refusal(job.request)
            if refusal is None:
                return None  # it waits for this one
        return never_fits(job.request, refusal) if refusal is not None else None

    def _try(self, session: WorkerSession, job: Job) -> bool:
        """Give a waiting job to this session; False if it can never run there."""
        try:
            session.add(job.request)
        except RequestNeverFits:
            return False
        job.session, job.num_tokens_here = session, 0
        if job.full_since_s is not None:
            session.pause(job.request.request_id)
        if is_suspect(job):
            self._trials.begin(job)
        self._shortlist.placed(job.request, session.worker_id)
        del self.waiting[job.request.request_id]
        return True

    def _sort_waiting(self) -> None:
        self.waiting = dict(sorted(self.waiting.items(), key=lambda item: item[1].request.arrival_s))

    # ---- from a worker ----

    def close(self, session: WorkerSession) -> None:
        """Give nothing more to a session that is over."""
        if self.sessions.get(session.worker_id) is session:
            del self.sessions[session.worker_id]
            self._trials.note_lost(session)

    def take_back(self, session: WorkerSession, jobs: list[Job], *, is_final: bool) -> None:
        """Move the jobs of a session that is closed, or fail those that may not go on; `is_final`: none may."""
        suspect = self._trials.break_off(session)
        running = session.running_request_ids()
        is_verdict = session.is_death and suspect is not None and suspect.request.request_id in running
        moved = {request.request_id: request for request in session.scheduler.drain_requests()}
        for job in jobs:
            request = moved.get(job.request.request_id)
            job.session = None
            if request is None or is_final:
                self._fail(job, lost(job))
                continue
            job.request = request
            if request.request_id in running:
                self.num_migrated += 1
                if job is suspect or not is_verdict:
                    job.num_migrations += 1
                    job.num_deaths += session.is_death
            if job is suspect and is_verdict:
                self._fail(job, poisoned(job))
            elif job.num_migrations > placement.MAX_MIGRATIONS:
                self._fail(job, lost(job))
            else:
                self.waiting[request.request_id] = job
        level = logging.WARNING if session.is_death else logging.INFO
        logger.log(level, "worker gone worker_id=%s epoch=%d requests=%d", session.worker_id, session.epoch, len(jobs))
        self._sort_waiting()
        self.place_waiting()

    def try_elsewhere(self, job: Job, request: Request) -> bool:
        """Move a job whose adapter its worker could not load to one where that did not fail, if there is one.

        `request` is the job's with every accepted token.
        """
        session = job.session
        assert session is not None, "a load failed for a request without a worker"
        job.failed_load_epochs.add(session.epoch)
        suited = placement.suited(job, self.sessions.values())
        is_tried_everywhere = all(other.epoch in job.failed_load_epochs for other in suited)
        if is_tried_everywhere or len(job.failed_load_epochs) > placement.MAX_MIGRATIONS:
            return False
        was_on_trial = self._trials.is_on_trial(job)
        job.request, job.session = request, None
        if was_on_trial:
            self._trials.break_off(session)
        self.waiting[request.request_id] = job
        self._sort_waiting()
        error = self._place(job)
        if error is None:
            logger.info(
                "request tried elsewhere request_id=%d epoch=%d: adapter not loaded", request.request_id, session.epoch
            )
        else:
            del self.waiting[request.request_id]
        if was_on_trial:
            self.place_waiting(is_trial_over=True)
        return error is None

    def forget(self, job: Job) -> None:
        """The job is over: it waits no more, and its trial, if any, has ended."""
        self.waiting.pop(job.request.request_id, None)
        if self._trials.is_on_trial(job):
            self._end_trial(job)
        self._trials.forget(job)

    def level(self, jobs: Mapping[RequestId, Job]) -> None:
        """Move requests that have not run and wait to a worker that has nothing waiting, where that is clearly faster.

        The latest arrivals go: those before them have their turn sooner where they are.
        """
        idle = {i: s for i, s in self.sessions.items() if s.scheduler.num_waiting == 0 and self._trials.is_open(s)}
        if not idle:
            return
        for session in list(self.sessions.values()):
            if session.scheduler.num_waiting == 0:
                continue
            for request_id in session.scheduler.latest_unstarted(placement.MAX_LEVELLED):
                job = jobs.get(request_id)
                if job is None or job.session is not session or is_suspect(job):
                    continue
                target = self._faster(job, session, idle)
                if target is not None:
                    self._move(job, session, target)
                elif not job.failed_load_epochs:
                    break  # the others of this worker are served sooner still

    def _faster(self, job: Job, session: WorkerSession, idle: dict[str, WorkerSession]) -> WorkerSession | None:
        """The best of the idle sessions for a job that waits on `session`, if it pays to move it there."""
        if job.failed_load_epochs:
            idle = {i: s for i, s in idle.items() if s.epoch not in job.failed_load_epochs}
        if not idle:
            return None
        need = placement.need_of(job.request, self._costs, self._is_cached)
        shortlist = self._shortlist.choose(idle, job.request)
        cost_ms, target = min(
            ((placement.price(other, need, self._costs), other) for other in shortlist),
            key=lambda priced: (priced[0], priced[1].worker_id),
        )
        return target if cost_ms < placement.LEVEL_SHARE * placement.price(session, need, self._costs) else None

    def _move(self, job: Job, session: WorkerSession, target: WorkerSession) -> None:
        is_taken = self._take_from(session, job)
        assert is_taken, f"request {job.request.request_id} has run where it has not started"
        if not self._try(target, job):
            error = self._place(job)
            assert error is None, "a request that a worker had taken fits none any more"

    def _take_from(self, session: WorkerSession, job: Job) -> bool:
        """Let a job that has no row on the session wait for another; whether it has none."""
        request = session.withdraw(job.request.request_id)
        if request is None:
            return False
        job.request, job.session = request, None
        self.waiting[request.request_id] = job
        return True

    # ---- trials ----

    def is_on_trial(self, job: Job) -> bool:
        """Whether the job is a suspect on trial."""
        return self._trials.is_on_trial(job)

    def judge(self, plan_depth: int) -> None:
        """Clear the suspects on trial that have come far enough."""
        for suspect in self._trials.on_trial():
            if is_cleared(suspect, plan_depth):
                self._end_trial(suspect)

    def _end_trial(self, job: Job) -> None:
        self._trials.end(job)
        self.place_waiting(is_trial_over=True)

    def empty_for_suspects(self, jobs: Mapping[RequestId, Job]) -> None:
        """Let suspects that wait have a worker soon: close one, and move away what has no row there."""
        suspects = [job for job in self.waiting.values() if is_suspect(job)]
        session = self._trials.to_empty(suspects)
        if session is not None:
            for request_id in list(session.scheduler.groups):
                job = jobs.get(request_id)
                if job is not None and job.session is session:
                    self._take_from(session, job)
            self._sort_waiting()
        if suspects:
            self.place_waiting()
