"""Takes requests to another worker where theirs is lost, cannot load their adapter, or has non-finite logits."""

from __future__ import annotations

import logging

from control_plane.errors import MotetError
from control_plane.fleet.placement import placement
from control_plane.fleet.placement.dispatcher import Dispatcher
from control_plane.fleet.placement.isolation import EndFinding, PoisonIsolation
from control_plane.fleet.placement.second_check import SecondChecks
from control_plane.fleet.requests.deaths import is_given_up, is_suspect
from control_plane.fleet.requests.failures import adapter_failed, lost, poisoned
from control_plane.fleet.requests.jobs import Job
from control_plane.fleet.requests.unfinished import UnfinishedJobs
from control_plane.fleet.workers.endings import EndCause
from control_plane.fleet.workers.session import WorkerSession
from control_plane.fleet.workers.sessions import SessionTable
from control_plane.scheduler.types import Request

logger = logging.getLogger(__name__)


class Migration:
    """Decides which requests may go on, and hands them to the dispatcher."""

    def __init__(
        self, jobs: UnfinishedJobs, sessions: SessionTable, isolation: PoisonIsolation, dispatcher: Dispatcher
    ) -> None:
        self._jobs = jobs
        self._sessions = sessions.taking
        self._isolation = isolation
        self._dispatcher = dispatcher
        self._checks = SecondChecks(self._sessions)
        self.num_migrated = 0  # requests that were being computed when their worker was lost, in all

    def take_back(self, session: WorkerSession, jobs: list[Job], *, is_final: bool) -> EndFinding:
        """Move the jobs of a session that is closed, and fail those that may not go on; `is_final`: none may."""
        self._checks.forget(session)
        computed = self._computed_by(session, jobs)
        self.num_migrated += len(computed)
        finding = self._isolation.note_end(session, computed)
        moved = {request.request_id: request for request in session.scheduler.take_requests()}
        failed: list[tuple[Job, MotetError]] = []
        for job in jobs:
            request = moved.get(job.request.request_id)
            job.leave_worker(request)
            if request is None or is_final:
                failed.append((job, lost(job)))
                continue
            if job is finding.poison:
                failed.append((job, poisoned(job)))
            elif self._note_hung_load(session, job):
                failed.append((job, adapter_failed(request)))
            elif is_given_up(job):
                failed.append((job, lost(job)))
            else:
                self._dispatcher.let_wait(job)
        for job, error in failed:
            self._jobs.fail(job, error)
        level = logging.WARNING if session.is_death else logging.INFO
        logger.log(level, "worker gone worker_id=%s epoch=%d requests=%d", session.worker_id, session.epoch, len(jobs))
        self._dispatcher.sort_waiting()
        self._dispatcher.place_waiting()
        return finding

    def outlived(self, worker_id: str, epoch: int) -> None:
        """A worker attaches whose process outlived its session of this epoch: no request of it killed the worker."""
        if self._isolation.outlived(worker_id, epoch):
            self._dispatcher.place_waiting(is_group_over=True)

    def try_elsewhere(self, job: Job, request: Request, *, is_crowded_out: bool = False) -> bool:
        """Move a job to another worker because its own could not load the adapter. False if none is left to try.

        `request` is the job's with every accepted token. `is_crowded_out`: pinned adapters left no room there.
        """
        session = job.session
        assert session is not None, "a load failed for a request without a worker"
        job.note_failed_load(session.epoch, is_crowded_out=is_crowded_out)
        suited = placement.suited(job, self._sessions.values())
        is_tried_everywhere = all(other.epoch in job.failed_load_epochs for other in suited)
        if is_tried_everywhere or job.num_failed_loads >= placement.MAX_LOAD_TRIES:
            return False
        return self._move_on(job, request, "adapter not loaded")

    def check_elsewhere(self, job: Job, request: Request) -> bool:
        """Move a job whose logits were not finite to another worker. False if no other worker may tell more.

        `request` is the job's with every accepted token.
        """
        return self._checks.start(job, request) and self._move_on(job, request, "logits not finite")

    def on_finite(self, job: Job) -> None:
        """A job whose logits were not finite at other workers gained a token: end the sessions of sick ones."""
        for session in self._checks.on_finite(job):
            session.end(EndCause.SICK, "logits were not finite for requests that another worker computed")

    def _move_on(self, job: Job, request: Request, reason: str) -> bool:
        """Take a job that its scheduler ended to another worker, now or later. False if it fits none."""
        session = job.session
        assert session is not None, "a request without a worker moves on"
        job.leave_worker(request)
        is_group_over = is_suspect(job) and self._isolation.separate(job)
        self._dispatcher.let_wait(job)
        self._dispatcher.sort_waiting()
        error = self._dispatcher.place(job)
        if error is None:
            logger.info("request moves on request_id=%d epoch=%d: %s", request.request_id, session.epoch, reason)
        else:
            self._dispatcher.stop_waiting(job)
        if is_group_over:
            self._dispatcher.place_waiting(is_group_over=True)
        return error is None

    def _note_hung_load(self, session: WorkerSession, job: Job) -> bool:
        """Note if a load of the job's adapter hung and ended the session. Returns whether no further try is left."""
        if all(ref.digest != session.hung_digest for ref in job.request.adapters):
            return False
        job.note_failed_load(session.epoch)
        return job.num_failed_loads >= placement.MAX_LOAD_TRIES

    def _computed_by(self, session: WorkerSession, jobs: list[Job]) -> list[Job]:
        """The jobs of a session that may have caused its end."""
        if session.end_cause is EndCause.INTERNAL_ERROR:
            return jobs  # a job that waited may be the reason, too
        running = session.steps.running_request_ids
        return [job for job in jobs if job.request.request_id in running]
