"""Which worker runs which request: the attached sessions, the requests that wait for one, and the moves between them.

Policy is in placement.py, for requests that may be killing workers in isolation.py; here is the state it is applied to.
Called by the fleet alone, which owns the streams and is told of every request that cannot go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import islice

from control_plane.awake import AwakeClock
from control_plane.errors import MotetError
from control_plane.fleet import placement
from control_plane.fleet.deaths import is_given_up, is_suspect
from control_plane.fleet.endings import EndCause
from control_plane.fleet.failures import adapter_failed, broken, lost, never_fits, poisoned
from control_plane.fleet.isolation import Isolation, Verdict
from control_plane.fleet.jobs import Job
from control_plane.fleet.second_opinion import SecondOpinions
from control_plane.fleet.session import WorkerSession
from control_plane.fleet.settings import FleetSettings
from control_plane.fleet.shortlist import Shortlist
from control_plane.fleet.unfinished import UnfinishedJobs
from control_plane.scheduler.errors import RequestNeverFits
from control_plane.scheduler.types import Request, RequestId

logger = logging.getLogger(__name__)


class Dispatcher:
    """Where every unfinished request is."""

    def __init__(
        self,
        settings: FleetSettings,
        jobs: UnfinishedJobs,
        is_cached: Callable[[str], bool],
        awake: AwakeClock,
    ) -> None:
        """`is_cached`: whether the host cache has an adapter, by digest."""
        self._sessions: dict[str, WorkerSession] = {}
        self.sessions: Mapping[str, WorkerSession] = self._sessions  # by worker id, to be read by everybody
        # Invariant: a job is here exactly if it is unfinished and has no session. Arrival order.
        self._waiting: dict[RequestId, Job] = {}
        self.num_migrated = 0  # in all
        self._shortlist = Shortlist()
        self._jobs = jobs
        self._isolation = Isolation(self.sessions, jobs.by_id, settings, awake)
        self._opinions = SecondOpinions(self.sessions)
        self._costs = settings.placement
        self._is_cached = is_cached
        jobs.call_when_over(self._forget)

    @property
    def waiting(self) -> Mapping[RequestId, Job]:
        """Jobs that wait for a worker, in the order of their arrival."""
        return self._waiting

    # ---- to a worker ----

    def add(self, job: Job) -> MotetError | None:
        """Give a new job to a worker, or let it wait for one; an error if it fits none of those attached."""
        self._waiting[job.request.request_id] = job
        return self._place(job)

    def place_waiting(self, *, is_group_over: bool = False) -> None:
        """Give every waiting job to a worker that may take it; those that fit none fail.

        `is_group_over`: those that waited while a group of suspects ran go before the next one.
        """
        for job in self._isolation.in_turn(self._waiting.values(), is_group_over=is_group_over):
            if job.request.request_id not in self._waiting:
                continue  # what became of one before brought it to its end
            try:
                error = self._place(job)
            except Exception:  # a mistake of ours costs one request, not all that wait behind it
                logger.exception("request not placed request_id=%d", job.request.request_id)
                error = broken()
            if error is not None:
                self._jobs.fail(job, error)

    def _place(self, job: Job) -> MotetError | None:
        """Give a waiting job to a worker if one may take it; an error if it fits none of those attached."""
        sessions = self._isolation.open_to(job)
        if sessions and placement.has_failed_anywhere(job):
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
            if is_suspect(job):
                self._isolation.separate(job)  # it does not fit where its group runs
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
        self._isolation.placed(job)
        self._shortlist.placed(job.request, session.worker_id)
        del self._waiting[job.request.request_id]
        return True

    def _sort_waiting(self) -> None:
        self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[1].request.arrival_s))

    # ---- from a worker ----

    def open(self, session: WorkerSession) -> None:
        """Take a session up. It replaces the one that the worker had before."""
        self._sessions[session.worker_id] = session

    def close(self, session: WorkerSession) -> None:
        """Give nothing more to a session that is over."""
        if self.sessions.get(session.worker_id) is session:
            del self._sessions[session.worker_id]

    def take_back(self, session: WorkerSession, jobs: list[Job], *, is_final: bool) -> Verdict:
        """Move the jobs of a session that is closed, or fail those that may not go on; `is_final`: none may."""
        self._opinions.forget(session)
        computed = self._computed_by(session, jobs)
        self.num_migrated += len(computed)
        verdict = self._isolation.note_end(session, computed)
        moved = {request.request_id: request for request in session.scheduler.drain_requests()}
        failed: list[tuple[Job, MotetError]] = []
        for job in jobs:
            request = moved.get(job.request.request_id)
            job.session = None
            if request is None or is_final:
                failed.append((job, lost(job)))
                continue
            job.request = request
            if job is verdict.convicted:
                failed.append((job, poisoned(job)))
            elif self._has_hung_everywhere(session, job):
                failed.append((job, adapter_failed(request)))
            elif is_given_up(job):
                failed.append((job, lost(job)))
            else:
                self._waiting[request.request_id] = job
        for job, error in failed:
            self._jobs.fail(job, error)
        level = logging.WARNING if session.is_death else logging.INFO
        logger.log(level, "worker gone worker_id=%s epoch=%d requests=%d", session.worker_id, session.epoch, len(jobs))
        self._sort_waiting()
        self.place_waiting()
        return verdict

    def _has_hung_everywhere(self, session: WorkerSession, job: Job) -> bool:
        """Whether the session ended since the job's adapter did not load, as others did before."""
        if job.request.adapter is None or job.request.adapter.digest != session.hung_digest:
            return False
        job.failed_load_epochs.add(session.epoch)
        return len(job.failed_load_epochs) >= placement.MAX_LOAD_TRIES

    def _computed_by(self, session: WorkerSession, jobs: list[Job]) -> list[Job]:
        """The jobs of a session that may be the reason of its end."""
        if session.end_cause is EndCause.BROKEN_BOOKS:
            return jobs  # one that waited may be, too
        running = session.running_request_ids()
        return [job for job in jobs if job.request.request_id in running]

    def outlived(self, worker_id: str, epoch: int) -> None:
        """A worker attaches whose process outlived its session of this epoch: no request of it killed the worker."""
        if self._isolation.outlived(worker_id, epoch):
            self.place_waiting(is_group_over=True)

    def try_elsewhere(self, job: Job, request: Request) -> bool:
        """Move a job whose adapter its worker could not load to one where that did not fail, if there is one.

        `request` is the job's with every accepted token.
        """
        session = job.session
        assert session is not None, "a load failed for a request without a worker"
        job.failed_load_epochs.add(session.epoch)
        suited = placement.suited(job, self.sessions.values())
        is_tried_everywhere = all(other.epoch in job.failed_load_epochs for other in suited)
        if is_tried_everywhere or len(job.failed_load_epochs) >= placement.MAX_LOAD_TRIES:
            return False
        return self._move_on(job, request, "adapter not loaded")

    def ask_another(self, job: Job, request: Request) -> bool:
        """Move a job whose logits were not finite to another worker, if that may say more.

        `request` is the job's with every accepted token.
        """
        return self._opinions.ask(job, request) and self._move_on(job, request, "logits not finite")

    def refute(self, job: Job) -> None:
        """A job whose logits were not finite at other workers gained a token: end the sessions of sick ones."""
        for session in self._opinions.refute(job):
            session.end(EndCause.SICK, "logits were not finite for requests that another worker computed")

    def _move_on(self, job: Job, request: Request, reason: str) -> bool:
        """Take a job that its scheduler ended to another worker; whether that may be, now or later."""
        session = job.session
        assert session is not None, "a request without a worker moves on"
        job.request, job.session = request, None
        is_group_over = is_suspect(job) and self._isolation.separate(job)
        self._waiting[request.request_id] = job
        self._sort_waiting()
        error = self._place(job)
        if error is None:
            logger.info("request moves on request_id=%d epoch=%d: %s", request.request_id, session.epoch, reason)
        else:
            del self._waiting[request.request_id]
        if is_group_over:
            self.place_waiting(is_group_over=True)
        return error is None

    def _forget(self, job: Job) -> None:
        """The job is over: it waits no more, and its group of suspects, if any, goes on without it."""
        self._waiting.pop(job.request.request_id, None)
        if self._isolation.forget(job):
            self.place_waiting(is_group_over=True)

    def level(self) -> None:
        """Move requests that have not run and wait to a worker that has nothing waiting, where that is clearly faster.

        The latest arrivals go: those before them have their turn sooner where they are.
        """
        idle = {i: s for i, s in self.sessions.items() if s.scheduler.num_waiting == 0 and self._isolation.is_open(s)}
        if not idle:
            return
        for session in list(self.sessions.values()):
            if session.scheduler.num_waiting == 0:
                continue
            for request_id in list(islice(reversed(session.scheduler.unstarted_ids), placement.MAX_LEVELLED)):
                job = self._jobs.by_id.get(request_id)
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
        self._waiting[request.request_id] = job
        return True

    # ---- suspects ----

    def is_isolated(self, job: Job) -> bool:
        """Whether the job is a suspect that runs in its group."""
        return self._isolation.is_isolated(job)

    def judge(self) -> None:
        """Clear the suspects that have come far enough."""
        if self._isolation.clear_who_came_past():
            self.place_waiting(is_group_over=True)

    def empty_for_suspects(self) -> None:
        """Let suspects that wait have a worker soon: close one, and move away what has no row there."""
        session = self._isolation.to_empty()
        if session is not None:
            for request_id in list(session.scheduler.request_ids):
                job = self._jobs.by_id.get(request_id)
                if job is not None and job.session is session:
                    self._take_from(session, job)
            self._sort_waiting()
        if self._isolation.is_awaited:
            self.place_waiting()
